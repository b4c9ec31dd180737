"""vLLM on a GPU with paged experts: tokens and log-probabilities equal the resident engine's, also in CUDA graphs.

Made-up weights in four layers of Qwen3-30B-A3B's shape: what `wisp bench identity` asks of five engines.
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

ROOT = Path(__file__).parents[2]
CAPS = [8, 16, 32, 64, 128]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("identity") / "identity.json"
    command = [sys.executable, "-m", "loadtests.bench", "identity", "--output", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    assert not [row for row in found if "error" in row]
    return found


def of_kind(rows: list[dict[str, Any]], **kind: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[name] == value for name, value in kind.items())]


@pytest.mark.parametrize("has_graphs", [True, False], ids=["graphs", "eager"])
def test_tokens_and_logprobs_equal_the_resident_engine_at_every_cap(
    rows: list[dict[str, Any]], has_graphs: bool
) -> None:
    (resident,) = of_kind(rows, mode="resident", has_graphs=has_graphs)
    paged = of_kind(rows, mode="paged", has_graphs=has_graphs, is_resized=False)
    assert [row["cap"] for row in paged] == CAPS
    assert {row["output_hash"] for row in paged} == {resident["output_hash"]}
    assert resident["prompts"] >= 100


def test_resizes_keep_graphs_answers_and_the_budget(rows: list[dict[str, Any]]) -> None:
    (resident,) = of_kind(rows, mode="resident", has_graphs=True)
    resized = of_kind(rows, is_resized=True)
    assert [row["cap"] for row in resized] == [32, 64, 12, 48]
    assert {row["outcome"] for row in resized} == {"applied"}
    assert {row["output_hash"] for row in resized} == {resident["output_hash"]}
    assert {row["graphs_captured_again"] for row in resized} == {0}
    assert all(row["peak_gpu_bytes"] <= row["budget_bytes"] for row in resized)
