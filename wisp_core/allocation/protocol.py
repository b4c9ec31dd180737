"""What an allocation policy is."""

from __future__ import annotations

from typing import Protocol, TypeVar

from wisp_core.contracts import Decision, ReplicaSnapshot

StateT = TypeVar("StateT")


class AllocationPolicy(Protocol[StateT]):
    """Divides one replica's pooled budget between experts and KV.

    A policy is pure: no clock, I/O, randomness or logging, so that the same object runs in the policy service and in
    a simulator. What it must remember between epochs is its ``state``, kept by the caller, one per replica and
    engine start. A decision whose split equals ``snapshot.split`` is a hold. Its reason is shown to operators.
    """

    def initial_state(self) -> StateT:
        """The state before the first decision for a replica."""
        ...

    def decide(self, snapshot: ReplicaSnapshot, state: StateT) -> tuple[Decision, StateT]:
        """The split that the replica should have, and the state for the next epoch."""
        ...
