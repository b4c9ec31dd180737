"""MV-WSA: the split whose predicted cost is least, where on smooth curves a byte is worth the same in both pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wisp_core.allocation.cost_model import CostModel, CostTerms, missing_evidence, model_error
from wisp_core.allocation.reuse_forecast import ReuseMemory, forecast
from wisp_core.allocation.solver import explain_infeasible, marginals, smallest_cap_from, solve
from wisp_core.contracts import Decision, Marginals, ReplicaSnapshot, ReuseBin, Split
from wisp_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class MarginalValue:
    """Evaluates the cost model at every feasible cap and takes the least. Remembers only how much of prompts is reused.

    ``horizon_s`` is how long the work is taken to stay as it is: what a move costs once (empty slots and blocks) is
    spread over it, so that a split which is only a little better is not worth a refill. ``reuse_memory_s`` is how long
    the reused share of prompts is remembered, over phases. ``growth_fraction``: contexts grow while sessions go on, so
    demand and distances of reuse are taken to become up to this much larger; without it the best split is often the
    one where everything just fits, and the next turn it does not.
    """

    horizon_s: float = 120.0
    reuse_memory_s: float = 300.0
    growth_fraction: float = 0.2

    def __post_init__(self) -> None:
        for name in ("horizon_s", "reuse_memory_s"):
            if getattr(self, name) <= 0:
                raise ConfigurationError(f"policy.settings.{name}: {getattr(self, name)} is not above 0")
        if self.growth_fraction < 0:
            raise ConfigurationError(f"policy.settings.growth_fraction: {self.growth_fraction} is below 0")

    def initial_state(self) -> ReuseMemory:
        """Nothing seen yet."""
        return ReuseMemory()

    def decide(self, snapshot: ReplicaSnapshot, state: ReuseMemory) -> tuple[Decision, ReuseMemory]:
        """The cheapest feasible split, or a hold where the snapshot says too little or nothing is feasible."""
        state = state.after(snapshot, self.reuse_memory_s)
        lacking = missing_evidence(snapshot)
        if lacking is not None:
            return _before_evidence(snapshot, lacking), state
        return self._decide(snapshot, forecast(snapshot, state.share(snapshot))), state

    def _decide(self, snapshot: ReplicaSnapshot, reuse: Sequence[ReuseBin]) -> Decision:
        model = CostModel.from_snapshot(snapshot, reuse, growth_fraction=self.growth_fraction)

        def cost(split: Split) -> float:
            return model.cost(split) + model.move(split).total_s / self.horizon_s

        solution = solve(snapshot, cost)
        if solution is None:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}")
        worth = marginals(snapshot.layout, solution.split, model.cost)
        now, then = model.terms(snapshot.split), model.terms(solution.split)
        error = model_error(CostModel.from_snapshot(snapshot), snapshot)  # of what was measured, not expected
        return Decision(
            split=solution.split,
            reason=_explain(now, then, model.move(solution.split).total_s, worth, error),
            predicted_cost=solution.cost,
            current_cost=now.total_s,
            model_error=error,
            marginals=worth,
        )


def _before_evidence(snapshot: ReplicaSnapshot, lacking: str) -> Decision:
    """The predicted safe size of the sessions that are placed here, before a step of theirs has run; else a hold."""
    wanted = smallest_cap_from(snapshot, snapshot.placed_safe_cap) if snapshot.placed_safe_cap else None
    if wanted is None:
        return Decision(split=snapshot.split, reason=f"hold: {lacking}")
    reason = f"{lacking}, but the sessions placed here are predicted to need {snapshot.placed_safe_cap} slots"
    return Decision(split=wanted, reason=reason)


def _explain(now: CostTerms, then: CostTerms, move_s: float, worth: Marginals, error: float | None) -> str:
    parts = ("decode_link_s", "decode_compute_s", "prefill_link_s", "prefill_compute_s")
    changes = ", ".join(
        f"{part.removesuffix('_s').replace('_', ' ')} {getattr(now, part):.3f} -> {getattr(then, part):.3f}"
        for part in parts
    )
    measured = "" if error is None else f"; the model is off by {error:.0%} at the split in effect"
    return (
        f"predicted {now.total_s:.3f} -> {then.total_s:.3f} s/s ({changes}) after {move_s:.2f} s of refill; "
        f"one MiB more would save {worth.experts_s_per_byte * 2**20:.2e} s/s in experts, "
        f"{worth.kv_s_per_byte * 2**20:.2e} in KV{measured}"
    )
