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
    0 to 1. KV gets all the rest. With neither, every decision is a hold.
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

    def initial_state(self) -> None:
        """Nothing to remember."""

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        """The configured split, clamped to what is feasible on this replica."""
        if self.cap is None and self.fraction is None:
            return Decision(split=snapshot.split, reason="hold: static split as started"), None
        split = self._configured(snapshot)
        if split is None:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}"), None
        cap = split.cap if self.cap is None else self.cap
        clamped = "" if split.cap == cap else f", clamped to {split.cap}"
        return Decision(split=split, reason=f"static split: cap {cap}{clamped}"), None

    def _configured(self, snapshot: ReplicaSnapshot) -> Split | None:
        if self.fraction is not None:
            return largest_cap_within(snapshot, self.fraction * snapshot.budget_bytes)
        assert self.cap is not None
        return clamp(snapshot, Split(cap=self.cap, kv_blocks=snapshot.layout.max_kv_blocks))
