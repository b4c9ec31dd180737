"""A plan's sizes are those of the engine that is then started: same layout, same KV capacity, byte for byte."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS

from wisp_core.engine.offline import OfflineEngine
from wisp_core.errors import ConfigurationError
from wisp_core.planner.estimate import EngineChoice, memory_layout
from wisp_core.planner.model_shape import ModelShape, read_shape
from wisp_core.settings import WispSettings
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

CHOICE = EngineChoice(
    max_model_len=ENGINE_ARGS["max_model_len"],
    max_num_seqs=ENGINE_ARGS["max_num_seqs"],
    max_num_batched_tokens=ENGINE_ARGS["max_num_batched_tokens"],
    block_size=ENGINE_ARGS["block_size"],
)
CPU_PAGE_BYTES = 4096


@contextmanager
def engine_of(model: Path, dtype: str, **wisp: Any) -> Iterator[OfflineEngine]:
    settings = WispSettings(vram_budget_bytes=BUDGET_BYTES, activation_bytes=ACTIVATION_BYTES, cap=8, **wisp)
    engine = OfflineEngine(str(model), {**ENGINE_ARGS, "dtype": dtype}, settings)
    try:
        yield engine
    finally:
        engine.shutdown()


def shape_of(model: Path, dtype: str) -> ModelShape:
    return read_shape(json.loads((model / "config.json").read_text()), name="tiny", dtype=dtype)


@pytest.mark.parametrize(
    ("arch", "dtype", "experts"), [("qwen3_moe", "bfloat16", 32), ("mixtral", "float32", 8), ("olmoe", "bfloat16", 32)]
)
def test_the_engine_has_exactly_the_planned_layout(tmp_path: Path, arch: str, dtype: str, experts: int) -> None:
    model = tmp_path / arch
    write_tiny_model(model, TinyModelConfig(arch=arch, experts=experts, moe_intermediate=192))
    shape = shape_of(model, dtype)
    pooled_bytes = BUDGET_BYTES - shape.dense_bytes - ACTIVATION_BYTES
    planned = memory_layout(shape, CHOICE, pooled_bytes=pooled_bytes, page_bytes=CPU_PAGE_BYTES)
    with engine_of(model, dtype) as engine:
        snapshot = engine.snapshot()
    assert (snapshot.other_bytes, snapshot.budget_bytes) == (shape.dense_bytes + ACTIVATION_BYTES, pooled_bytes)
    assert snapshot.layout == planned
    assert snapshot.split.kv_blocks == planned.kv_blocks_within(pooled_bytes - planned.experts_bytes_by_cap[8])


def test_a_fixed_rest_makes_the_capacity_known_before_the_start(tiny_model: Path) -> None:
    shape, other_bytes = shape_of(tiny_model, "float32"), 40 << 20
    planned = memory_layout(shape, CHOICE, pooled_bytes=BUDGET_BYTES - other_bytes, page_bytes=CPU_PAGE_BYTES)
    with engine_of(tiny_model, "float32", other_bytes=other_bytes) as engine:
        snapshot = engine.snapshot()
    assert snapshot.layout == planned
    assert snapshot.other_bytes == other_bytes


def test_a_fixed_rest_that_does_not_suffice_is_refused_with_the_number(tiny_model: Path) -> None:
    needed = shape_of(tiny_model, "float32").dense_bytes + ACTIVATION_BYTES
    message = f"other_bytes is 1048576, .* take {needed}"
    with pytest.raises(ConfigurationError, match=message), engine_of(tiny_model, "float32", other_bytes=1 << 20):
        pass
