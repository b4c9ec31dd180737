"""The bound for every other policy: it knows what each split will cost. In a simulator only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wisp_core.allocation.solver import explain_infeasible, solve
from wisp_core.contracts import Decision, ReplicaSnapshot, Split
from wisp_core.errors import ConfigurationError

TrueCost = Callable[[ReplicaSnapshot, Split], float]
"""Cost of a split on the replica of a snapshot, from the trace rather than from what was seen of it; any unit."""


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """Takes the feasible split that ``cost`` says is cheapest; ``cost`` comes from whoever knows the trace."""

    cost: TrueCost | None = None

    def __post_init__(self) -> None:
        if self.cost is None:
            raise ConfigurationError(
                "policy.name: oracle needs to know the trace: `wisp simulate compare` runs it; a service can run mv_wsa"
            )

    def initial_state(self) -> None:
        """Nothing to remember."""

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        """The truly cheapest feasible split."""
        true_cost = self.cost
        assert true_cost is not None
        solution = solve(snapshot, lambda split: true_cost(snapshot, split))
        if solution is None:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}"), None
        decision = Decision(
            split=solution.split,
            reason=f"oracle: cap {solution.split.cap} is truly cheapest",
            predicted_cost=solution.cost,
            current_cost=true_cost(snapshot, snapshot.split),
            marginals=solution.marginals,
        )
        return decision, None
