"""The online benchmark's configuration and arithmetic; the run itself needs a service."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from loadtests.bench.cli import main
from loadtests.bench.online.config import MODEL, OnlineConfig, service_config
from loadtests.bench.online.figures import TurnFigures, compare, moves, resize_figures, turn_figures
from loadtests.bench.online.in_process import warm_up_lengths
from loadtests.bench.online.record import recording_of_way
from loadtests.bench.online.results import merge
from loadtests.bench.online.run import trace_of
from loadtests.rows import quantile
from wisp_core.contracts import Outcome, ResizeOutcome, Split
from wisp_core.errors import ConfigurationError
from wisp_core.simulator.recording import read_recording, write_recording
from wisp_core.tenant_contracts import TurnRecord


def turn(phase: int, sent_at_s: float, duration_s: float, ttft_s: float | None = 0.5, **changes: object) -> TurnFigures:
    fields: dict[str, object] = {"client": 0, "session": 0, "prompt_tokens": 10, "completion_tokens": 5} | changes
    return TurnFigures(phase=phase, sent_at_s=sent_at_s, duration_s=duration_s, ttft_s=ttft_s, **fields)  # type: ignore[arg-type]


def test_throughput_is_turns_over_makespan_and_failures_do_not_count() -> None:
    turns = [turn(0, 1.0, 2.0), turn(0, 2.0, 4.0), turn(1, 6.0, 5.0, ttft_s=2.5), turn(1, 6.0, 1.0, None, error="lost")]
    row = turn_figures(turns, ("bursts", "long"), num_planned=4)
    assert (row["turns"], row["failed_turns"], row["errors"]) == (4, 1, ["lost"])
    assert row["makespan_s"] == pytest.approx(10.0)
    assert row["turns_per_s"] == pytest.approx(0.3)
    assert (row["ttft_p50_s"], row["ttft_p95_s"]) == (0.5, 2.5)
    assert [(phase["name"], phase["makespan_s"]) for phase in row["phases"]] == [("bursts", 5.0), ("long", 5.0)]


def resize(before: int, after: int, outcome: Outcome = Outcome.APPLIED) -> ResizeOutcome:
    return ResizeOutcome(
        replica_id="r",
        revision=1,
        outcome=outcome,
        reason="test",
        before=Split(cap=before, kv_blocks=100 - before),
        after=Split(cap=after, kv_blocks=100 - after),
        bytes_moved=abs(after - before) * 10,
        pause_ms=float(before),
    )


def test_prompts_of_a_warm_up_reach_every_range_of_rows_even_and_odd() -> None:
    assert warm_up_lengths(64) == [65, 64, 49, 48, 33, 32, 25, 24, 17, 16]


def test_only_what_moved_is_a_resize() -> None:
    row = resize_figures([resize(4, 8), resize(8, 6), resize(5, 5), resize(6, 9, Outcome.DEFERRED)])
    assert (row["resizes"], row["resizes_to_kv"], row["resizes_deferred"]) == (2, 1, 1)
    assert (row["bytes_moved"], row["pause_ms_max"]) == (60, 8.0)
    first = resize(4, 8).model_copy(update={"at_s": 107.04})
    second = resize(8, 6).model_copy(update={"at_s": 103.0})
    listed = moves([first, second, resize(5, 5)], since_s=100.0)
    assert [(move["at_s"], move["cap_before"], move["cap"]) for move in listed] == [(3.0, 8, 6), (7.0, 4, 8)]


def way(cap: int | None, turns_per_s: float, ttft_p95_s: float) -> dict[str, object]:
    return {
        "cap": cap,
        "turns_per_s": turns_per_s,
        "ttft_p95_s": ttft_p95_s,
        "failed_turns": 0,
        "cut_turns": 0,
        "makespan_s": 600.0,
        "policy": "static_split" if cap is not None else "mv_wsa",
        "resizes": 3,
        "bytes_moved": 7,
    }


def test_online_is_compared_with_the_best_static_split() -> None:
    rows = [way(8, 1.0, 2.0), way(16, 2.0, 4.0), {"cap": 24, "error": "no"}, way(None, 2.2, 3.0)]
    summary = compare(rows, "mv_wsa")
    assert summary["best_static_cap"] == 16
    assert summary["over_best_static"] == pytest.approx(1.1)
    assert summary["ttft_p95_over_best_static"] == pytest.approx(0.75)
    assert summary["static"] == {"8": 1.0, "16": 2.0}
    assert "over_best_static" not in compare(rows[:2], "mv_wsa")


def test_a_way_that_was_cut_counts_with_the_bound_on_its_throughput() -> None:
    turns = [turn(0, 0.0, 5.0), turn(0, 0.0, 10.0)]
    row = turn_figures(turns, ("bursts", "long"), num_planned=5)
    assert (row["cut_turns"], row["turns_per_s"]) == (3, pytest.approx(0.5)), "as if the others had ended at once"
    row = turn_figures(turns, ("bursts", "long"), num_planned=5, lasted_s=20.0)
    assert (row["is_ended"], row["makespan_s"], row["turns_per_s"]) == (False, 20.0, pytest.approx(0.25))
    nothing = turn_figures([], ("bursts",), num_planned=5, lasted_s=20.0)
    assert (nothing["turns"], nothing["turns_per_s"], nothing["phases"]) == (0, pytest.approx(0.25), [])
    assert turn_figures(turns, ("bursts",), num_planned=2, lasted_s=20.0)["makespan_s"] == 10.0, "a run that ended"
    assert [phase["name"] for phase in row["phases"]] == ["bursts"]
    cut = way(None, 9.0, 1.0) | {"cut_turns": 1}
    assert "over_best_static" not in compare([way(8, 1.0, 2.0), cut], "mv_wsa"), (
        "an online way must have run to its end"
    )
    bound = way(8, 1.0, 2.0) | {"cut_turns": 4}
    assert compare([bound, way(16, 0.5, 2.0)], "mv_wsa")["cut_static_caps"] == [8]


def results_file(directory: Path, cap: int | None, **changes: object) -> Path:
    config = asdict(OnlineConfig(caps=() if cap is None else (cap,), policy="mv_wsa" if cap is None else "none"))
    content = {
        "benchmark": "online",
        "hardware": {"cpu": "x", "cpu_cores": 2},
        "versions": {"wisp": "1"},
        "command": f"wisp bench online {cap}",
        "config": config | changes,
        "rows": [way(cap, 1.0 if cap else 1.5, 2.0)],
    }
    path = directory / f"{cap}.json"
    path.write_text(json.dumps(content))
    return path


def test_ways_that_ran_apart_are_merged_into_one_file(tmp_path: Path) -> None:
    files = [results_file(tmp_path, cap) for cap in (16, None, 8)]
    result = merge(files, tmp_path / "merged.json")
    assert [row["cap"] for row in result.measured.rows] == [8, 16, None]
    assert (result.config.caps, result.config.policy) == ((8, 16), "mv_wsa")
    assert result.summary["over_best_static"] == pytest.approx(1.5)
    assert json.loads((tmp_path / "merged.json").read_text())["summary"] == result.summary


def test_ways_on_other_turns_are_not_merged(tmp_path: Path) -> None:
    files = [results_file(tmp_path, None), results_file(tmp_path, 16, seed=7)]
    with pytest.raises(ConfigurationError, match=r"config differs .* in seed"):
        merge(files, tmp_path / "merged.json")
    (tmp_path / "other.json").write_text('{"config": {"caps": [1], "model": "x"}}')
    with pytest.raises(ConfigurationError, match="not a results file of this benchmark"):
        merge([tmp_path / "other.json"], tmp_path / "merged.json")


@pytest.mark.parametrize("options", [["--model", "tiny"], ["--in-process", "--record", "rec"]])
def test_options_of_the_other_form_are_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["online", *options])
    assert options[-2] in capsys.readouterr().err


def record_of(session: int, replica_id: str, at_s: float) -> TurnRecord:
    return TurnRecord(session_key=f"acme/user-0/0-{session}", replica_id=replica_id, at_s=at_s)


def test_a_recording_keeps_the_closed_loop_and_says_where_and_how_long(tmp_path: Path) -> None:
    trace = trace_of(OnlineConfig(num_turns=40))
    sessions = trace.turns["session"].tolist()
    figures = [turn(0, float(n), 2.0, session=session, prompt_tokens=700) for n, session in enumerate(sessions)]
    figures[3] = turn(0, 3.0, 2.0, None, session=sessions[3], error="lost")
    records = [record_of(session, "ab"[session % 2], float(n)) for n, session in enumerate(sessions)]
    write_recording(tmp_path / "way.jsonl", recording_of_way(trace, figures, records, ()))
    played = read_recording(tmp_path / "way.jsonl").trace
    assert played.has_barriers
    assert played.has_measurements
    assert (len(played), played.phases) == (len(trace) - 1, trace.phases)
    assert played.turns["replica"].tolist() == [session % 2 for n, session in enumerate(sessions) if n != 3]
    assert set(played.turns["prompt_tokens"].tolist()) == {700}


def test_a_quantile_is_a_value_that_was_seen() -> None:
    assert [quantile([3.0, 1.0, 2.0, 4.0], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 2.0, 4.0, 4.0]


def test_the_fixed_set_of_turns_fits_the_service_and_has_its_tenants(tmp_path: Path) -> None:
    config = OnlineConfig()
    trace, service = trace_of(config), service_config(config, tmp_path)
    assert trace.has_barriers
    assert trace.longest_tokens() <= service.replica.engine["max_model_len"]
    assert set(trace.tenants) <= {tenant.tenant_id for tenant in service.tenants}
    assert trace.num_topics <= MODEL.topics
    again = trace_of(config)
    assert [turn[:11] for turn in again] == [turn[:11] for turn in trace], "equal seeds, equal turns"
