"""Recordings of a real service against their replay in the simulator: calibrated on one, judged on others.

Costs come from the recording that is fitted. Of a judged one the simulator gets the workload (lengths, pauses, topics
and, where its sessions' are kept, what a topic uses) and the split of the start; where turns run, and how the split
moves, is for the product's own router and policy to decide. Where no working sets are known, turns run where they ran.
``as_placed`` figures are those of turns that run where they ran: what is left of an error there is no router's.

Small changes of when turns come change who shares a replica, in the service as here. So a replay is the mean of a few
runs, whose pauses are drawn within a percent of the recorded ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

from policies.damping import Damped, Damping
from policies.registry import load_policy
from wisp_core.contracts import ReplicaSnapshot
from wisp_core.errors import ConfigurationError
from wisp_core.simulator.calibration import calibrated_engine, compare, replay, starting_split
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.recording import Recording, read_recording
from wisp_core.simulator.result import SimulationResult
from wisp_core.simulator.routers import ScoredRouter
from wisp_core.simulator.simulation import SimulationSettings
from wisp_core.simulator.topic_curves import TopicCurves
from wisp_core.simulator.trace import Trace

Parts = dict[str, float]
"""Sums over all replicas, which tell where an error comes from."""

_FIGURES = ("measured_turn_s", "simulated_turn_s", "measured_ttft_s", "simulated_ttft_s")


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Which recordings, and how the service ran."""

    name: str = "simulate-replay"
    fit: str
    judged: tuple[tuple[str, str], ...]
    """Recording and the policy that ran: ``static`` for a split that was held, but for what κ_min asks."""
    pass_tokens: int = 1024
    epoch_s: float = 1.0
    window_s: float = 5.0
    num_runs: int = 6
    pause_spread: float = 0.01
    """Standard deviation of pauses over the recorded ones."""


def replays(config: ReplayConfig, directory: Path) -> Iterator[dict[str, Any]]:
    """A row for the fitted recording and each judged one."""
    fitted = read_recording(directory / config.fit)
    settings = SimulationSettings(epoch_s=config.epoch_s, window_s=config.window_s, learns_users=True)
    engine = calibrated_engine(fitted, pass_tokens=config.pass_tokens, policy=_moving("static"), settings=settings)
    for name, policy in ((config.fit, "static"), *config.judged):
        recording = read_recording(directory / name)
        split, judged = starting_split(recording), _with_working_sets(engine, recording)
        runs, parts, as_placed = [], [], []
        for trace in _jittered(recording.trace, config):
            options: dict[str, Any] = {"split": split, "policy": _moving(policy), "settings": settings}
            result = replay(trace, judged, **options, **_placing(judged))
            runs.append(compare(recording.trace, result))
            parts.append(_simulated_parts(result))
            as_placed.append(compare(recording.trace, replay(trace, judged, **options)).simulated_turn_s)
        figures = {name: fmean(getattr(run, name) for run in runs) for name in _FIGURES}
        simulated = [run.simulated_turn_s for run in runs]
        yield {
            "recording": Path(name).stem,
            "work": recording.trace.source,
            "is_fitted": name == config.fit,
            "policy": policy,
            "cap": split.cap,
            "turns": runs[0].turns,
            **figures,
            "simulated_turn_sd_s": stdev(simulated) if len(simulated) > 1 else 0.0,
            "off_by": figures["simulated_turn_s"] / figures["measured_turn_s"] - 1,
            "as_placed_turn_s": fmean(as_placed),
            "as_placed_off_by": fmean(as_placed) / figures["measured_turn_s"] - 1,
            "measured": _measured_parts(recording.snapshots),
            "simulated": {name: fmean(part[name] for part in parts) for name in parts[0]},
        }


def _measured_parts(snapshots: Sequence[ReplicaSnapshot]) -> Parts:
    """What all replicas did between their first and last reports."""
    first = {one.replica_id: one for one in reversed(snapshots)}
    last = {one.replica_id: one for one in snapshots}
    spans = [(first[name], last[name]) for name in first]
    return {
        "decode_steps": sum(b.decode.steps - a.decode.steps for a, b in spans),
        "decode_misses": sum(b.decode.misses - a.decode.misses for a, b in spans),
        "passes": sum(b.prefill.steps - a.prefill.steps for a, b in spans),
        "pass_misses": sum(b.prefill.misses - a.prefill.misses for a, b in spans),
        "pass_tokens": sum(b.prefill.tokens - a.prefill.tokens for a, b in spans),
    }


def _simulated_parts(result: SimulationResult) -> Parts:
    """The same of a simulation, from its start to its end."""
    names = ("decode_steps", "decode_misses", "passes", "pass_misses", "pass_tokens")
    return {name: sum(getattr(one, name) for one in result.totals) for name in names}


def _with_working_sets(engine: EngineModel, recording: Recording) -> EngineModel:
    """``engine`` with what this recording's topics use. Raises ConfigurationError where nobody knows."""
    if not isinstance(engine.curves, TopicCurves):
        return engine
    rates = recording.topic_rates()
    if rates is not None:
        prompt_rates = recording.topic_rates(is_prefill=True)
        return replace(engine, curves=TopicCurves(rates, ratio=engine.curves.ratio, prompt_rates=prompt_rates))
    if recording.trace.num_topics > len(engine.curves.rates):
        raise ConfigurationError(f"{recording.trace.source}: no working sets were recorded, and its topics are others")
    return engine


def _placing(engine: EngineModel) -> dict[str, Any]:
    """The product's router, where it can be told what it would know."""
    return {"router": ScoredRouter(), "routing": engine.curves} if isinstance(engine.curves, TopicCurves) else {}


def _jittered(trace: Trace, config: ReplayConfig) -> Iterator[Trace]:
    """``trace`` so often, each time with slightly other pauses."""
    for seed in range(config.num_runs):
        rng, turns = np.random.default_rng(seed), trace.turns.copy()
        for column in ("at_s", "think_s"):
            factors = 1.0 + config.pause_spread * rng.standard_normal(len(turns))
            turns[column] *= np.clip(factors, 0.0, 2.0)
        yield replace(trace, turns=turns)


def _moving(name: str) -> Damped[Any]:
    """As a service runs it."""
    if name == "static":
        return Damped(policy=load_policy("static_split", {}), damping=Damping(confirmations=1, dead_zone_fraction=0.0))
    return Damped(policy=load_policy(name, {}))


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the judged recordings, and whether the simulator orders those of the same work as the service does.

    Recordings of the same work and the same way to divide are equal runs: the most that two of them differ by is the
    service's noise. ``swapped`` names the pairs that differ by more and that the simulator orders otherwise,
    ``too_close`` those that differ by less, of which nobody knows the order; both with the measured difference.
    """
    judged = [row for row in rows if not row["is_fitted"]]
    pairs = [(one, other) for one, other in combinations(rows, 2) if one["work"] == other["work"]]
    equal = [pair for pair in pairs if _is_equal(*pair)]
    noise = max((_difference(*pair) for pair in equal), default=0.0)
    others = [pair for pair in pairs if pair not in equal]
    apart = [pair for pair in others if _difference(*pair) > noise]
    swapped, swapped_as_placed = _swapped(apart, "simulated_turn_s"), _swapped(apart, "as_placed_turn_s")
    return {
        "worst_error_pct": max(100 * abs(row["off_by"]) for row in judged),
        "fitted_error_pct": max(100 * abs(row["off_by"]) for row in rows if row["is_fitted"]),
        "num_equal_runs": len(equal),
        "equal_runs_differ_pct": 100 * noise,
        "num_ordered_pairs": len(apart),
        "is_order_same": not swapped,
        "swapped": swapped,
        "too_close": [_named(*pair) for pair in others if pair not in apart],
        "worst_error_as_placed_pct": max(100 * abs(row["as_placed_off_by"]) for row in judged),
        "is_order_same_as_placed": not swapped_as_placed,
        "swapped_as_placed": swapped_as_placed,
    }


def _swapped(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], name: str) -> list[str]:
    """Pairs whose figures ``name`` are in another order than the measured ones."""
    return [
        _named(one, other)
        for one, other in pairs
        if (one["measured_turn_s"] < other["measured_turn_s"]) != (one[name] < other[name])
    ]


def _is_equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return bool(one["policy"] == other["policy"] and (one["cap"] == other["cap"] or one["policy"] != "static"))


def _difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float(abs(one["measured_turn_s"] / other["measured_turn_s"] - 1))


def _named(one: dict[str, Any], other: dict[str, Any]) -> str:
    return f"{one['recording']}, {other['recording']}: {_difference(one, other):.1%}"
