"""The benchmark of returning sessions: its engine, and what its rows say together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtests.bench.configs import return_cpu, return_h200
from loadtests.bench.job import JOB, ReturnJob
from loadtests.bench.plan import find_model, return_jobs
from loadtests.bench.summary import return_summary


def test_one_engine_with_room_for_the_sessions_in_host_memory(tmp_path: Path) -> None:
    for config in (return_h200(), return_cpu()):
        ((_, job),) = return_jobs(config, find_model(config.engine.model, tmp_path))
        assert isinstance(job, ReturnJob)
        assert job.engine.wisp is not None
        assert job.engine.wisp["kv_host_bytes"] == config.kv_host_bytes > 0
        assert JOB.validate_json(job.model_dump_json()) == job
        longest = job.prompt_tokens + 2 * job.answer_tokens + max(job.new_tokens)
        assert longest <= config.max_model_len


def row(mode: str, new_tokens: int, ms: float, answers: str = "ab") -> dict[str, Any]:
    return {"mode": mode, "new_tokens": new_tokens, "first_token_ms": ms, "output_hashes": list(answers)}


def test_what_fetching_saves_is_told_for_each_number_of_new_tokens() -> None:
    rows = [row("resident", 8, 10), row("fetched", 8, 20), row("computed", 8, 100, "xx"), row("fetched", 64, 5)]
    summary = return_summary([*rows, {"mode": "fetched", "error": "broken"}])
    assert summary["first_token_ms"]["8"] == {
        "resident": 10,
        "fetched": 20,
        "computed": 100,
        "computed_over_fetched": 5,
    }
    assert summary["first_token_ms"]["64"] == {"fetched": 5}
    assert summary["are_answers_equal"]


def test_other_answers_over_a_fetched_prefix_are_told() -> None:
    assert not return_summary([row("resident", 8, 10, "ab"), row("fetched", 8, 20, "ac")])["are_answers_equal"]
    assert not return_summary([])["are_answers_equal"]
