"""On a GPU no step waits for a compiler: all kernels are there when an engine has started, whatever then comes.

Made-up weights in four layers of Qwen3-30B-A3B's shape; each engine in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

CHILD = Path(__file__).with_name("compilations_child.py")
PARTS = ["prompts", "batches", "log-probabilities"]
WAYS = {
    "paged": {"cap": 32, "vram_budget_bytes": 9 * 10**9},
    "prefetching": {"cap": 32, "vram_budget_bytes": 9 * 10**9, "prefetch": 4},
    "unlocked": {"cap": 32, "vram_budget_bytes": 9 * 10**9, "lock_host_memory": False},
    "resident": {"vram_budget_bytes": 24 * 10**9},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_compiled_after_the_start(model: str, way: str) -> None:
    command = [sys.executable, str(CHILD), json.dumps({"model": model, "wisp": WAYS[way]})]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    is_paged = way != "resident"
    assert found["is_paged"] == is_paged
    assert found["compiled"] == {part: [] for part in (*PARTS, *(["resizes"] if is_paged else []))}
