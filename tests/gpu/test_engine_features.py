"""A GPU engine attached to the host's copy, prefetching, or bypassed answers as the one with all experts.

Made-up weights in four layers of Qwen3-30B-A3B's shape, under CUDA graphs. Each engine runs in a process of its own,
since its memory is free only when that ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

CHILD = Path(__file__).with_name("engine_features_child.py")
BUDGET_BYTES = 9 * 10**9
NUM_LAYERS, TOP_K = 4, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def resident(model: str) -> str:
    answers: str = run(model, None)["answers"]
    return answers


@pytest.fixture(scope="module")
def store_dir() -> Iterator[str]:
    with TemporaryDirectory(dir="/dev/shm") as directory:
        yield directory


@pytest.fixture(scope="module")
def writer(model: str, store_dir: str) -> dict[str, Any]:
    return run(model, {"cap": 32, "vram_budget_bytes": BUDGET_BYTES, "host_store_dir": store_dir})


def run(model: str, wisp: dict[str, Any] | None, *, is_eager: bool = False) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), json.dumps({"model": model, "wisp": wisp, "is_eager": is_eager})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_second_process_attaches_to_the_host_copy(
    model: str, store_dir: str, writer: dict[str, Any], resident: str
) -> None:
    """Made-up weights are drawn by the first alone; the second finds them in memory, and guesses besides."""
    assert writer["answers"] == resident
    (copy,) = Path(store_dir).iterdir()
    written = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
    wisp = {"cap": 32, "vram_budget_bytes": BUDGET_BYTES, "host_store_dir": store_dir, "prefetch": 4}
    second = run(model, wisp)
    assert second["answers"] == resident
    assert written.keys() == {path.name for path in copy.iterdir()}
    assert written["ready"] == (copy / "ready").stat().st_mtime_ns
    counts = second["prefetched"]
    assert counts["fetched"] >= counts["used"] + counts["wasted"]
    assert counts["used"] > 0


def test_an_engine_whose_host_memory_is_not_locked_answers_alike(model: str) -> None:
    """It runs without graphs, and answers of vLLM with and without graphs differ by themselves."""
    unlocked = run(model, {"cap": 32, "vram_budget_bytes": BUDGET_BYTES, "lock_host_memory": False})
    assert unlocked["answers"] == run(model, None, is_eager=True)["answers"]
    assert unlocked["decode"]["hits"] > 0, "decode steps still take experts into slots"


def test_a_model_that_fits_is_not_paged(model: str, resident: str) -> None:
    budget_bytes = 24 * 10**9
    bypassed = run(model, {"vram_budget_bytes": budget_bytes})
    assert not bypassed["is_paged"]
    assert bypassed["answers"] == resident
    assert 0 < bypassed["peak_bytes"] <= budget_bytes
    assert bypassed["decode"]["steps"] > 0


def test_sessions_are_counted_on_the_device(writer: dict[str, Any]) -> None:
    found, decode = writer["signatures"], writer["decode"]
    assert {"", "tenant", "tenant/user", *(f"tenant/user/{seed}" for seed in range(8))} == set(found)
    tokens, lookups, hits = found[""]
    assert tokens == decode["tokens"], "every decode row belongs to a session"
    assert lookups == tokens * NUM_LAYERS * TOP_K
    assert 0 < hits < lookups
    assert sum(found[f"tenant/user/{seed}"][0] for seed in range(8)) == tokens
