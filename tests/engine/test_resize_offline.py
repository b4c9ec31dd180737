"""Resizes of a real engine in this process: answers, prefix cache, pages and block counts before and after."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import (
    ACTIVATION_BYTES,
    BUDGET_BYTES,
    ENGINE_ARGS,
    PROMPTS,
    SAMPLING,
    Answer,
    answers,
    full_split,
    prompt,
    sampling,
)

from wisp_core.contracts import Barrier, Outcome, Split
from wisp_core.engine.offline import OfflineEngine
from wisp_core.errors import IntegrityError
from wisp_core.memory import smaps
from wisp_core.settings import WispSettings

SETTINGS = WispSettings(vram_budget_bytes=BUDGET_BYTES, activation_bytes=ACTIVATION_BYTES, bypass_if_it_fits=False)
FLOOR_BLOCKS = 16  # max_model_len 512 / block 32


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[Answer]:
    """Answers of an engine that holds every expert, with as many KV blocks as the paged one has ids for."""
    paged = OfflineEngine(str(tiny_model), ENGINE_ARGS, SETTINGS)
    num_blocks = paged.snapshot().layout.max_kv_blocks + 1
    paged.shutdown()
    resident = OfflineEngine(str(tiny_model), {**ENGINE_ARGS, "num_gpu_blocks_override": num_blocks})
    found = answers(resident.generate(PROMPTS, SAMPLING))
    resident.shutdown()
    return found


@pytest.fixture(scope="module")
def one_engine(tiny_model: Path, expected: list[Answer]) -> Iterator[OfflineEngine]:
    engine = OfflineEngine(str(tiny_model), {**ENGINE_ARGS, "watermark": 0.1}, SETTINGS)
    yield engine
    engine.shutdown()


@pytest.fixture
def engine(one_engine: OfflineEngine) -> Iterator[OfflineEngine]:
    """The shared engine at cap 8 with an empty prefix cache; sound when the test ends."""
    one_engine.llm.reset_prefix_cache()
    assert move(one_engine, 8) is Outcome.APPLIED
    yield one_engine
    one_engine.check_integrity()


def move(engine: OfflineEngine, cap: int, barrier: Barrier = Barrier.BALLOON) -> Outcome:
    return engine.resize(engine.plan(full_split(engine.snapshot(), cap), barrier=barrier)).outcome


def scheduler_of(engine: OfflineEngine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def memory_of(engine: OfflineEngine) -> Any:
    return worker_of(engine)._wisp_memory


def worker_of(engine: OfflineEngine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker


def start_requests(engine: OfflineEngine, count: int = len(PROMPTS)) -> None:
    for number in range(count):
        engine.llm.llm_engine.add_request(str(number), PROMPTS[number], SAMPLING[number])


def finish_requests(engine: OfflineEngine) -> list[Any]:
    outputs: dict[str, Any] = {}
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            if output.finished:
                outputs[output.request_id] = output
    return [outputs[name] for name in sorted(outputs)]


def test_answers_equal_the_resident_engine_before_and_after_resizes(
    engine: OfflineEngine, expected: list[Answer]
) -> None:
    assert answers(engine.generate(PROMPTS, SAMPLING)) == expected
    for cap in (4, 16, 5, 27):
        before = engine.snapshot().split
        assert move(engine, cap) is Outcome.APPLIED
        after = engine.snapshot().split
        assert (after.cap > before.cap) == (after.kv_blocks < before.kv_blocks)
        engine.llm.reset_prefix_cache()
        assert answers(engine.generate(PROMPTS, SAMPLING)) == expected
        engine.check_integrity()


def test_answers_do_not_change_when_resizes_happen_while_they_are_written(
    engine: OfflineEngine, expected: list[Answer]
) -> None:
    start_requests(engine)
    for cap in (4, 16, 6, 12):
        for _ in range(4):
            engine.llm.llm_engine.step()
        assert engine.snapshot().kv.used_blocks > 0
        assert move(engine, cap) is Outcome.APPLIED
        engine.check_integrity()
    assert answers(finish_requests(engine)) == expected


def test_pages_go_back_to_the_system(engine: OfflineEngine) -> None:
    pid, layout = os.getpid(), engine.snapshot().layout
    for cap in (4, 24, 10):
        assert move(engine, cap) is Outcome.APPLIED
        snapshot = engine.snapshot()
        assert smaps.resident_bytes(pid, "/memfd:wisp-experts") == layout.experts_bytes_by_cap[cap]
        assert smaps.resident_bytes(pid, "/memfd:wisp-kv") == layout.kv_bytes(snapshot.split.kv_blocks)
        assert snapshot.resident_bytes == layout.pool_bytes(snapshot.split) <= snapshot.budget_bytes
        assert snapshot.budget_bytes + snapshot.other_bytes == BUDGET_BYTES


def test_pages_that_join_the_kv_pool_are_zero(engine: OfflineEngine, expected: list[Answer]) -> None:
    memory = memory_of(engine)
    assert move(engine, 4) is Outcome.APPLIED
    region = memory._region.tensor()
    taken_by_shrink = memory.arena.kv_groups
    for start, stop in memory.geometry.ranges(taken_by_shrink - {0}):
        region[start:stop].view(torch.float32).fill_(float("nan"))
    assert move(engine, 27) is Outcome.APPLIED
    gone = taken_by_shrink - memory.arena.kv_groups
    assert gone
    assert move(engine, 4) is Outcome.APPLIED
    for start, stop in memory.geometry.ranges(gone):
        assert not region[start:stop].any()
    # What stayed is poisoned still; leave the shared engine as a fresh one.
    for start, stop in memory.geometry.ranges(memory.arena.kv_groups - gone):
        region[start:stop].zero_()
    assert answers(engine.generate(PROMPTS, SAMPLING)) == expected


def cached_tokens(engine: OfflineEngine, numbers: range) -> list[int]:
    outputs = engine.generate([PROMPTS[n] for n in numbers], [sampling(n, max_tokens=1) for n in numbers])
    return [output.num_cached_tokens or 0 for output in outputs]


def test_cached_prefixes_stay_while_uncached_blocks_go(engine: OfflineEngine) -> None:
    cached_tokens(engine, range(8))
    before = cached_tokens(engine, range(8))
    assert min(before[1:]) > 0
    for cap in (20, 4, 14):
        assert move(engine, cap) is Outcome.APPLIED
        assert cached_tokens(engine, range(8)) == before


def test_the_least_recently_used_prefixes_go_first(engine: OfflineEngine) -> None:
    cached_tokens(engine, range(1, 8))
    before = cached_tokens(engine, range(1, 8))
    for number in (3, 5):  # used last
        cached_tokens(engine, range(number, number + 1))
    kept = sum(before[number - 1] // 32 + 2 for number in (3, 5))
    layout = engine.snapshot().layout
    outcome = engine.resize(engine.plan(Split(cap=8, kv_blocks=max(FLOOR_BLOCKS, kept))))
    assert (outcome.outcome, outcome.after.kv_blocks) == (Outcome.APPLIED, max(FLOOR_BLOCKS, kept))
    assert layout.kv_group_blocks == 1
    assert [cached_tokens(engine, range(n, n + 1))[0] for n in (3, 5)] == [before[2], before[4]]
    assert cached_tokens(engine, range(7, 8))[0] < before[6]


def test_block_count_watermark_and_usage_follow(engine: OfflineEngine) -> None:
    manager = scheduler_of(engine).kv_cache_manager
    for cap in (4, 20):
        assert move(engine, cap) is Outcome.APPLIED
        usable = engine.snapshot().split.kv_blocks
        assert manager.block_pool.num_gpu_blocks == usable + 1
        assert manager.watermark_blocks == int(0.1 * (usable + 1))
        assert manager.usage == 0.0
        assert engine.llm.reset_prefix_cache()


def test_a_drained_barrier_defers_while_requests_are_unfinished(engine: OfflineEngine, expected: list[Answer]) -> None:
    start_requests(engine)
    engine.llm.llm_engine.step()
    before = engine.snapshot().split
    assert move(engine, 16, Barrier.DRAINED) is Outcome.DEFERRED
    assert engine.snapshot().split == before
    assert answers(finish_requests(engine)) == expected
    assert move(engine, 16, Barrier.DRAINED) is Outcome.APPLIED


def test_running_turns_keep_their_blocks(engine: OfflineEngine, expected: list[Answer]) -> None:
    start_requests(engine)
    for _ in range(12):
        engine.llm.llm_engine.step()
    snapshot = engine.snapshot()
    assert snapshot.kv.floor_blocks > FLOOR_BLOCKS
    plan = engine.plan(Split(cap=8, kv_blocks=FLOOR_BLOCKS))
    outcome = engine.resize(plan)
    assert (outcome.outcome, outcome.after) == (Outcome.DEFERRED, snapshot.split)
    assert f"the {snapshot.kv.floor_blocks} that running turns need" in outcome.reason
    assert answers(finish_requests(engine)) == expected
    assert engine.resize(plan).outcome is Outcome.APPLIED


def test_slots_follow_as_far_as_running_turns_leave_kv(engine: OfflineEngine, expected: list[Answer]) -> None:
    start_requests(engine)
    for _ in range(12):
        engine.llm.llm_engine.step()
    before = engine.snapshot()
    caps = range(before.split.cap + 1, before.layout.num_experts + 1)
    target = [split for cap in caps if (split := full_split(before, cap)).kv_blocks >= FLOOR_BLOCKS][-1]
    assert target.kv_blocks < before.kv.floor_blocks
    outcome = engine.resize(engine.plan(target))
    assert outcome.outcome is Outcome.APPLIED
    assert before.split.cap < outcome.after.cap < target.cap
    assert outcome.after.kv_blocks >= before.kv.floor_blocks
    engine.check_integrity()
    assert answers(finish_requests(engine)) == expected
    assert engine.resize(engine.plan(target)).after == target


def test_the_smallest_pool_still_answers_everything_by_preemption(engine: OfflineEngine) -> None:
    roomy = answers(engine.generate(PROMPTS, [sampling(n, max_tokens=120) for n in range(8)]))
    engine.llm.reset_prefix_cache()
    assert engine.resize(engine.plan(Split(cap=8, kv_blocks=FLOOR_BLOCKS))).outcome is Outcome.APPLIED
    before = engine.snapshot().kv.preemptions
    tight = answers(engine.generate(PROMPTS, [sampling(n, max_tokens=120) for n in range(8)]))
    assert engine.snapshot().kv.preemptions > before
    assert [tokens for tokens, _ in tight] == [tokens for tokens, _ in roomy]


def test_the_longest_request_fits_the_smallest_pool(engine: OfflineEngine) -> None:
    assert engine.resize(engine.plan(Split(cap=8, kv_blocks=FLOOR_BLOCKS))).outcome is Outcome.APPLIED
    (output,) = engine.generate([prompt(1, 480)], [sampling(1, max_tokens=32)])
    assert len(output.outputs[0].token_ids) == 32


def test_a_plan_below_the_floor_fails_and_says_so(engine: OfflineEngine) -> None:
    outcome = engine.resize(engine.plan(Split(cap=8, kv_blocks=FLOOR_BLOCKS - 1)))
    assert outcome.outcome is Outcome.FAILED
    assert "15 KV blocks are below κ_min: a request of max_model_len 512 tokens needs 16" in outcome.reason


def test_a_refusal_in_the_worker_is_rolled_back(
    engine: OfflineEngine, expected: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(ranges: object) -> None:
        raise MemoryError("no pages")

    before = engine.snapshot()
    with monkeypatch.context() as broken:
        broken.setattr(memory_of(engine)._region, "back", refuse)
        outcome = engine.resize(engine.plan(full_split(before, 4)))
    assert (outcome.outcome, outcome.after) == (Outcome.FAILED, before.split)
    assert "no pages; rolled back" in outcome.reason
    engine.check_integrity()
    after = engine.snapshot()
    assert (after.split, after.resident_bytes) == (before.split, before.resident_bytes)
    assert answers(engine.generate(PROMPTS, SAMPLING)) == expected


def test_no_step_runs_once_pages_may_be_missing(engine: OfflineEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(ranges: object) -> None:
        raise OSError("no permission")

    before, memory = engine.snapshot(), memory_of(engine)
    with monkeypatch.context() as broken:
        broken.setattr(memory._region, "release", fail)
        outcome = engine.resize(engine.plan(full_split(before, 27)))
    assert (outcome.outcome, outcome.after) == (Outcome.FAILED, before.split)
    worker = worker_of(engine)
    for touch in (worker.wisp_pid, worker.wisp_check_integrity, lambda: worker.execute_model(None)):
        with pytest.raises(IntegrityError, match="restarted: no permission"):
            touch()
    memory._failure = None  # no page was touched here
    engine.check_integrity()


def test_a_write_outside_the_backed_pages_is_found(engine: OfflineEngine) -> None:
    memory = memory_of(engine)
    assert move(engine, 27) is Outcome.APPLIED
    group = max(set(range(memory.geometry.num_groups)) - memory.arena.kv_groups)
    ((start, stop), *_) = memory.geometry.ranges([group])
    memory._region.tensor()[start] = 1
    with pytest.raises(IntegrityError, match=r"KV: .* bytes resident"):
        engine.check_integrity()
    memory._region.release([(start, stop)])


def test_demand_is_measured(engine: OfflineEngine) -> None:
    start_requests(engine)
    waiting = engine.snapshot().kv
    assert (waiting.running_turns, waiting.waiting_turns, waiting.used_blocks) == (0, 8, 0)
    for _ in range(20):
        engine.llm.llm_engine.step()
    running = engine.snapshot().kv
    assert running.running_turns > 0
    assert running.used_blocks > 0
    assert running.demand_blocks >= running.used_blocks
    finish_requests(engine)
    engine.generate(PROMPTS, SAMPLING)
    after = engine.snapshot().kv
    assert (after.running_turns, after.used_blocks) == (0, 0)
    assert after.cached_blocks > 0
    assert after.mean_turns > 0
    assert after.prompt_tokens_per_s > 0
    assert sum(found.turns_per_s for found in after.reuse) > 0


def test_snapshot_rates_and_curves_cover_the_work(engine: OfflineEngine) -> None:
    engine.snapshot()
    engine.generate(PROMPTS, SAMPLING)
    snapshot = engine.snapshot()
    assert snapshot.decode_steps_per_s > 0
    assert snapshot.prefill_tokens_per_s > 0
    assert len(snapshot.decode_misses_by_cap) == snapshot.layout.num_experts + 1
    assert snapshot.link_bytes_per_s > 0
    assert not snapshot.is_link_emulated
