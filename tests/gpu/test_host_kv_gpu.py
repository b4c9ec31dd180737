"""KV in host memory on a GPU: vLLM's own copies beside a KV cache whose pages come and go, under CUDA graphs.

Made-up weights in four layers of Qwen3-30B-A3B's shape.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from loadtests.shapes import QWEN3_30B_A3B, write_shape

CHILD = Path(__file__).with_name("host_kv_child.py")
PROMPT_TOKENS, BLOCK_TOKENS = 1500, 16


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    model = tmp_path_factory.mktemp("model")
    write_shape(model, replace(QWEN3_30B_A3B, layers=4))
    job = {
        "model": str(model),
        "engine_args": {
            "load_format": "wisp_bench",
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "block_size": BLOCK_TOKENS,
            "seed": 0,
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
            },
        },
        "wisp": {
            "cap": 32,
            "vram_budget_bytes": 9 * 10**9,
            "activation_bytes": 1 << 30,
            "bypass_if_it_fits": False,
            "host_memory_bytes": 64 << 30,
            "kv_host_bytes": 1 << 30,
        },
        "prompt_tokens": PROMPT_TOKENS,
        "vocab_size": 150_000,
    }
    done = subprocess.run(
        [sys.executable, str(CHILD), json.dumps(job)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_what_the_balloon_took_comes_back_and_answers_alike(found: dict[str, Any]) -> None:
    assert min(found["resident"]["cached"]) >= PROMPT_TOKENS - 100
    assert found["evicted"] == found["resident"], "same tokens, log-probabilities and as little computed"
    assert found["fetched_tokens_per_s"] > 0
    assert found["fetch_bytes_per_s"] > 1e8


def test_resizes_while_prefixes_come_back_spoil_nothing(found: dict[str, Any]) -> None:
    assert "applied" in found["outcomes"]
    assert set(found["outcomes"]) <= {"applied", "deferred"}
    assert found["moved"] == found["resident"]


def test_what_was_still_to_be_copied_was_not_taken(found: dict[str, Any]) -> None:
    assert found["unsettled"]["waiting"] >= PROMPT_TOKENS // BLOCK_TOKENS
    assert found["unsettled"]["taken"] > 0
    assert found["unsettled"]["both"] == 0
    assert found["copied_late"]["answers"] == found["resident"]["answers"]
