"""Resizes of a live paged engine in both directions, between batches of requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loadtests.bench.child.engine import engine_arguments, generate, make_prompt
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.link import measure_link_bytes_per_s
from loadtests.bench.job import ResizeJob
from wisp_core.contracts import MemoryLayout, Split
from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings

Row = dict[str, Any]

_ANSWER_TOKENS = 8


def run_resize(job: ResizeJob) -> Iterator[Row]:
    """One row for each resize: experts to KV, then back, and so on."""
    memory = GpuMemory()
    link_bytes_per_s, _ = measure_link_bytes_per_s()
    memory.restart()
    engine = OfflineEngine(job.engine.model, engine_arguments(job.engine), WispSettings.model_validate(job.wisp))
    try:
        small, large = _caps(engine, job.step_bytes)
        _move(engine, large)
        expected = _answer(engine, job, "before")
        for index in range(job.resizes):
            cap = small if index % 2 == 0 else large
            outcome = _move(engine, cap)
            engine.check_integrity()
            yield {
                "mode": job.engine.mode,
                "direction": "experts to KV" if cap == small else "KV to experts",
                "cap_before": outcome.before.cap,
                "cap": outcome.after.cap,
                "kv_blocks_before": outcome.before.kv_blocks,
                "kv_blocks": outcome.after.kv_blocks,
                "outcome": outcome.outcome.value,
                "bytes_moved": outcome.bytes_moved,
                "pause_ms": outcome.pause_ms,
                "is_answer_equal": _answer(engine, job, str(index)) == expected,
                "link_bytes_per_s": link_bytes_per_s,
                "peak_gpu_bytes": memory.peak_bytes(),
            }
    finally:
        engine.shutdown()


def _move(engine: OfflineEngine, cap: int) -> Any:
    snapshot = engine.snapshot()
    return engine.resize(engine.plan(_split(snapshot.layout, snapshot.budget_bytes, cap)))


def _split(layout: MemoryLayout, budget_bytes: int, cap: int) -> Split:
    return Split(cap=cap, kv_blocks=layout.kv_blocks_within(budget_bytes - layout.experts_bytes_by_cap[cap]))


def _caps(engine: OfflineEngine, step_bytes: int) -> tuple[int, int]:
    """The smallest cap, and the next one whose slots take ``step_bytes`` more, as far as the floor of KV allows."""
    snapshot = engine.snapshot()
    layout = snapshot.layout
    small = layout.min_cap
    floor = -(-layout.max_model_len // layout.block_tokens) + 1
    large = small
    while large < layout.num_experts and _split(layout, snapshot.budget_bytes, large + 1).kv_blocks >= floor:
        large += 1
        if layout.experts_bytes_by_cap[large] - layout.experts_bytes_by_cap[small] >= step_bytes:
            break
    return small, large


def _answer(engine: OfflineEngine, job: ResizeJob, run: str) -> str:
    prompts = [make_prompt(session, job.prompt_tokens, job.vocab_size, job.seed) for session in range(job.batch)]
    return generate(engine.llm, prompts, _ANSWER_TOKENS, run).output_hash(_ANSWER_TOKENS)
