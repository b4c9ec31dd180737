"""A split that never follows the work: the baseline, and the way to pin a replica."""

from __future__ import annotations

from dataclasses import dataclass

from wisp_core.allocation.solver import clamp, explain_infeasible, largest_cap_within
from wisp_core.contracts import Decision, ReplicaSnapshot, Split
from wisp_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class StaticSplit:
    """Keeps one split: a cap, a share of the budget for experts, or what the replica started with.

    ``cap`` is in expert slots per layer. ``fraction`` is the share f of the pooled budget that experts get at most,
    0 to 1. KV gets all the rest. With neither, the split at which the replica was first seen is kept, and taken again
    after a bound of the budget or of κ_min had it moved.
    """

    cap: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and self.fraction is not None:
            raise ConfigurationError("policy.settings.cap and policy.settings.fraction exclude each other: give one")
        if self.cap is not None and self.cap < 1:
            raise ConfigurationError(f"policy.settings.cap: {self.cap} is not a number of slots, 1 or more")
        if self.fraction is not None and not 0.0 <= self.fraction <= 1.0:
            raise ConfigurationError(f"policy.settings.fraction: {self.fraction} is outside 0 to 1")

    def initial_state(self) -> Split | None:
        """No split seen yet."""

    def decide(self, snapshot: ReplicaSnapshot, state: Split | None) -> tuple[Decision, Split]:
        """The configured split, clamped to what is feasible on this replica."""
        first = state or snapshot.split
        if self.cap is None and self.fraction is None and snapshot.split == first:
            return Decision(split=first, reason="hold: static split as started"), first
        split = self._configured(snapshot, first)
        if split is None:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}"), first
        cap = self.cap or (split.cap if self.fraction is not None else first.cap)
        clamped = "" if split.cap == cap else f", clamped to {split.cap}"
        return Decision(split=split, reason=f"static split: cap {cap}{clamped}"), first

    def _configured(self, snapshot: ReplicaSnapshot, first: Split) -> Split | None:
        if self.fraction is not None:
            return largest_cap_within(snapshot, self.fraction * snapshot.budget_bytes)
        if self.cap is None:
            return clamp(snapshot, first)
        return clamp(snapshot, Split(cap=self.cap, kv_blocks=snapshot.layout.max_kv_blocks))
