"""Files of several runs become one, whose summary is that of all their rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests.service import fairness, faults
from loadtests.service.results import command_line, merge_results, write_result
from wisp_core.errors import ConfigurationError


def condition(run: int, name: str, ttft_s: float) -> dict[str, Any]:
    row = {"run": run, "condition": name, "turns": 200, "failed": 0, "a_refused": 5, "a_refused_without_retry_after": 0}
    return row | {"ttft_p95_s": ttft_s, "time_per_token_p95_s": 2 * ttft_s}


def write(path: Path, rows: list[dict[str, Any]], benchmark: str = "fairness") -> Path:
    write_result(path, benchmark, {"turns": 200}, rows, {})
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
    assert merged["config"] == {"turns": 200}
    assert len(merged["command"]) == 3
    assert [row["part"] for row in merged["rows"]] == [1] * 4 + [2] * 4 + [3] * 4


def test_a_command_tells_no_paths_of_the_machine() -> None:
    typed = ["faults", "--output", "/home/me/x.json", "--rounds", "2", "--output=/tmp/y", "--kinds", "engine,valkey"]
    assert command_line(typed) == "wisp bench faults --rounds 2 --kinds engine,valkey"


def test_parts_of_different_benchmarks_are_refused(tmp_path: Path) -> None:
    parts = [write(tmp_path / "a.json", []), write(tmp_path / "b.json", [], "faults")]
    with pytest.raises(ConfigurationError, match="differ in their benchmark"):
        merge_results(tmp_path / "all.json", parts, fairness.summarize)


def test_a_fault_that_was_not_recovered_from_is_counted() -> None:
    good = {"turns": 9, "lost_turns": 1, "broken_streams": 2, "recovery_s": 3.0, "next_good_turn_s": 0.5}
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
