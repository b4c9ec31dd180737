"""The prefetch benchmark: which engines it starts, what its rows say together, what each cap leaves room for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from loadtests.bench.job import DecodeJob
from loadtests.bench.plan import Model, find_model
from loadtests.bench.prefetch import PrefetchConfig, concurrency_by_cap, prefetch_h200, prefetch_jobs, prefetch_summary


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return find_model("qwen3-30b-a3b", tmp_path)


@pytest.fixture
def config() -> PrefetchConfig:
    return prefetch_h200()


def test_one_paged_engine_for_each_number_of_guesses(config: PrefetchConfig, model: Model) -> None:
    jobs = [job for _, job in prefetch_jobs(config, model)]
    assert len(jobs) == len(config.guesses)
    for guesses, job in zip(config.guesses, jobs, strict=True):
        assert isinstance(job, DecodeJob)
        assert (job.caps, job.batches) == ((8, 16, 32), (1, 4, 8))
        wisp: Any = job.engine.engine_args["additional_config"]
        assert wisp["wisp"]["prefetch"] == guesses
    first, second = (dataclasses.asdict(config) | job.model_dump() for job in jobs[:2])
    first["engine"]["engine_args"].pop("additional_config")
    second["engine"]["engine_args"].pop("additional_config")
    assert first == second, "nothing else differs"


def row(guesses: int, ms: float, missed: float, fetched: int = 0, used: int = 0, answer: str = "a") -> dict[str, Any]:
    return {
        "prefetch": guesses,
        "cap": 8,
        "batch": 1,
        "ms_per_step": ms,
        "missed_bytes_per_step": missed,
        "prefetched_bytes": fetched,
        "prefetch_used_bytes": used,
        "output_hash": answer,
    }


def test_guesses_are_compared_with_none() -> None:
    summary = prefetch_summary([row(0, 10.0, 100.0), row(4, 15.0, 90.0, 80, 20), {"error": "x"}])
    assert summary["compared"] == [
        {
            "cap": 8,
            "batch": 1,
            "prefetch": 4,
            "time_over_off": 1.5,
            "missed_bytes_over_off": 0.9,
            "used_share": 0.25,
        }
    ]
    assert (summary["are_outputs_equal"], summary["failed_rows"]) == (True, 1)
    assert not prefetch_summary([row(0, 1, 1), row(4, 1, 1, answer="b")])["are_outputs_equal"]


def test_smaller_caps_leave_room_for_more_sessions(config: PrefetchConfig) -> None:
    found = concurrency_by_cap(config)
    assert {8, 16, 32} <= {entry["cap"] for entry in found}
    sessions = [entry["sessions"] for entry in found]
    assert sessions == sorted(sessions, reverse=True)
    assert sessions[0] > 2 * sessions[-1] > 0
