"""Policies against the per-workflow oracle: fitted on one trace of a workflow, judged on another.

Each policy sees what a replica reports that runs the fitting trace, decides, sees the trace again at that split, and
so on until its answer stays (`wisp_core.planner.fit`); that split then runs the judged trace. ``mv_wsa`` predicts
costs, so it is shown the reports stretch by stretch, adds them up, and names the bottom of each valley that it sees;
the fastest of them on the fitting trace is taken. The others are shown one report of the whole. The oracle knows the
judged trace: it takes the split of least mean turn latency there, of all feasible ones. ``online`` rows run the damped
policy on the judged trace itself, from half of the budget, with nothing fitted before; ``wisp plan`` is no policy but
what the configurator chooses: the split that simulation finds fastest on the fitting trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from loadtests.rows import Row
from loadtests.simulate.engines import build_engine
from loadtests.traces import WORKFLOWS, generate, workflow
from policies.damping import Damped
from policies.mv_wsa import MarginalValue
from policies.oracle import Oracle
from policies.registry import AnyPolicy, load_policy
from wisp_core.allocation.solver import feasible_splits
from wisp_core.contracts import ReplicaSnapshot, Split
from wisp_core.planner.fit import Fitting
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.simulation import SimulationSettings, simulate
from wisp_core.simulator.trace import Trace

ERRORS: Mapping[str, Mapping[str, float]] = {
    "link -20 %": {"link": 0.8},
    "link +20 %": {"link": 1.2},
    "curve -20 %": {"curve": 0.8},
    "curve +20 %": {"curve": 1.2},
}
_FITTED: Mapping[str, Mapping[str, Any]] = {
    "fifty_fifty": {},
    "working_set_proportional": {},
    "kv_peak": {},
}


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What is compared."""

    name: str = "simulate-policies"
    shape: str = "qwen3-30b-a3b"
    card: str = "rtx-4090"
    budgets_gb: tuple[float, ...] = (16.0, 20.0, 24.0)
    workflows: tuple[str, ...] = tuple(WORKFLOWS)
    num_turns: int = 1500
    fit_seed: int = 1
    judge_seed: int = 2
    max_model_len: int = 32768
    max_num_seqs: int = 32
    chunk_tokens: int = 2048
    epoch_s: float = 60.0
    window_s: float = 1200.0
    horizon_s: float = 1200.0
    """Of the online policy: turns take minutes here, so that phases last an hour."""


def compare(config: CompareConfig, say: Callable[[str], None]) -> Iterator[Row]:
    """A row for each workflow, budget and policy."""
    for budget_gb in config.budgets_gb:
        engine, _ = build_engine(
            shape=config.shape,
            card=config.card,
            budget_gb=budget_gb,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            chunk_tokens=config.chunk_tokens,
        )
        for name in config.workflows:
            fitting, judged = (
                generate(workflow(name, config.num_turns), seed=seed) for seed in (config.fit_seed, config.judge_seed)
            )
            say(f"{name} in {budget_gb:g} GB")
            for row in _Cell(config, engine, fitting, judged).rows():
                yield {"workflow": name, "budget_gb": budget_gb} | row


class _Cell:
    """One workflow at one budget."""

    def __init__(self, config: CompareConfig, engine: EngineModel, fitting: Trace, judged: Trace) -> None:
        self._config, self._engine, self._judged_trace = config, engine, judged
        self._fitting, self._judged = Fitting(engine, fitting), Fitting(engine, judged)
        layout = engine.layout
        self._least_blocks = -(-layout.max_model_len // layout.block_tokens)

    def rows(self) -> Iterator[Row]:
        """The oracle, then every policy, then the decisions that wrong reports lead to, then online."""
        start = self._judged.report(self._engine.half_split())
        decision, _ = Oracle(cost=lambda _, split: self._judged.mean_turn_s(split)).decide(start, None)
        oracle_s = self._judged.mean_turn_s(decision.split)
        yield self._row("oracle", decision.split, oracle_s)
        yield self._row("mv_wsa", self._fit_mv_wsa(), oracle_s)
        for name, settings in _FITTED.items():
            yield self._row(name, self._fit(load_policy(name, settings)), oracle_s)
        yield self._row("static_split", self._engine.half_split(), oracle_s)
        yield self._row("wisp plan", self._plan(), oracle_s)
        for error, factors in ERRORS.items():
            yield self._row(f"mv_wsa, {error}", self._fit_mv_wsa(**factors), oracle_s)
        yield self._online(oracle_s)

    def _row(self, policy: str, split: Split, oracle_s: float) -> Row:
        mean_turn_s = self._judged.mean_turn_s(split)
        return {
            "policy": policy,
            "cap": split.cap,
            "kv_blocks": split.kv_blocks,
            "mean_turn_s": mean_turn_s,
            "over_oracle": mean_turn_s / oracle_s - 1,
            "resizes": 0,
        }

    def _fit(self, policy: AnyPolicy) -> Split:
        """Where ``policy`` ends on the fitting trace."""

        def decide(split: Split) -> Sequence[Split]:
            return [policy.decide(self._fitting.report(split), policy.initial_state())[0].split]

        return self._fitting.fit(decide, least_blocks=self._least_blocks)

    def _fit_mv_wsa(self, *, link: float = 1.0, curve: float = 1.0) -> Split:
        """Where mv_wsa ends there, told wrong figures by these factors."""
        policy = MarginalValue()

        def decide(split: Split) -> Sequence[Split]:
            wrong = [_misreport(one, link=link, curve=curve) for one in self._fitting.reports(split)]
            return policy.valleys(wrong) or [split]

        return self._fitting.fit(decide, least_blocks=self._least_blocks)

    def _plan(self) -> Split:
        """What `wisp plan` chooses for the fitting trace: the fastest there of all splits."""
        return self._fitting.search(feasible_splits(self._fitting.report(self._engine.half_split())))

    def _online(self, oracle_s: float) -> Row:
        config = self._config
        policy = Damped(policy=load_policy("mv_wsa", {"horizon_s": config.horizon_s}))
        settings = SimulationSettings(epoch_s=config.epoch_s, window_s=config.window_s)
        result = simulate(self._judged_trace, self._engine, policy=policy, settings=settings)
        return {
            "policy": "mv_wsa online",
            "cap": result.splits[0].cap,
            "kv_blocks": result.splits[0].kv_blocks,
            "mean_turn_s": result.mean_turn_s,
            "over_oracle": result.mean_turn_s / oracle_s - 1,
            "resizes": len(result.resizes),
        }


def _misreport(snapshot: ReplicaSnapshot, *, link: float, curve: float) -> ReplicaSnapshot:
    """What a replica would say whose link and miss curve are measured wrong by these factors."""
    return snapshot.model_copy(
        update={
            "link_bytes_per_s": snapshot.link_bytes_per_s * link,
            # Of decode steps: what a prefill misses is counted, not predicted.
            "decode_misses_by_cap": tuple(misses * curve for misses in snapshot.decode_misses_by_cap),
        }
    )


def summarize(rows: list[Row]) -> dict[str, Any]:
    """Per policy the mean and the worst of latency over the oracle's, in percent."""
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    over = {name: [100 * row["over_oracle"] for row in rows if row["policy"] == name] for name in policies}
    errors = {name: over[f"mv_wsa, {name}"] for name in ERRORS}
    base = over["mv_wsa"]
    return {
        "within_oracle_pct": max(base),
        "plan_within_oracle_pct": max(over["wisp plan"]),
        "mean_over_oracle_pct": {name: fmean(values) for name, values in over.items()},
        "worst_over_oracle_pct": {name: max(values) for name, values in over.items()},
        "loss_pct": {
            name: {
                "mean": fmean(wrong - right for wrong, right in zip(values, base, strict=True)),
                "worst": max(wrong - right for wrong, right in zip(values, base, strict=True)),
            }
            for name, values in errors.items()
        },
    }
