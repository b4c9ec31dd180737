"""vLLM on a GPU with paged experts: tokens and log-probabilities equal the resident engine's, also in CUDA graphs.

Made-up weights in four layers of Qwen3-30B-A3B's shape. Each engine runs in a process of its own, since its memory is
free only when that ends.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

CHILD = Path(__file__).with_name("paged_engine_child.py")
CAPS = [8, 16, 32, 64, 128]
GRAPHS = {
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    }
}
EAGER = {"enforce_eager": True}


@cache
def answers(job: str) -> dict[str, Any]:
    """What the child says; ``job`` is JSON."""
    done = subprocess.run([sys.executable, str(CHILD), job], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(engine_args: dict[str, Any], caps: list[int], **job: Any) -> dict[str, Any]:
    return answers(json.dumps({"engine_args": engine_args, "caps": caps, **job}))


@pytest.mark.parametrize("engine_args", [GRAPHS, EAGER], ids=["graphs", "eager"])
def test_tokens_and_logprobs_equal_the_resident_engine_at_every_cap(engine_args: dict[str, Any]) -> None:
    resident = run(engine_args, caps=[])["answers"][0]
    paged = run(engine_args, caps=CAPS)
    for cap, found in zip(CAPS, paged["answers"], strict=True):
        assert found == resident, f"cap {cap}"
    assert paged["misses"] > 0


def test_resizes_keep_graphs_answers_and_the_budget() -> None:
    resident = run(GRAPHS, caps=[])["answers"][0]
    budget_bytes = 8 << 30
    resized = run(GRAPHS, caps=[32, 64, 12, 48], budget_bytes=budget_bytes)
    for found in resized["answers"]:
        assert found == resident
    assert resized["outcomes"] == ["applied"] * 3
    assert max(resized["used_bytes"]) <= budget_bytes


BUDGET_BYTES = 9 * 10**9


def test_a_second_process_attaches_to_the_host_copy_and_answers_alike(tmp_path: Path) -> None:
    """Made-up weights are drawn by the first alone; the second finds them in /dev/shm."""
    resident = run(GRAPHS, caps=[])["answers"][0]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as store_dir:
        job = {
            "budget_bytes": BUDGET_BYTES,
            "model_dir": str(tmp_path),
            "wisp": {"host_store_dir": store_dir},
        }
        first = run(GRAPHS, caps=[32], **job, process=1)
        (copy,) = Path(store_dir).iterdir()
        written = {path.name: path.stat().st_mtime_ns for path in copy.iterdir()}
        second = run(GRAPHS, caps=[32], **job, process=2)
        assert {path.name: path.stat().st_mtime_ns for path in copy.iterdir()} == written
    assert first["answers"][0] == second["answers"][0] == resident


def test_a_model_that_fits_is_not_paged() -> None:
    resident = run(GRAPHS, caps=[])["answers"][0]
    budget_bytes = 24 * 10**9
    bypassed = run(GRAPHS, caps=[], budget_bytes=budget_bytes)
    assert not bypassed["is_paged"]
    assert bypassed["answers"][0] == resident
    assert bypassed["used_bytes"][0] <= budget_bytes
    assert bypassed["decode"]["steps"] > 0


@pytest.mark.parametrize("engine_args", [GRAPHS, EAGER], ids=["graphs", "eager"])
def test_prefetch_changes_no_answer(engine_args: dict[str, Any]) -> None:
    resident = run(engine_args, caps=[])["answers"][0]
    guessing = run(engine_args, caps=[16, 48, 12], budget_bytes=BUDGET_BYTES, wisp={"prefetch": 4})
    assert guessing["answers"] == [resident] * 3
    counts = guessing["prefetched"]
    assert counts["fetched"] > 0
    assert counts["fetched"] >= counts["used"] + counts["wasted"]


def test_sessions_are_counted_on_the_device() -> None:
    counted = run(GRAPHS, caps=[32, 64, 12, 48], budget_bytes=8 << 30)
    found, decode = counted["signatures"], counted["decode"]
    assert {"", "tenant", "tenant/user", *(f"tenant/user/{seed}" for seed in range(8))} == set(found)
    tokens, lookups, hits = found[""]
    assert tokens == decode["tokens"], "every decode row belongs to a session"
    assert lookups == tokens * 4 * 8, "4 layers, top-8"
    assert 0 < hits < lookups
    assert sum(found[f"tenant/user/{seed}"][0] for seed in range(8)) == tokens
