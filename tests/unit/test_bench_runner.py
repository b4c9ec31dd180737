"""Engine processes that never get to run: each is a row that says why, and none is left behind."""

import dataclasses
from pathlib import Path

import psutil

from loadtests.bench import configs
from loadtests.bench.modes import Mode
from loadtests.bench.plan import NamedJob, decode_jobs, find_model
from loadtests.bench.runner import _common_env, run_jobs


def jobs_with_timeout(timeout_s: float, scratch: Path) -> list[NamedJob]:
    config = configs.decode_cpu()
    engine = dataclasses.replace(config.engine, timeout_s=timeout_s)
    config = dataclasses.replace(config, engine=engine, baselines=())
    return decode_jobs(config, find_model("tiny", scratch))


def benchmark_children() -> list[list[str]]:
    # A child that has ended, which another test may have left, has no words.
    children = [child.as_dict(["cmdline"], ad_value=[])["cmdline"] for child in psutil.Process().children()]
    return [words for words in children if "loadtests.bench.child" in " ".join(words)]


def test_an_engine_that_takes_too_long_is_killed_and_told(tmp_path: Path) -> None:
    saved: list[int] = []
    measured = run_jobs(
        jobs_with_timeout(0.05, tmp_path), on_rows=lambda so_far: saved.append(len(so_far.rows)), say=lambda text: None
    )
    assert [row["mode"] for row in measured.rows] == ["resident", "paged"]
    assert all("no end within" in row["error"] for row in measured.rows)
    assert saved == [1, 2, 2]
    assert benchmark_children() == []


def test_after_the_deadline_no_engine_starts(tmp_path: Path) -> None:
    measured = run_jobs(
        jobs_with_timeout(60, tmp_path), on_rows=lambda so_far: None, say=lambda text: None, deadline_s=0
    )
    assert ["not run" in row["error"] for row in measured.rows] == [True, True]
    assert benchmark_children() == []


def test_a_modes_variables_do_not_reach_the_process_that_all_modes_are_forked_from(tmp_path: Path) -> None:
    config = dataclasses.replace(configs.decode_h200(), fractions=(), baselines=((Mode.OFFLOAD_COPY, 0.25),))
    jobs = decode_jobs(config, find_model("qwen3-30b-a3b", tmp_path))
    assert [set(job.engine.env) - set(config.engine.env) for _, job in jobs] == [
        set(),
        {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA"},
    ]
    assert _common_env(jobs[::-1]) == config.engine.env
