"""A model that fits is not paged: vLLM's own layers run, the service's commands are answered, nothing moves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_fixtures import ACTIVATION_BYTES, BUDGET_BYTES, ENGINE_ARGS, MIB, PROMPTS, SAMPLING, answers

from wisp_core.contracts import Outcome, Split
from wisp_core.engine import worker
from wisp_core.engine.offline import OfflineEngine
from wisp_core.pager.paged_experts import PagedRoutedExperts, paged_layers
from wisp_core.pager.registry import current_pager
from wisp_core.settings import WispSettings

FITS = WispSettings(vram_budget_bytes=BUDGET_BYTES, activation_bytes=ACTIVATION_BYTES)


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[OfflineEngine]:
    opened = OfflineEngine(str(tiny_model), ENGINE_ARGS, FITS)
    yield opened
    opened.shutdown()


def test_plain_layers_answer_as_the_resident_engine_and_say_so(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    # vLLM configures the loggers below its own anew while an engine starts, so a handler would not stay.
    monkeypatch.setattr(worker.logger, "info", lambda text, *values: said.append(text % values))
    opened = OfflineEngine(str(tiny_model), ENGINE_ARGS, FITS)
    try:
        assert [text for text in said if "the whole model fits" in text and "nothing is paged" in text] == said[-1:]
        model = opened.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        assert not paged_layers(model)
        assert any(isinstance(module, PagedRoutedExperts) for module in model.modules())
        gc.collect()
        assert current_pager() is None, "the pager is gone, and its slots with it"
        found = answers(opened.generate(PROMPTS, SAMPLING))
        opened.check_integrity()
        num_blocks = opened.snapshot().layout.max_kv_blocks + 1
    finally:
        opened.shutdown()
    reference = OfflineEngine(str(tiny_model), {**ENGINE_ARGS, "num_gpu_blocks_override": num_blocks})
    assert found == answers(reference.generate(PROMPTS, SAMPLING))
    reference.shutdown()


def test_the_snapshot_says_that_nothing_can_move(engine: OfflineEngine) -> None:
    engine.generate(PROMPTS[:2], SAMPLING[:2])
    snapshot = engine.snapshot()
    layout = snapshot.layout
    assert not layout.is_paged
    assert layout.min_cap == snapshot.split.cap == layout.num_experts
    assert layout.pool_bytes(snapshot.split) <= snapshot.budget_bytes
    assert snapshot.split.kv_blocks == layout.kv_blocks_within(
        snapshot.budget_bytes - layout.experts_bytes_by_cap[layout.num_experts]
    )
    assert snapshot.decode.steps > 0
    assert snapshot.prefill.tokens >= sum(len(prompt["prompt_token_ids"]) for prompt in PROMPTS[:2])
    assert snapshot.decode.misses == snapshot.prefill.misses == 0


def test_plans_are_answered(engine: OfflineEngine) -> None:
    split = engine.snapshot().split
    assert engine.resize(engine.plan(split)).outcome is Outcome.APPLIED
    refused = engine.resize(engine.plan(Split(cap=8, kv_blocks=split.kv_blocks)))
    assert refused.outcome is Outcome.FAILED
    assert "the whole model fits" in refused.reason
    assert engine.snapshot().split == split
    engine.check_integrity()


@pytest.mark.parametrize(
    "changes",
    [
        {"cap": 8},
        {"bypass_if_it_fits": False},
        {"declared_kv_tokens": 4096},  # 32 MiB beside 96 MiB of experts
        {"vram_budget_bytes": 100 * MIB},
    ],
    ids=str,
)
def test_it_is_paged_when_asked_for_or_when_it_does_not_fit(tiny_model: Path, changes: dict[str, object]) -> None:
    opened = OfflineEngine(str(tiny_model), ENGINE_ARGS, FITS.model_copy(update=changes))
    try:
        assert opened.snapshot().layout.is_paged
        assert current_pager() is not None
    finally:
        opened.shutdown()
