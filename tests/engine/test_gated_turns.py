"""Turns held back until their experts fit: fewer copies, and all of them end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS, sampling
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import RequestStatus

from wisp_core.engine.gated_turns import GatedTurns
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


class Waiting:
    """A turn in vLLM's queue that counts how often turns are compared."""

    status, num_compared = RequestStatus.WAITING, 0

    def __init__(self, number: int) -> None:
        self.request_id, self.arrival_time = str(number), time.time()
        self.sampling_params = sampling(number, TOKENS, f"t/u/{number}")

    def __eq__(self, other: object) -> bool:
        Waiting.num_compared += 1
        return self is other

    def __hash__(self) -> int:
        return id(self)


def test_a_long_queue_is_parted_and_put_together_again_without_comparing_each_with_each() -> None:
    turns = [Waiting(number) for number in range(400)]
    waiting = FCFSRequestQueue(turns)
    gate = GatedTurns(SimpleNamespace(waiting=waiting, running=[], requests={}))
    gate.learn(1, {f"t/u/{number}": ["3"] for number in range(8, 400)})
    held = gate.hold()
    assert list(waiting) == turns[:8]
    assert held == turns[8:]
    gate.release(held)
    assert list(waiting) == turns
    assert Waiting.num_compared < len(turns)
