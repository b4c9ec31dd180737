"""The costs of a live service's engine from a recording of it, so that the simulator stands for that service.

Costs are what the replicas have measured of themselves. What steps miss goes by who runs, where the recording tells
sessions' working sets, else by the batch alone. Two numbers are fitted, on replays of the recording with its turns
where they ran: by how much real decode steps miss more than independent ones, and what a turn costs outside the engine,
as no replica sees it. That is the median of the difference in time to first token, since most turns wait for no others.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        engine = replace(
            engine, turn_s=max(0.0, engine.turn_s + late_s), curves=_corrected(engine.curves, recording, result)
        )
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
    last, curves = fitted[-1], _curves(recording)
    pass_misses = np.mean([one.prefill_misses_by_cap for one in fitted], axis=0)
    return EngineModel(
        name=last.model,
        layout=last.layout,
        budget_bytes=last.budget_bytes,
        link_bytes_per_s=last.link_bytes_per_s,
        curves=curves,
        step_s=_mean(fitted, "step_s"),
        row_s=_mean(fitted, "token_s"),
        pass_s=_mean(fitted, "pass_s"),
        token_s=_mean(fitted, "prompt_token_s"),
        pass_tokens=pass_tokens,
        is_pass_overlapped=False,
        starts_cold=True,
        pass_misses_by_cap=None if _knows_prompts(curves) else tuple(pass_misses.tolist()),
    )


def _curves(recording: Recording) -> MissCurves:
    rates = recording.topic_rates()
    if rates is None:
        return recording.expert_curves()
    return TopicCurves(rates, prompt_rates=recording.topic_rates(is_prefill=True))


def _knows_prompts(curves: MissCurves) -> bool:
    return isinstance(curves, TopicCurves) and curves.prompt_rates is not None


def _corrected(curves: MissCurves, recording: Recording, replayed: SimulationResult) -> MissCurves:
    """``curves`` that miss as much per decode step as was measured, where a replay with them tells how much they do."""
    if not isinstance(curves, TopicCurves):
        return curves
    measured = _misses_per_step(recording.snapshots)
    steps, misses = (sum(getattr(one, name) for one in replayed.totals) for name in ("decode_steps", "decode_misses"))
    if measured is None or not misses:
        return curves
    return TopicCurves(curves.rates, ratio=curves.ratio * measured * steps / misses, prompt_rates=curves.prompt_rates)


def _misses_per_step(snapshots: Sequence[ReplicaSnapshot]) -> float | None:
    """Mean over all replicas' decode steps, without the first copies into empty slots; None where there were none."""
    steps, misses = 0, 0
    for replica_id in {one.replica_id for one in snapshots}:
        of_replica = [one for one in snapshots if one.replica_id == replica_id]
        first, last = of_replica[0], of_replica[-1]
        steps += last.decode.steps - first.decode.steps
        misses += last.decode.misses - first.decode.misses
        if first.decode.steps == 0:
            misses -= first.split.cap * first.layout.num_layers
    return misses / steps if steps and misses > 0 else None


def _mean(snapshots: list[ReplicaSnapshot], name: str) -> float:
    """Of the later half: a fit settles."""
    late = snapshots[len(snapshots) // 2 :]
    return float(np.mean([getattr(one.fit, name) for one in late]))
