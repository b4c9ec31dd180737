"""Blocks that do not fill whole pages: KV moves in groups of them."""

from __future__ import annotations

import os
from pathlib import Path

from engine_fixtures import ENGINE_ARGS, MIB, PROMPTS, SAMPLING, answers, full_split

from wisp_core.contracts import Outcome
from wisp_core.engine.offline import OfflineEngine
from wisp_core.memory import smaps
from wisp_core.settings import WispSettings
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model


def test_a_block_of_two_and_a_half_pages_moves_with_its_neighbour(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TinyModelConfig(layers=3, heads=2, kv_heads=1, head_dim=80))
    settings = WispSettings(vram_budget_bytes=64 * MIB, activation_bytes=MIB, cap=16)
    engine = OfflineEngine(str(tmp_path), {**ENGINE_ARGS, "dtype": "bfloat16"}, settings)
    layout = engine.snapshot().layout
    assert (layout.block_bytes, layout.page_bytes, layout.kv_group_blocks) == (3 * 10240, 4096, 2)
    expected = answers(engine.generate(PROMPTS, SAMPLING))
    for cap in (4, 20, 9):
        outcome = engine.resize(engine.plan(full_split(engine.snapshot(), cap)))
        assert outcome.outcome is Outcome.APPLIED
        assert outcome.after.kv_blocks % 2 == 1  # whole groups, less the null block
        assert smaps.resident_bytes(os.getpid(), "/memfd:wisp-kv") == layout.kv_bytes(outcome.after.kv_blocks)
        engine.check_integrity()
        engine.llm.reset_prefix_cache()
        assert answers(engine.generate(PROMPTS, SAMPLING)) == expected
    engine.shutdown()
