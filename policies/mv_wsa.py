"""MV-WSA: the split whose predicted cost is least, where on smooth curves a byte is worth the same in both pools."""

from __future__ import annotations

from dataclasses import dataclass

from wisp_core.allocation.cost_model import CostModel, CostTerms, missing_evidence
from wisp_core.allocation.solver import explain_infeasible, solve
from wisp_core.contracts import Decision, Marginals, ReplicaSnapshot


@dataclass(frozen=True, kw_only=True)
class MarginalValue:
    """Evaluates the cost model at every feasible cap and takes the least. Has no settings and no memory."""

    def initial_state(self) -> None:
        """Nothing to remember."""

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        """The cheapest feasible split, or a hold where the snapshot says too little or nothing is feasible."""
        lacking = missing_evidence(snapshot)
        if lacking is not None:
            return Decision(split=snapshot.split, reason=f"hold: {lacking}"), None
        model = CostModel.from_snapshot(snapshot)
        solution = solve(snapshot, model.cost)
        if solution is None:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}"), None
        now, then = model.terms(snapshot.split), model.terms(solution.split)
        decision = Decision(
            split=solution.split,
            reason=_explain(now, then, solution.marginals),
            predicted_cost=solution.cost,
            current_cost=now.total_s,
            marginals=solution.marginals,
        )
        return decision, None


def _explain(now: CostTerms, then: CostTerms, marginals: Marginals) -> str:
    return (
        f"predicted {now.total_s:.3f} -> {then.total_s:.3f} s/s "
        f"(decode link {now.decode_link_s:.3f} -> {then.decode_link_s:.3f}, "
        f"decode compute {now.decode_compute_s:.3f} -> {then.decode_compute_s:.3f}, "
        f"prefill link {now.prefill_link_s:.3f} -> {then.prefill_link_s:.3f}, "
        f"prefill compute {now.prefill_compute_s:.3f} -> {then.prefill_compute_s:.3f}); "
        f"one MiB more would save {marginals.experts_s_per_byte * 2**20:.2e} s/s in experts, "
        f"{marginals.kv_s_per_byte * 2**20:.2e} in KV"
    )
