"""Turns held back until their experts fit: fewer copies, and all of them end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS, sampling

from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings
from wisp_core.tiny_model.tiny import TinyModelConfig
from wisp_core.tiny_model.tiny_tokenizer import first_word_id

TINY = TinyModelConfig()
TOPICS, TOKENS = 4, 24


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[OfflineEngine]:
    settings = WispSettings(cap=10, vram_budget_bytes=BUDGET_BYTES, activation_bytes=ACTIVATION_BYTES)
    engine = OfflineEngine(str(tiny_model), ENGINE_ARGS, settings)
    yield engine
    engine.shutdown()


def run(engine: OfflineEngine) -> tuple[list[int], int]:
    """Lengths of the answers of eight sessions of four topics, and the expert copies of their decode steps."""
    firsts = [first_word_id() + session % TOPICS * TINY.words_per_topic for session in range(8)]
    prompts = [{"prompt_token_ids": list(range(first, first + 40))} for first in firsts]
    before = engine.snapshot().decode.misses
    outputs = engine.generate(prompts, [sampling(n, TOKENS, f"t/u/{n}") for n in range(8)])
    return [len(output.outputs[0].token_ids) for output in outputs], engine.snapshot().decode.misses - before


def test_turns_that_would_thrash_wait_and_all_end(engine: OfflineEngine) -> None:
    run(engine)  # the prompts are in the prefix cache from here on
    lengths, copies = run(engine)
    engine.expect(engine.signatures())
    gated_lengths, fewer = run(engine)
    assert lengths == gated_lengths == [TOKENS] * 8
    assert fewer < copies
    engine.check_integrity()
