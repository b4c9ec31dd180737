"""The costs of a live service's engine from a recording of it, so that the simulator stands for that service.

Costs are what the replicas have measured of themselves. What a decode step misses goes by who decodes, where the
recording tells sessions' working sets, else by the batch alone. Fitted is only what a turn costs outside the engine, as
no replica sees it: the median of the difference in time to first token between the recording and its replay, since most
turns wait for no others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from wisp_core.contracts import ReplicaSnapshot, Split
from wisp_core.errors import ConfigurationError
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.miss_curves import MissCurves
from wisp_core.simulator.recording import Recording
from wisp_core.simulator.result import SimulationResult
from wisp_core.simulator.simulation import SimulationSettings, simulate
from wisp_core.simulator.topic_curves import TopicCurves
from wisp_core.simulator.trace import Trace
from wisp_core.simulator.union_ratio import is_warm, union_ratio_by_cap

_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Means of a recording and of its replay, seconds."""

    turns: int
    measured_turn_s: float
    simulated_turn_s: float
    measured_ttft_s: float
    simulated_ttft_s: float

    @property
    def error(self) -> float:
        """Simulated over measured mean turn latency, less 1."""
        return self.simulated_turn_s / self.measured_turn_s - 1


def calibrated_engine(recording: Recording, *, pass_tokens: int, **options: object) -> EngineModel:
    """The recorded service's engine.

    Args:
        recording: Of a service under load, with measured turns.
        pass_tokens: Its ``max_num_batched_tokens``.
        options: Those of `replay`: its policy, if one moved the split, and how it ran.

    Raises:
        ConfigurationError: No measured turns, or no snapshot with fitted costs.
    """
    engine = _measured_engine(recording, pass_tokens)
    for _ in range(_ROUNDS):
        result = replay(recording.trace, engine, split=starting_split(recording), **options)
        late_s = float(np.nanmedian(recording.trace.turns["ttft_s"] - result.ttft_s))
        engine = replace(engine, turn_s=max(0.0, engine.turn_s + late_s))
    return engine


def replay(trace: Trace, engine: EngineModel, *, split: Split, **options: object) -> SimulationResult:
    """Run a recorded trace as it was placed; ``options`` are those of `simulate`."""
    settings = options.pop("settings", None) or SimulationSettings()
    assert isinstance(settings, SimulationSettings)
    return simulate(
        trace,
        engine,
        num_replicas=int(trace.turns["replica"].max()) + 1,
        split=split,
        settings=replace(settings, follows_recording=True),
        **options,  # type: ignore[arg-type]
    )


def compare(trace: Trace, result: SimulationResult) -> Replayed:
    """The recording's means beside those of its replay, over the turns that both have."""
    has_run = np.isfinite(result.ended_s)
    turns = trace.turns[has_run]
    return Replayed(
        turns=int(has_run.sum()),
        measured_turn_s=float(turns["duration_s"].mean()),
        simulated_turn_s=float(result.latency_s[has_run].mean()),
        measured_ttft_s=float(np.nanmean(turns["ttft_s"])),
        simulated_ttft_s=float(result.ttft_s[has_run].mean()),
    )


def starting_split(recording: Recording) -> Split:
    """The split of the first snapshot. Raises ConfigurationError when there is none."""
    if not recording.snapshots:
        raise ConfigurationError(f"{recording.trace.source}: no snapshot was recorded")
    return recording.snapshots[0].split


def _measured_engine(recording: Recording, pass_tokens: int) -> EngineModel:
    if not recording.trace.has_measurements:
        raise ConfigurationError(f"{recording.trace.source}: its turns were not measured; use `wisp trace record`")
    if not np.isfinite(recording.trace.turns["ttft_s"]).any():
        raise ConfigurationError(f"{recording.trace.source}: no turn was streamed, so no TTFT is known")
    fitted = [one for one in recording.snapshots if one.fit.num_samples and one.prefill_misses_by_cap]
    if not fitted:
        raise ConfigurationError(f"{recording.trace.source}: no snapshot has fitted costs; record under load")
    last = fitted[-1]
    at_no_token, per_token = pass_misses_by_tokens([one for one in fitted if is_warm(one)] or fitted)
    return EngineModel(
        name=last.model,
        layout=last.layout,
        budget_bytes=last.budget_bytes,
        link_bytes_per_s=last.link_bytes_per_s,
        curves=_curves(recording),
        step_s=_mean(fitted, "step_s"),
        row_s=_mean(fitted, "token_s"),
        pass_s=_mean(fitted, "pass_s"),
        token_s=_mean(fitted, "prompt_token_s"),
        pass_tokens=pass_tokens,
        is_pass_overlapped=False,
        starts_cold=True,
        pass_misses_by_cap=at_no_token,
        pass_misses_per_token_by_cap=per_token,
    )


def _curves(recording: Recording) -> MissCurves:
    rates = recording.topic_rates()
    if rates is None:
        return recording.expert_curves()
    return TopicCurves(rates, union_ratio_by_cap(recording, rates))


def pass_misses_by_tokens(snapshots: list[ReplicaSnapshot]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Misses of a pass by cap, as a line over its tokens: their value at none, and what each token adds, [E + 1].

    Long prompts fill passes and need most experts; what turns of a few tokens need is far from that.
    """
    known = [one for one in snapshots if one.prefill_steps_per_s > 0 and one.prefill_tokens_per_s > 0]
    misses = np.array([one.prefill_misses_by_cap for one in known or snapshots])
    mean = misses.mean(axis=0)
    if not known:
        return tuple(mean.tolist()), (0.0,) * len(mean)
    tokens = np.array([one.prefill_tokens_per_s / one.prefill_steps_per_s for one in known])
    spread = tokens - tokens.mean()
    square = float(spread @ spread)
    slope = np.maximum(spread @ misses / square, 0.0) if square > 0 else np.zeros_like(mean)
    slope = np.minimum(slope, mean / tokens.mean())  # never below none
    return tuple((mean - slope * tokens.mean()).tolist()), tuple(slope.tolist())


def _mean(snapshots: list[ReplicaSnapshot], name: str) -> float:
    """Of the later half: a fit settles."""
    late = snapshots[len(snapshots) // 2 :]
    return float(np.mean([getattr(one.fit, name) for one in late]))
