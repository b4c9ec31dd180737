"""What vLLM compiles when it is first needed is compiled before the engine serves: no step waits for a compiler.

A GPU's kernels: tests/gpu/test_compilations.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS, PROMPTS, SAMPLING, answers
from torch._dynamo.utils import counters
from vllm import SamplingParams
from vllm.model_executor.layers.fused_moe import fused_moe

from wisp_core.engine.expert_warm_up import MOST_ROWS_ONE_BY_ONE, row_counts, run_experts
from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings

MOST_ROWS = (1, 2, 16, 127, 300, 2048, 3000, 8192)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[OfflineEngine]:
    torch._dynamo.reset()
    settings = WispSettings(cap=8, vram_budget_bytes=BUDGET_BYTES, activation_bytes=ACTIVATION_BYTES)
    engine = OfflineEngine(str(tiny_model), ENGINE_ARGS, settings)
    yield engine
    engine.shutdown()


def test_the_first_request_for_log_probabilities_compiles_nothing(engine: OfflineEngine) -> None:
    num_graphs = counters["stats"]["unique_graphs"]
    for prompts in (PROMPTS[:1], PROMPTS[:3]):
        wanted = [SamplingParams(max_tokens=2, logprobs=3, temperature=t) for t in (0.0, 1.0, 1.0)[: len(prompts)]]
        engine.generate(prompts, wanted)
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_experts_run_by_themselves_and_leave_no_trace(engine: OfflineEngine) -> None:
    before, counted = answers(engine.generate(PROMPTS[:2], SAMPLING[:2])), engine.snapshot()
    vllm_config = engine.llm.llm_engine.vllm_config
    for rows in (1, 7, 256):
        output = run_experts(vllm_config, rows, torch.device("cpu"))
        assert output.shape == (rows, vllm_config.model_config.get_hidden_size())
    after = engine.snapshot()
    assert (after.decode.steps, after.prefill.steps) == (counted.decode.steps, counted.prefill.steps)
    engine.check_integrity()
    engine.llm.reset_prefix_cache()
    assert answers(engine.generate(PROMPTS[:2], SAMPLING[:2])) == before


def test_all_tiles_of_vllm_s_tables_are_met(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(tables())
    assert len(found) > 50
    for experts, width, table in found:
        by_rows = tiles_by_rows(experts, width, table, monkeypatch)
        for most in MOST_ROWS:
            met = {by_rows[rows - 1] for rows in row_counts(most)}
            assert met == set(by_rows[:most]), (experts, width, most)


def test_small_steps_run_one_by_one_and_large_ones_even_and_odd() -> None:
    assert row_counts(1) == [1]
    assert row_counts(5) == [1, 2, 3, 4, 5]
    counts = row_counts(1000)
    assert counts[:MOST_ROWS_ONE_BY_ONE] == list(range(1, MOST_ROWS_ONE_BY_ONE + 1))
    assert counts[MOST_ROWS_ONE_BY_ONE:] == [129, 192, 193, 256, 257, 384, 385, 512, 513, 768, 769, 999, 1000]


def tables() -> Iterator[tuple[int, int, dict[int, Any] | None]]:
    """Experts, inner width and tiles by rows of every unquantized shape that vLLM has tuned, and of some it has not."""
    for path in sorted((Path(fused_moe.__file__).parent / "configs").glob("E=*.json")):
        sizes, device = path.stem.split(",device_name=")
        if "dtype" in device:
            continue
        experts, width = (int(part.split("=")[1]) for part in sizes.split(","))
        table = json.loads(path.read_text())
        table.pop("triton_version", None)
        yield experts, width, {int(rows): tiles for rows, tiles in table.items()}
    for experts in (4, 8, 16, 60, 128, 256, 512):
        yield experts, 1408, None


def tiles_by_rows(experts: int, width: int, table: dict[int, Any] | None, patch: pytest.MonkeyPatch) -> list[str]:
    """What vLLM chooses for 1, 2, ... rows."""
    patch.setattr(fused_moe, "get_moe_configs", lambda *args: table)
    shapes = (experts, 2 * width, 2048), (experts, 2048, width)
    return [str(fused_moe.try_get_optimal_moe_config(*shapes, 8, None, rows)) for rows in range(1, max(MOST_ROWS) + 1)]
