"""Calibration from a recording, and the commands that judge policies and recordings."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from simulator_engines import make_trace, make_turn, replayed_engine
from typer.testing import CliRunner

from loadtests.simulate.cli import app
from loadtests.simulate.compare import CompareConfig, compare, summarize
from loadtests.simulate.scale import ScaleConfig, scale
from loadtests.traces import generate, workflow
from wisp_core.contracts import Decision, ReplicaSnapshot, Split
from wisp_core.errors import ConfigurationError
from wisp_core.simulator import calibration
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.recording import Recording, write_recording
from wisp_core.simulator.simulation import SimulationSettings, simulate
from wisp_core.simulator.trace import Trace


class Reporter:
    """A policy that holds, and keeps every snapshot."""

    def __init__(self) -> None:
        self.seen: list[ReplicaSnapshot] = []

    def initial_state(self) -> None:
        return None

    def decide(self, snapshot: ReplicaSnapshot, state: None) -> tuple[Decision, None]:
        self.seen.append(snapshot)
        return Decision(split=snapshot.split, reason="hold"), None


def record(engine: EngineModel, cap: int, seed: int) -> Recording:
    """What `wisp trace record` would keep of an engine that costs as ``engine`` does."""
    work = workflow("tool_bursts", 200, max_context_tokens=512, time_scale=2.0, agents_scale=0.4)
    trace, reporter = generate(work, seed=seed), Reporter()
    settings = SimulationSettings(epoch_s=20.0, window_s=100.0)
    result = simulate(trace, engine, split=engine.largest_split(cap), policy=reporter, settings=settings)
    turns = trace.turns.copy()
    turns["ttft_s"], turns["duration_s"], turns["replica"] = result.ttft_s, result.latency_s, 0
    return Recording(trace=Trace(turns, source=f"cap {cap}"), snapshots=tuple(reporter.seen))


@pytest.fixture(scope="module")
def service() -> EngineModel:
    return replayed_engine(step_s=0.05, pass_s=0.1, token_s=0.001, turn_s=0.3)


def test_a_calibrated_engine_stands_for_the_one_that_was_recorded(service: EngineModel) -> None:
    engine = calibration.calibrated_engine(record(service, 4, seed=0), pass_tokens=service.pass_tokens)
    means = []
    for cap, seed in ((4, 0), (2, 5), (7, 6)):
        judged = record(service, cap, seed)
        result = calibration.replay(judged.trace, engine, split=calibration.starting_split(judged))
        figures = calibration.compare(judged.trace, result)
        assert abs(figures.error) < 0.15
        means.append((figures.measured_turn_s, figures.simulated_turn_s))
    assert np.array_equal(np.argsort([m for m, _ in means]), np.argsort([s for _, s in means]))


def test_turns_that_were_not_streamed_have_no_ttft_and_do_not_hinder(service: EngineModel) -> None:
    recording = record(service, 4, seed=0)
    recording.trace.turns["ttft_s"][::2] = np.nan
    engine = calibration.calibrated_engine(recording, pass_tokens=service.pass_tokens)
    result = calibration.replay(recording.trace, engine, split=calibration.starting_split(recording))
    assert abs(calibration.compare(recording.trace, result).error) < 0.15
    recording.trace.turns["ttft_s"] = np.nan
    with pytest.raises(ConfigurationError, match="no turn was streamed"):
        calibration.calibrated_engine(recording, pass_tokens=service.pass_tokens)


def test_what_cannot_be_calibrated_from_is_said(service: EngineModel) -> None:
    recording = record(service, 4, seed=0)
    unmeasured = dataclasses.replace(recording, trace=make_trace(make_turn()))
    with pytest.raises(ConfigurationError, match="not measured"):
        calibration.calibrated_engine(unmeasured, pass_tokens=100)
    with pytest.raises(ConfigurationError, match="no snapshot"):
        calibration.calibrated_engine(dataclasses.replace(recording, snapshots=()), pass_tokens=100)


def test_a_replay_places_turns_as_they_were_placed() -> None:
    turns = [make_turn(client, replica=client % 2) for client in range(4)]
    result = calibration.replay(make_trace(*turns), replayed_engine(), split=Split(cap=4, kv_blocks=103))
    assert result.replica_of.tolist() == [0, 1, 0, 1]


def test_the_replay_command_writes_errors_and_order(service: EngineModel, tmp_path: Path) -> None:
    for cap, seed in ((4, 0), (7, 6)):
        write_recording(tmp_path / f"cap{cap}.jsonl", record(service, cap, seed))
    arguments = ["replay", "--fit", str(tmp_path / "cap4.jsonl"), "--judge", str(tmp_path / "cap7.jsonl")]
    output = tmp_path / "replay.json"
    answer = CliRunner().invoke(app, [*arguments, "--chunk-tokens", "100", "--output", str(output)])
    assert answer.exit_code == 0, answer.output
    written = json.loads(output.read_text())
    assert set(written) == {"benchmark", "hardware", "versions", "command", "config", "rows", "summary"}
    assert written["summary"]["is_order_same"]
    assert written["summary"]["worst_error_pct"] < 15
    wrong = CliRunner().invoke(app, ["replay", "--fit", "a.jsonl", "--judge", "a.jsonl:mv_wsa"])
    assert "other than --fit's" in str(wrong.exception)


def test_nothing_beats_the_oracle_on_the_trace_it_knows() -> None:
    config = CompareConfig(budgets_gb=(20.0,), workflows=("coding_agent",), num_turns=60)
    rows = list(compare(config, lambda _: None))
    assert {row["policy"] for row in rows} > {"oracle", "mv_wsa", "kv_peak", "fifty_fifty", "mv_wsa, link -20 %"}
    assert min(row["over_oracle"] for row in rows if row["policy"] != "mv_wsa online") == 0
    summary = summarize(rows)
    fitted = next(row for row in rows if row["policy"] == "mv_wsa")
    assert summary["within_oracle_pct"] == pytest.approx(100 * fitted["over_oracle"])
    assert set(summary["loss_pct"]) == {"link -20 %", "link +20 %", "curve -20 %", "curve +20 %"}


def test_the_run_command_shows_splits_and_policies_side_by_side(tmp_path: Path) -> None:
    arguments = ["run", "--workflow", "tool_bursts", "--turns", "60", "--max-num-seqs", "8", "--cap", "12"]
    arguments += ["--policy", "mv_wsa", "--plot", str(tmp_path / "run.png")]
    answer = CliRunner().invoke(app, arguments)
    assert answer.exit_code == 0, answer.output
    assert "cap 12" in answer.output
    assert "missed, GB" in " ".join(answer.output.replace("┃", " ").split())
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    wrong = CliRunner().invoke(app, ["run", "--cap", "999"])
    assert "128 experts" in str(wrong.exception)
    wrong = CliRunner().invoke(app, ["run", "--vram-budget-gb", "3"])
    assert str(wrong.exception).startswith("--vram-budget-gb 3: ")
    wrong = CliRunner().invoke(app, ["run", "--workflow", "phase_shit"])
    assert str(wrong.exception).startswith("--workflow phase_shit: ")
    wrong = CliRunner().invoke(app, ["run", "--plot", "run.bmp"])
    assert "ends in .svg" in str(wrong.exception)


def test_scale_runs_count_turns_and_time() -> None:
    config = ScaleConfig(runs=((1, 120, "hash"), (3, 120, "scored"), (3, 120, "power_of_two")))
    rows = list(scale(config, lambda _: None))
    assert [(row["replicas"], row["turns"]) for row in rows] == [(1, 120), (3, 120), (3, 120)]
    assert all(row["simulate_cpu_s"] > 0 and 0 < row["busy_share"] <= 1 for row in rows)
