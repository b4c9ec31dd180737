"""The benchmarks' commands on CPU: real engines in processes of their own, their rows, file and last line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KEYS = {
    "mode",
    "batch",
    "cap",
    "ms_per_step",
    "missed_bytes_per_step",
    "link_bytes_per_s",
    "peak_gpu_bytes",
    "output_hash",
    "offloaded_bytes",
}


def bench(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, last line of stdout, everything else."""
    command = [sys.executable, "-m", "loadtests.bench", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    *others, last = done.stdout.splitlines() or [""]
    return done.returncode, json.loads(last) if last.startswith("{") else {}, "\n".join(others) + done.stderr


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("bench") / "decode.json"
    arguments = ["--cap", "0.125,0.5", "--batch", "1,3", "--baselines", "uva_experts:0.5", "--timed-tokens", "12"]
    code, line, printed = bench("decode", *arguments, "--output", str(path))
    assert code == 0, printed
    content: dict[str, Any] = json.loads(path.read_text())
    assert line["file"] == str(path)
    assert "ms/step" in printed
    return content


def good_rows(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in content["rows"] if "error" not in row]


def test_every_mode_and_cap_gives_the_answers_of_the_resident_engine(decoded: dict[str, Any]) -> None:
    rows = good_rows(decoded)
    found = [(row["mode"], row["cap"], row["batch"]) for row in rows]
    assert found == [(mode, cap, b) for mode, cap in (("resident", 32), ("paged", 4), ("paged", 16)) for b in (3, 1)]
    assert all(set(row) >= KEYS for row in rows)
    assert decoded["summary"]["are_outputs_equal"]
    assert len({row["output_hash"] for row in rows}) == 2  # one a batch


def test_misses_counted_are_the_trace_s(decoded: dict[str, Any]) -> None:
    paged = [row for row in good_rows(decoded) if row["mode"] == "paged"]
    assert all(row["misses_counted"] == row["misses_recounted"] > 0 for row in paged)
    missed = {(row["cap"], row["batch"]): row["missed_bytes_per_step"] for row in paged}
    assert missed[4, 3] > missed[4, 1] > missed[16, 1] > 0
    offloaded = {row["cap"]: row["offloaded_bytes"] for row in paged}
    expert_bytes = 3 * 256 * 256 * 2 * 2  # float32
    assert offloaded == {4: 4 * 28 * expert_bytes, 16: 4 * 16 * expert_bytes}


def test_a_mode_that_cannot_run_here_is_a_row_with_its_reason(decoded: dict[str, Any]) -> None:
    (row,) = [row for row in decoded["rows"] if "error" in row]
    assert row["mode"] == "uva_experts"
    assert "nothing was offloaded" in row["error"]


def test_the_machine_is_named(decoded: dict[str, Any]) -> None:
    assert decoded["hardware"]["device"] == "cpu"
    assert {"python", "torch", "numpy"} < set(decoded["versions"])
    assert decoded["command"].startswith("wisp bench decode --cap")


def test_resizes_go_both_ways_with_equal_answers(tmp_path: Path) -> None:
    path = tmp_path / "resize.json"
    code, line, printed = bench("resize", "--resizes", "2", "--traffic", "3", "--output", str(path))
    assert code == 0, printed
    assert line["are_all_applied"]
    assert line["are_answers_equal"]
    rows = json.loads(path.read_text())["rows"]
    assert [row["direction"] for row in rows] == ["experts to KV", "KV to experts", "any, under traffic"]
    assert all(row["bytes_moved"] >= 8 << 20 for row in rows[:2])
    assert rows[2]["resizes_applied"] == 3


def test_turns_are_played_while_a_policy_moves_the_split_and_a_way_may_be_cut(tmp_path: Path) -> None:
    path = tmp_path / "online.json"
    options = ["--in-process", "--turns", "5", "--caps", "5", "--deadline-s", "4"]
    code, line, printed = bench("online", *options, "--output", str(path))
    assert code == 0, printed
    online, static = json.loads(path.read_text())["rows"]
    assert (online["policy"], static["cap"]) == ("mv_wsa", 5)
    assert online["resizes"] > 0
    assert line["failed_turns"] == 0
    for row in (online, static):
        assert row["turns"] + row["cut_turns"] == 13  # a turn for each client of each phase, at least
        assert row["turns_per_s"] == pytest.approx(13 / row["makespan_s"])
        assert row["is_ended"] or row["makespan_s"] >= 4


def test_what_the_pager_does_not_offer_is_refused() -> None:
    code, _, printed = bench("prefetch")
    assert code == 2
    assert "needs a GPU" in printed
