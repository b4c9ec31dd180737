"""MV-WSA: the split whose predicted cost is least, where on smooth curves a byte is worth the same in both pools."""

from __future__ import annotations

from dataclasses import dataclass

from wisp_core.allocation.cost_model import CostModel, CostTerms, missing_evidence, model_error
from wisp_core.allocation.solver import explain_infeasible, marginals, solve
from wisp_core.contracts import Decision, Marginals, ReplicaSnapshot, Split
from wisp_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class MarginalValue:
    """Evaluates the cost model at every feasible cap and takes the least. Has no memory.

    ``horizon_s`` is how long the work is taken to stay as it is: what a move costs once (empty slots and blocks) is
    spread over it, so that a split which is only a little better is not worth a refill.
    """

    horizon_s: float = 30.0

    def __post_init__(self) -> None:
        if self.horizon_s <= 0:
            raise ConfigurationError(f"policy.settings.horizon_s: {self.horizon_s} is not above 0")

    def initial_state(self) -> None:
        """Nothing to remember."""

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        """The cheapest feasible split, or a hold where the snapshot says too little or nothing is feasible."""
        lacking = missing_evidence(snapshot)
        if lacking is not None:
            return Decision(split=snapshot.split, reason=f"hold: {lacking}"), None
        model = CostModel.from_snapshot(snapshot)

        def cost(split: Split) -> float:
            return model.cost(split) + model.move(split).total_s / self.horizon_s

        solution = solve(snapshot, cost)
        if solution is None:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}"), None
        worth = marginals(snapshot.layout, solution.split, model.cost)
        now, then, error = model.terms(snapshot.split), model.terms(solution.split), model_error(model, snapshot)
        decision = Decision(
            split=solution.split,
            reason=_explain(now, then, model.move(solution.split).total_s, worth, error),
            predicted_cost=solution.cost,
            current_cost=now.total_s,
            model_error=error,
            marginals=worth,
        )
        return decision, None


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
