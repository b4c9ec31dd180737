"""MV-WSA: the split whose predicted cost is least, where on smooth curves a byte is worth the same in both pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wisp_core.allocation.cost_model import CostModel, CostTerms, missing_evidence, model_error
from wisp_core.allocation.reuse_forecast import forecast
from wisp_core.allocation.solver import explain_infeasible, feasible_splits, marginals, smallest_cap_from, solve
from wisp_core.contracts import Decision, Marginals, ReplicaSnapshot, ReuseBin, Split
from wisp_core.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class MarginalValue:
    """Evaluates the cost model at every feasible cap and takes the least. No memory: the snapshot's measures look back.

    ``horizon_s`` is how long the work is taken to stay as it is: what a move costs once (empty slots and blocks) is
    spread over it, so that a split which is only a little better is not worth a refill. With ``growth_fraction`` demand
    and distances of reuse are taken to become up to this much larger: for contexts that all grow together. Sessions of
    every age need none, and it hides what a pool is worth where the largest one just holds the work.
    """

    horizon_s: float = 120.0
    growth_fraction: float = 0.0

    def __post_init__(self) -> None:
        if self.horizon_s <= 0:
            raise ConfigurationError(f"policy.settings.horizon_s: {self.horizon_s} is not above 0")
        if self.growth_fraction < 0:
            raise ConfigurationError(f"policy.settings.growth_fraction: {self.growth_fraction} is below 0")

    def initial_state(self) -> None:
        """Nothing to remember."""

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        """The cheapest feasible split, or a hold where the snapshot says too little or nothing is feasible."""
        lacking = missing_evidence(snapshot)
        if lacking is not None:
            return _before_evidence(snapshot, lacking), None
        return self._decide(snapshot, forecast(snapshot)), None

    def valleys(self, snapshots: Sequence[ReplicaSnapshot]) -> list[Split]:
        """Splits of locally least latency over all of ``snapshots``, the least first; offline, from a trace.

        Each snapshot is of its own ``window_s``. What phases cost is added up, as the cost of their mean is not the
        mean of their costs; an engine second counts for every turn that waits for it. Empty when nothing is feasible,
        or nothing is known.
        """
        known = [one for one in snapshots if missing_evidence(one) is None]
        if not known:
            return []
        weights = [one.window_s * max(one.kv.mean_turns, 1.0) for one in known]
        models = [CostModel.from_snapshot(one, forecast(one), growth_fraction=self.growth_fraction) for one in known]
        splits = feasible_splits(known[-1])
        costs = [
            sum(weight * model.cost(split) for weight, model in zip(weights, models, strict=True)) for split in splits
        ]
        around = [math.inf, *costs, math.inf]
        bottoms = [place for place, cost in enumerate(costs) if around[place] > cost <= around[place + 2]]
        return [splits[place] for place in sorted(bottoms, key=costs.__getitem__)]

    def _decide(self, snapshot: ReplicaSnapshot, reuse: Sequence[ReuseBin]) -> Decision:
        model = CostModel.from_snapshot(snapshot, reuse, growth_fraction=self.growth_fraction)

        def cost(split: Split) -> float:
            return model.cost(split) + model.move(split).total_s / self.horizon_s

        solution = solve(snapshot, cost)
        if solution is None:
            return Decision(split=snapshot.split, reason=f"hold: {explain_infeasible(snapshot)}")
        worth = marginals(snapshot.layout, solution.split, model.cost)
        now, then = model.terms(snapshot.split), model.terms(solution.split)
        error = model_error(model, snapshot)
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
    measured = "" if error is None else f"; the model is off by {error:.0%} for what ran"
    return (
        f"predicted {now.total_s:.3f} -> {then.total_s:.3f} s/s ({changes}) after {move_s:.2f} s of refill; "
        f"one MiB more would save {_us_per_mib(worth.experts_s_per_byte)} µs/s in experts, "
        f"{_us_per_mib(worth.kv_s_per_byte)} in KV{measured}"
    )


def _us_per_mib(s_per_byte: float) -> str:
    """For a reader: what has decayed to 1e-33 is 0."""
    return f"{round(s_per_byte * 2**20 * 1e6, 1) + 0.0:g}"
