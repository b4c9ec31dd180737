"""Resizes of a live paged engine: to and fro between requests, and to any split while requests run."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from vllm.compilation.counter import compilation_counter

from loadtests.bench.child.engine import engine_arguments, generate
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.link import measure_link_bytes_per_s
from loadtests.bench.job import ResizeJob
from loadtests.rows import Row
from wisp_core.contracts import Split
from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings

_ANSWER_TOKENS = 8
_TRAFFIC_TOKENS = 24
_MAX_STEPS_BETWEEN = 2


def run_resize(job: ResizeJob) -> Iterator[Row]:
    """One row for each resize between requests, experts to KV, then back, and so on; one for those under traffic."""
    memory = GpuMemory()
    link_bytes_per_s, _ = measure_link_bytes_per_s()
    memory.restart()
    engine = OfflineEngine(job.engine.model, engine_arguments(job.engine), WispSettings.model_validate(job.engine.wisp))
    facts = {"mode": job.engine.mode, "link_bytes_per_s": link_bytes_per_s}
    captured = compilation_counter.num_cudagraph_captured
    try:
        for row in chain(_to_and_fro(engine, job), _under_traffic(engine, job)):
            row["graphs_captured"] = captured
            row["graphs_captured_again"] = compilation_counter.num_cudagraph_captured - captured
            yield facts | row | {"peak_gpu_bytes": memory.peak_bytes()}
    finally:
        engine.shutdown()


def _to_and_fro(engine: OfflineEngine, job: ResizeJob) -> Iterator[Row]:
    small, large = _caps_a_step_apart(engine, job.step_bytes)
    move(engine, split_at(engine, large))
    expected, _ = _answer(engine, job, "before")
    for index in range(job.resizes):
        cap = small if index % 2 == 0 else large
        split = split_at(engine, cap)
        started_s = time.perf_counter()
        outcome = move(engine, split)
        wall_s = time.perf_counter() - started_s
        engine.check_integrity()
        answer, cached_tokens = _answer(engine, job, str(index))
        yield {
            "direction": "experts to KV" if cap == small else "KV to experts",
            "cap_before": outcome.before.cap,
            "cap": outcome.after.cap,
            "kv_blocks_before": outcome.before.kv_blocks,
            "kv_blocks": outcome.after.kv_blocks,
            "outcome": outcome.outcome.value,
            "bytes_moved": outcome.bytes_moved,
            "pause_ms": outcome.pause_ms,
            "wall_ms": wall_s * 1e3,
            "cached_tokens": cached_tokens,
            "is_answer_equal": answer == expected,
        }


@dataclass(slots=True)
class _Traffic:
    """Resizes to random splits, some steps apart."""

    engine: OfflineEngine
    rng: random.Random
    caps: list[int]
    wanted: int
    outcomes: list[Any] = field(default_factory=list)
    steps_left: int = 1

    def after_step(self) -> None:
        self.steps_left -= 1
        if self.steps_left > 0 or len(self.outcomes) == self.wanted:
            return
        self.steps_left = self.rng.randint(1, _MAX_STEPS_BETWEEN)
        self.outcomes.append(move(self.engine, split_at(self.engine, self.rng.choice(self.caps))))
        self.engine.check_integrity()


def _under_traffic(engine: OfflineEngine, job: ResizeJob) -> Iterator[Row]:
    """Every round asks the same, each with a cache of its own, so that all answers must equal the first."""
    expected = _ask(engine, job, "calm", _TRAFFIC_TOKENS, salt="calm").output_hash(_TRAFFIC_TOKENS)
    traffic = _Traffic(engine, random.Random(job.engine.seed), feasible_caps(engine), job.resizes_under_traffic)
    num_rounds = num_equal = 0
    while len(traffic.outcomes) < traffic.wanted:
        name = f"traffic-{num_rounds}"
        answer = _ask(engine, job, name, _TRAFFIC_TOKENS, salt=name, traffic=traffic)
        num_rounds += 1
        num_equal += answer.output_hash(_TRAFFIC_TOKENS) == expected
    applied = [outcome for outcome in traffic.outcomes if outcome.outcome.value == "applied"]
    moves = [outcome for outcome in applied if outcome.bytes_moved]
    pauses_ms = [outcome.pause_ms for outcome in moves]
    yield {
        "direction": "any, under traffic",
        "outcome": "applied" if len(applied) == traffic.wanted else "some not applied",
        "resizes": len(traffic.outcomes),
        "resizes_applied": len(applied),
        "reasons_of_others": sorted({o.reason for o in traffic.outcomes if o.outcome.value != "applied"})[:5],
        "bytes_moved": sum(outcome.bytes_moved for outcome in moves),
        "pause_ms": max(pauses_ms),
        "pause_ms_median": statistics.median(pauses_ms),
        "pause_ms_per_gib": sum(pauses_ms) / (sum(outcome.bytes_moved for outcome in moves) / 2**30),
        "answers": num_rounds * job.batch,
        "is_answer_equal": num_equal == num_rounds,
    }


def move(engine: OfflineEngine, split: Split) -> Any:
    """Resize; returns the outcome."""
    return engine.resize(engine.plan(split))


def split_at(engine: OfflineEngine, cap: int) -> Split:
    """``cap``, and all the rest of the budget as KV."""
    snapshot = engine.snapshot()
    layout = snapshot.layout
    left_bytes = snapshot.budget_bytes - layout.experts_bytes_by_cap[cap]
    return Split(cap=cap, kv_blocks=layout.kv_blocks_within(left_bytes))


def feasible_caps(engine: OfflineEngine) -> list[int]:
    """Caps that leave the KV cache room for one longest request."""
    layout = engine.snapshot().layout
    floor = -(-layout.max_model_len // layout.block_tokens) + 1
    caps = range(layout.min_cap, layout.num_experts + 1)
    return [cap for cap in caps if split_at(engine, cap).kv_blocks >= floor]


def _caps_a_step_apart(engine: OfflineEngine, step_bytes: int) -> tuple[int, int]:
    """The smallest cap, and the next one whose slots take ``step_bytes`` more, as far as the floor of KV allows."""
    caps = feasible_caps(engine)
    bytes_by_cap = engine.snapshot().layout.experts_bytes_by_cap
    small = caps[0]
    return small, next((cap for cap in caps if bytes_by_cap[cap] - bytes_by_cap[small] >= step_bytes), caps[-1])


def _answer(engine: OfflineEngine, job: ResizeJob, run: str) -> tuple[str, int]:
    """Digest of the answers, and how many tokens of the prompts came from the prefix cache."""
    generation = _ask(engine, job, run, _ANSWER_TOKENS)
    return generation.output_hash(_ANSWER_TOKENS), generation.cached_tokens


def _ask(
    engine: OfflineEngine,
    job: ResizeJob,
    run: str,
    num_tokens: int,
    *,
    salt: str | None = None,
    traffic: _Traffic | None = None,
) -> Any:
    prompts = [job.engine.prompt(session, job.prompt_tokens) for session in range(job.batch)]
    after_step = traffic.after_step if traffic is not None else None
    return generate(engine.llm, prompts, num_tokens, run, cache_salt=salt, after_step=after_step)
