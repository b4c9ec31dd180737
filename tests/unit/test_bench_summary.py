"""Figures that a run claims, from rows whose figures are known."""

import json
from pathlib import Path
from typing import Any

import pytest

from loadtests import report
from loadtests.bench import configs
from loadtests.bench.summary import (
    budget_summary,
    decode_summary,
    identity_summary,
    prefill_summary,
    resize_summary,
)

Row = dict[str, Any]


def decode_row(mode: str, cap: int, ms: float, **more: Any) -> Row:
    row = {"mode": mode, "batch": 1, "cap": cap, "ms_per_step": ms, "missed_bytes_per_step": 0.0}
    row |= {"link_bytes_per_s": 50e9, "peak_gpu_bytes": 16_000, "offloaded_bytes": 1, "output_hash": "a"}
    return row | more


def test_stretch_is_time_over_resident_time_and_link() -> None:
    rows = [
        decode_row("resident", 128, 5.0),
        decode_row("paged", 32, 22.0, missed_bytes_per_step=750e6, is_recount_equal=True, peak_gpu_bytes=15_000),
        decode_row("uva_experts", 32, 60.0),
        decode_row("prefetch_offload", 32, 44.0),
        decode_row("uva_experts", 64, 1.0),
    ]
    summary = decode_summary(rows)
    (paged,) = summary["paged"]
    assert paged["stretch"] == pytest.approx(22 / (5 + 15))
    assert (paged["fastest_baseline"], paged["gain"]) == ("prefetch_offload", 2.0)
    assert paged["peak_over_baseline"] == pytest.approx(15 / 16)
    assert summary["are_outputs_equal"]
    assert summary["are_recounts_equal"]


def test_one_other_answer_is_told() -> None:
    rows = [decode_row("resident", 128, 5.0), decode_row("paged", 32, 6.0, output_hash="b", is_recount_equal=False)]
    summary = decode_summary(rows)
    assert not summary["are_outputs_equal"]
    assert not summary["are_recounts_equal"]


def test_failed_rows_make_no_figures() -> None:
    rows = [{"mode": "resident", "error": "no memory"}, decode_row("paged", 32, 6.0, is_recount_equal=True)]
    summary = decode_summary(rows)
    assert summary["paged"] == [{"batch": 1, "cap": 32, "ms_per_step": 6.0}]
    assert summary["modes"] == ["paged"]
    assert not decode_summary([{"mode": "paged", "error": "x"}])["are_outputs_equal"]


def test_prefill_is_held_against_passes_over_the_link() -> None:
    common = {"batch": 1, "prompt_tokens": 8000, "chunk_tokens": 2048, "passes": 4, "link_bytes_per_s": 50e9}
    rows = [
        common | {"mode": "paged", "offloaded_bytes": 5e9, "last_first_token_ms": 440.0, "output_hash": "a"},
        common | {"mode": "uva_experts", "offloaded_bytes": 5e9, "last_first_token_ms": 880.0, "output_hash": "a"},
    ]
    (figures,) = prefill_summary(rows)["paged"]
    assert figures["stretch"] == pytest.approx(1.1)
    assert figures["gain"] == pytest.approx(2.0)


def test_resizes_are_judged_by_the_longest_pause() -> None:
    row = {"direction": "KV to experts", "pause_ms": 4.0, "bytes_moved": 10, "outcome": "applied", "is_answer_equal": 1}
    summary = resize_summary([row, row | {"pause_ms": 9.0}])
    assert summary["max_pause_ms"] == {"KV to experts": 9.0}
    assert summary["are_all_applied"]
    assert not resize_summary([row | {"outcome": "failed"}])["are_all_applied"]
    assert not resize_summary([])["are_answers_equal"]


def test_a_results_file_holds_what_the_claim_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configs.decode_h200()
    rows = [decode_row("resident", 128, 5.0), {"mode": "uva_all", "error": "exit code 1: no memory"}]
    measured = report.Measured(rows, {"device": "cpu"}, {"torch": "1"})
    path = tmp_path / "results" / "decode.json"
    columns = ("mode", "ms_per_step", "missed_bytes_per_step", "output_hash")
    report.finish(path, config, measured, decode_summary(rows) | {"x": 1}, columns)
    content = json.loads(path.read_text())
    assert set(content) == {"benchmark", "hardware", "versions", "command", "config", "rows", "summary"}
    assert content["rows"] == rows
    assert content["config"]["engine"]["model"] == "qwen3-30b-a3b"
    printed = capsys.readouterr().out
    line = json.loads(printed.splitlines()[-1])
    assert (line["file"], line["rows"], line["failed_rows"], line["x"]) == (str(path), 2, 1, 1)
    assert "uva_all: exit code 1: no memory" in printed
    assert "missed/step, MB" in printed


def test_a_budget_is_kept_by_every_engine_or_not() -> None:
    sizes = {"mode": "paged", "measure": "memory", "is_layout_as_planned": True, "pass_tokens": 4096}
    rows = [
        sizes | {"budget_bytes": 16e9, "peak_gpu_bytes": 15e9, "is_within_budget": True},
        sizes | {"budget_bytes": 24e9, "peak_gpu_bytes": 25e9, "is_within_budget": False},
    ]
    assert budget_summary(rows[:1])["are_budgets_kept"]
    assert not budget_summary(rows)["are_budgets_kept"]
    assert not budget_summary([])["are_budgets_kept"]
    assert budget_summary(rows)["peak_over_budget"] == {"16 GB": 15 / 16, "24 GB": 25 / 24}


def test_a_budget_run_says_how_far_its_plan_was_off() -> None:
    step = {"mode": "paged", "measure": "decode step", "budget_bytes": 16e9}
    prompt = {
        "mode": "paged",
        "measure": "first token",
        "budget_bytes": 16e9,
        "cap": 16,
        "prompt_tokens": 8000,
        "chunk_tokens": 4096,
        "passes": 2,
        "offloaded_bytes": 50e9,
        "link_bytes_per_s": 50e9,
        "last_first_token_ms": 2200.0,
        "planned_over_measured": 0.95,
    }
    rows = [step | {"planned_over_measured": ratio} for ratio in (0.97, 1.04)]
    found = budget_summary([*rows, prompt, {"mode": "paged", "error": "it ended"}])
    assert found["decode_planned_over_measured"] == (0.97, 1.04)
    assert found["first_token_planned_over_measured"] == (0.95, 0.95)
    assert [round(row["stretch"], 6) for row in found["first_token_stretch"]] == [1.1]


def test_answers_are_compared_with_the_resident_engine_of_the_same_kind() -> None:
    def row(mode: str, has_graphs: bool, answer: str) -> Row:
        return {"mode": mode, "has_graphs": has_graphs, "cap": 8, "prompts": 108, "output_hash": answer}

    rows = [row("resident", True, "a"), row("paged", True, "a"), row("resident", False, "b"), row("paged", False, "b")]
    assert identity_summary(rows)["are_answers_equal"]
    assert not identity_summary(rows)["are_graphs_and_eager_equal"]
    assert not identity_summary([*rows, row("paged", True, "b")])["are_answers_equal"]
    assert not identity_summary(rows[:1])["are_answers_equal"], "nothing was paged"
