"""Files of several runs become one, whose summary is that of all their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.report import Measured, merge_results, write_result
from loadtests.service import fairness, faults, malformed, streams
from loadtests.service.running import part_name
from loadtests.service.stream_client import StreamedTurn
from services.config import ServiceConfig
from wisp_core.errors import ConfigurationError

FAIRNESS = fairness.FairnessConfig(turns=200)


def condition(run: int, name: str, ttft_s: float) -> dict[str, Any]:
    row = {"run": run, "condition": name, "turns": 200, "failed": 0, "a_refused": 5, "a_refused_without_retry_after": 0}
    return row | {"ttft_p95_s": ttft_s, "time_per_token_p95_s": 2 * ttft_s}


def write(path: Path, rows: list[dict[str, Any]], config: Any = FAIRNESS) -> Path:
    write_result(path, config, Measured.here(rows), {})
    return path


def test_runs_of_several_files_are_told_apart(tmp_path: Path) -> None:
    parts = []
    for number, flood_s in enumerate((1.0, 1.5, 1.2)):
        rows = [condition(1, "alone", 1.0), condition(1, "flood", flood_s), condition(1, "thrash", 1.1)]
        parts.append(write(tmp_path / f"{number}.json", [*rows, {"run": 1, "retry_after_is_right": True}]))
    summary = merge_results(tmp_path / "all.json", parts, fairness.summarize)
    assert (summary["runs"], summary["flood_ttft_p95_ratio"], summary["refused_of_a"]) == (3, 1.2, 45)
    assert summary["retry_after_is_right"]
    merged = json.loads((tmp_path / "all.json").read_text())
    assert merged["summary"] == summary
    assert merged["config"]["turns"] == 200
    assert len(merged["command"]) == 3
    assert [row["part"] for row in merged["rows"]] == [1] * 4 + [2] * 4 + [3] * 4


def test_parts_of_different_benchmarks_are_refused(tmp_path: Path) -> None:
    parts = [write(tmp_path / "a.json", []), write(tmp_path / "b.json", [], faults.FaultsConfig())]
    with pytest.raises(ConfigurationError, match="differ in their benchmark"):
        merge_results(tmp_path / "all.json", parts, fairness.summarize)


def test_a_fault_that_was_not_recovered_from_is_counted() -> None:
    good = {
        "turns": 9,
        "in_flight": 4,
        "in_flight_without_token": 1,
        "lost_turns": 1,
        "broken_streams": 2,
        "recovery_s": 3.0,
        "next_good_turn_s": 0.5,
    }
    scored = {"rescored": 10, "largest_gap": 0.01, "above_limit": 0}
    rows = [{"kind": "engine", **good}, {"kind": "valkey", "not_recovered": "no turn"}, scored]
    summary = faults.summarize(rows)
    assert (summary["faults"], summary["lost_turns"], summary["not_recovered"]) == ({"engine": 1}, 1, 1)
    assert not faults.holds(summary)
    assert faults.holds(faults.summarize([{"kind": "engine", **good, "lost_turns": 0}, scored]))
    summary = faults.summarize([*rows, {"kind": "engine", **good, "recovery_s": 9.0}, {**scored, "largest_gap": 0.04}])
    assert (summary["answers_rescored"], summary["largest_gap"], summary["recovery_max_s"]) == (
        20,
        0.04,
        {"engine": 9.0},
    )


def test_a_run_that_was_cut_counts_once_its_answers_are_rescored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = tmp_path / "faults-1.json"

    def keep(rows: list[dict[str, Any]]) -> None:
        write(result, rows, faults.FaultsConfig())

    findings = faults.Findings(keep, faults.answers_path(result))
    row = {
        "kind": "engine",
        "turns": 9,
        "in_flight": 4,
        "in_flight_without_token": 1,
        "lost_turns": 0,
        "broken_streams": 0,
    }
    findings.add({**row, "recovery_s": 3.0, "next_good_turn_s": 0.5}, [{"prompt": "a", "tokens": ["b"]}])
    findings.add({**row, "recovery_s": 5.0, "next_good_turn_s": 0.5}, [{"prompt": "c", "tokens": ["d"]}])
    rescored: list[str] = []

    def rescore(_: str, __: object, answers: list[faults.Answer], ___: Path) -> list[float]:
        rescored.extend(answer["prompt"] for answer in answers)
        return [0.0, 0.2]

    monkeypatch.setattr(faults, "rescore", rescore)
    for _ in range(2):
        faults.rescore_cut_run(result)
    assert rescored == ["a", "c"]
    summary = merge_results(tmp_path / "all.json", [result, result], faults.summarize)
    assert summary["faults"] == {"engine": 4}
    assert (summary["answers_rescored"], summary["answers_above_gap"]) == (4, 2)


def test_machines_may_differ_where_their_figures_are_not_compared(tmp_path: Path) -> None:
    parts = [write(tmp_path / "a.json", []), write(tmp_path / "b.json", [])]
    content = json.loads(parts[1].read_text())
    parts[1].write_text(json.dumps({**content, "hardware": {"cpu": "another"}}))
    with pytest.raises(ConfigurationError, match="differ in their hardware"):
        merge_results(tmp_path / "all.json", parts, lambda rows: {})
    merge_results(tmp_path / "all.json", parts, lambda rows: {}, is_machine_shared=False)
    hardware = json.loads((tmp_path / "all.json").read_text())["hardware"]
    assert hardware == [content["hardware"], {"cpu": "another"}]


def test_every_benchmark_s_service_is_one_that_starts(tmp_path: Path) -> None:
    files = [
        fairness.service_config(tmp_path, FAIRNESS),
        faults.service_config(tmp_path),
        streams.service_config(tmp_path, streams.StreamsConfig()),
    ]
    services = [ServiceConfig.model_validate(file) for file in files]
    assert [service.policy.name for service in services] == ["static_split", "mv_wsa", "static_split"]
    assert [
        [one.requests_per_minute for one in service.tenants if one.requests_per_minute < 1000] for service in services
    ] == [[FAIRNESS.a_requests_per_minute], [], []]


def test_answers_are_picked_over_the_whole_time() -> None:
    turns = [
        StreamedTurn(prompt=str(number), token_texts=["x"], error="broken" if number % 2 else None)
        for number in range(50)
    ]
    assert [answer["prompt"] for answer in faults.picked_answers(turns, 5)] == ["0", "10", "20", "30", "40"]
    assert len(faults.picked_answers(turns[:6], 5)) == 3


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["ray::ServeReplica:streams:Ingress.handle_request_with_rejection"], "Ingress"),
        (["ray::SERVE_REPLICA::streams#Replica#ab1:ServeReplica:streams:Replica.initialize"], "Replica"),
        (["ray::ServeController.listen_for_change"], "ServeController"),
        (["VLLM::EngineCore"], "VLLM::EngineCore"),
        (["valkey-server 127.0.0.1:52227"], "valkey-server"),
        (["/v/ray/core/src/ray/gcs/gcs_server", "--log_dir=x"], "gcs_server"),
        (["/v/bin/python", "-u", "/v/ray/_private/log_monitor.py", "--x"], "log_monitor.py"),
        ([], "?"),
    ],
)
def test_a_process_is_named_by_its_part_of_the_service(command: list[str], name: str) -> None:
    assert part_name(command) == name


def test_memory_of_broken_requests_is_told_before_all_are_sent() -> None:
    row: dict[str, Any] = {
        "requests": 30,
        "num_failures": 0,
        "failures": [],
        "resident_bytes_after_each_tenth": [100, 130, 140],
    }
    row["anonymous_bytes_after_each_tenth"] = {"Ingress": [60, 90, 90], "Replica": [40, 40, 50]}
    assert malformed.summarize(row)["growth_bytes"] == 40
    assert "growth_bytes_second_half" not in malformed.summarize(row)
    row["resident_bytes_after_each_tenth"] = [100] * 5 + [110] * 5
    row["anonymous_bytes_after_each_tenth"] = {"Ingress": [30] * 5 + [37] * 5, "Replica": [20] * 10}
    summary = malformed.summarize(row)
    assert summary["growth_bytes_second_half"] == 10
    assert summary["anonymous_growth_bytes_second_half_by_part"] == {"Ingress": 7, "Replica": 0}
    assert not malformed.holds(summary)
