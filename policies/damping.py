"""Bounds around any policy: a change is made only when confirmed, large enough, worth it and not too large."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from wisp_core.allocation.protocol import AllocationPolicy, StateT
from wisp_core.allocation.solver import clamp, explain_infeasible, feasible_splits, violations
from wisp_core.contracts import Decision, ReplicaSnapshot, Split
from wisp_core.errors import ConfigurationError


@dataclass(frozen=True)
class Confirmation:
    """For how many epochs in a row a policy pushed in one direction: 1 towards experts, -1 towards KV, 0 neither."""

    direction: int = 0
    epochs: int = 0


@dataclass(frozen=True, kw_only=True)
class Damping:
    """The bounds, and the pure function that applies them to one decision.

    ``confirmations`` epochs in a row must agree on the direction. A move that is predicted to save less than
    ``min_gain_fraction`` of the current cost is a hold, and so is one of a policy that predicts no cost when it is of
    fewer bytes than ``dead_zone_fraction`` of the budget: at a cliff one slot is worth more than ten elsewhere, so a
    size says nothing where a gain is known. One step moves at most ``max_step_fraction`` of the budget, but always at
    least one cap. A replica whose split breaks a bound (a floor that rose, a budget that fell) is moved at once and all
    the way.
    """

    confirmations: int = 2
    dead_zone_fraction: float = 0.05
    max_step_fraction: float = 1.0
    min_gain_fraction: float = 0.02

    def __post_init__(self) -> None:
        bounds = {
            "confirmations": self.confirmations >= 1,
            "dead_zone_fraction": 0 <= self.dead_zone_fraction <= 1,
            "max_step_fraction": 0 < self.max_step_fraction <= 1,
            "min_gain_fraction": self.min_gain_fraction >= 0,
        }
        wrong = [f"policy.damping.{key}: {getattr(self, key)} is out of range" for key, ok in bounds.items() if not ok]
        if wrong:
            raise ConfigurationError("; ".join(wrong))

    def apply(
        self, snapshot: ReplicaSnapshot, wanted: Decision, confirmation: Confirmation
    ) -> tuple[Decision, Confirmation]:
        """``wanted`` clamped to what is feasible, or a hold or a smaller step with the reason put in front."""
        broken = violations(snapshot, snapshot.split)
        if wanted.split == snapshot.split and not broken:
            return wanted, Confirmation()
        target = clamp(snapshot, wanted.split)
        if target is None:
            return _hold(snapshot, wanted, explain_infeasible(snapshot)), Confirmation()
        if broken:
            return _move(wanted, target, f"at once, {broken[0].message}"), Confirmation()
        too_little = self._too_little(snapshot, wanted, target)
        if too_little is not None:
            return _hold(snapshot, wanted, too_little), Confirmation()
        direction = _direction(snapshot.split, target)
        epochs = confirmation.epochs + 1 if direction == confirmation.direction else 1
        confirmed = Confirmation(direction, min(epochs, self.confirmations))
        if epochs < self.confirmations:
            return _hold(snapshot, wanted, f"confirmed in {epochs} of {self.confirmations} epochs"), confirmed
        return self._step(snapshot, wanted, target), confirmed

    def _too_little(self, snapshot: ReplicaSnapshot, wanted: Decision, target: Split) -> str | None:
        moved_bytes = _moved_bytes(snapshot, target)
        if wanted.predicted_cost is not None and wanted.current_cost is not None and moved_bytes:
            gain, least = wanted.current_cost - wanted.predicted_cost, self.min_gain_fraction * wanted.current_cost
            return f"a gain of {gain:.4f} s/s is below {least:.4f}" if gain < least else None
        dead_zone_bytes = self.dead_zone_fraction * snapshot.budget_bytes
        if moved_bytes == 0 or moved_bytes < dead_zone_bytes:
            return f"a move of {moved_bytes} bytes is inside the dead zone of {dead_zone_bytes:.0f}"
        return None

    def _step(self, snapshot: ReplicaSnapshot, wanted: Decision, target: Split) -> Decision:
        """``target``, or the farthest cap towards it that moves at most the largest step."""
        experts_bytes = snapshot.layout.experts_bytes_by_cap
        now = snapshot.split
        most_bytes = self.max_step_fraction * snapshot.budget_bytes
        if abs(experts_bytes[target.cap] - experts_bytes[now.cap]) <= most_bytes:
            return _move(wanted, target, "")
        low, high = sorted((now.cap, target.cap))
        between = [s for s in feasible_splits(snapshot) if low <= s.cap <= high and s.cap != now.cap]
        # One cap is always allowed: a largest step below it would be a silent hold.
        nearest = min(between, key=lambda s: abs(s.cap - now.cap))
        within = [s for s in between if abs(experts_bytes[s.cap] - experts_bytes[now.cap]) <= most_bytes]
        step = max(within, key=lambda s: abs(s.cap - now.cap), default=nearest)
        if step.cap == target.cap:
            return _move(wanted, target, "")
        return _move(wanted, step, f"a step towards cap {target.cap}")


@dataclass(frozen=True, kw_only=True)
class Damped(Generic[StateT]):
    """Any policy with damping around it. Itself a policy."""

    policy: AllocationPolicy[StateT]
    damping: Damping = Damping()

    def initial_state(self) -> tuple[StateT, Confirmation]:
        """The policy's state, and nothing confirmed."""
        return self.policy.initial_state(), Confirmation()

    def decide(
        self, snapshot: ReplicaSnapshot, state: tuple[StateT, Confirmation]
    ) -> tuple[Decision, tuple[StateT, Confirmation]]:
        """What the policy wants, damped."""
        inner, confirmation = state
        wanted, inner = self.policy.decide(snapshot, inner)
        decision, confirmation = self.damping.apply(snapshot, wanted, confirmation)
        return decision, (inner, confirmation)


def _direction(now: Split, target: Split) -> int:
    """1 towards experts, -1 towards KV."""
    if target.cap != now.cap:
        return 1 if target.cap > now.cap else -1
    return 1 if target.kv_blocks < now.kv_blocks else -1


def _moved_bytes(snapshot: ReplicaSnapshot, target: Split) -> int:
    layout, now = snapshot.layout, snapshot.split
    experts = abs(layout.experts_bytes_by_cap[target.cap] - layout.experts_bytes_by_cap[now.cap])
    return max(experts, abs(layout.kv_bytes(target.kv_blocks) - layout.kv_bytes(now.kv_blocks)))


def _hold(snapshot: ReplicaSnapshot, wanted: Decision, why: str) -> Decision:
    """A hold that still shows what the policy wanted: its prediction and marginals belong to that split."""
    reason = f"hold: {why} (wanted cap {wanted.split.cap}, {wanted.split.kv_blocks} KV blocks: {wanted.reason})"
    return wanted.model_copy(update={"split": snapshot.split, "reason": reason, "predicted_cost": wanted.current_cost})


def _move(wanted: Decision, split: Split, why: str) -> Decision:
    """A move; the policy's prediction stays only where its own split is made."""
    if split == wanted.split:
        return wanted.model_copy(update={"reason": f"{why}: {wanted.reason}" if why else wanted.reason})
    reason = f"{why or 'clamped'}: {wanted.reason}"
    return wanted.model_copy(update={"split": split, "reason": reason, "predicted_cost": None})
