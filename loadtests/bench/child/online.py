"""Turns in a closed loop on one engine whose budget a policy divides while they run, or a static split."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from loadtests.bench.child.closed_loop import ClosedLoop
from loadtests.bench.child.engine import build_replay, engine_arguments, generate
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.resize import feasible_caps, move, split_at
from loadtests.bench.child.workers import replay_in_wisp_workers, replay_with
from loadtests.bench.job import OnlineJob
from loadtests.bench.online.figures import engine_figures, moves, resize_figures, turn_figures
from loadtests.bench.online.in_process import warm_up_lengths
from loadtests.bench.online.workload import fixed_turns
from loadtests.rows import Row
from policies.damping import Damped, Damping
from policies.registry import load_policy
from wisp_core.contracts import ResizeOutcome, Split
from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings
from wisp_core.simulator.trace import Trace

_SAMPLE_S = 2.0
_WARMUP_TOKENS = 4
_WARMUP_PROMPT_TOKENS = 64


def run_online(job: OnlineJob) -> Iterator[Row]:
    """A row for each way to divide the budget, all on the same turns."""
    memory = GpuMemory()
    replay = build_replay(job.engine.trace)
    if replay is not None:
        replay_in_wisp_workers()
        replay_with(replay)
    started_s = time.perf_counter()
    engine = OfflineEngine(job.engine.model, engine_arguments(job.engine), WispSettings.model_validate(job.engine.wisp))
    facts = {
        "mode": job.engine.mode,
        "engine_start_s": time.perf_counter() - started_s,
        "pass_tokens": engine.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens,
    }
    try:
        trace, first = _turns(job), engine.snapshot().split
        started_s = time.perf_counter()
        _warm_up(engine, job)
        facts["warm_up_s"] = time.perf_counter() - started_s
        deadline_s = job.deadline_s
        for number, cap in enumerate(job.ways):
            memory.restart()
            way = _Way(job, engine, trace, str(number), cap)
            row = way.run(first if cap is None else split_at(engine, cap), deadline_s)
            if cap is None:
                deadline_s = min(deadline_s, job.static_limit * row["makespan_s"])
            engine.check_integrity()
            peak_bytes = memory.peak_bytes()
            yield facts | row | {"peak_gpu_bytes": peak_bytes, "peak_gpu_source": memory.source}
    finally:
        engine.shutdown()


def _turns(job: OnlineJob) -> Trace:
    return fixed_turns(
        job.workflow,
        num_turns=job.num_turns,
        seed=job.seed,
        max_context_tokens=job.max_context_tokens,
        time_scale=job.time_scale,
        num_topics=job.num_topics,
    )


def _warm_up(engine: OfflineEngine, job: OnlineJob) -> None:
    """Steps of every kind and a move each way, so that no way compiles what later ones find.

    On a GPU a prefill's first use of a kernel took one to two seconds, and a policy that was played first paid for all.
    Those of decode steps are there since their graphs were captured.
    """
    config = engine.llm.llm_engine.vllm_config.scheduler_config
    smallest, *_, largest = feasible_caps(engine)
    move(engine, split_at(engine, largest))
    for number, length in enumerate(warm_up_lengths(config.max_num_batched_tokens)):
        _answer(engine, job, [length], f"warm-{number}")
    move(engine, split_at(engine, smallest))
    _answer(engine, job, [_WARMUP_PROMPT_TOKENS] * config.max_num_seqs, "warm-batch")


def _answer(engine: OfflineEngine, job: OnlineJob, lengths: list[int], run: str) -> None:
    prompts = [job.engine.prompt(session, length) for session, length in enumerate(lengths)]
    generate(engine.llm, prompts, _WARMUP_TOKENS, run)


class _Way:
    """One way to divide the budget, measured over the whole trace."""

    def __init__(self, job: OnlineJob, engine: OfflineEngine, trace: Trace, name: str, cap: int | None) -> None:
        self._job, self._engine, self._trace, self._name, self._cap = job, engine, trace, name, cap
        self._policy: Damped[Any] = _policy(job.policy, cap)
        self._state = self._policy.initial_state()
        self._outcomes: list[ResizeOutcome] = []
        self._timeline: list[Row] = []
        self._reasons: list[Row] = []
        self._next_sample_s = 0.0

    def run(self, start: Split, deadline_s: float) -> Row:
        """Play all turns, from ``start`` and with nothing cached."""
        engine, job = self._engine, self._job
        engine.llm.reset_prefix_cache()
        reached = move(engine, start)
        if reached.after != start:
            raise RuntimeError(f"cap {start.cap} was not reached: {reached.outcome.value}: {reached.reason}")
        before, since_s = engine.snapshot(), time.time()
        loop = ClosedLoop(
            engine.llm,
            self._trace,
            name=self._name,
            vocab_size=job.engine.vocab_size,
            every_s=job.epoch_s,
            tick=self._decide,
        )
        lasted_s = loop.play(deadline_s)
        after = engine.snapshot()
        return {
            "policy": job.policy if self._cap is None else "static_split",
            "cap": self._cap,
            **turn_figures(loop.figures, self._trace.phases, num_planned=len(self._trace), lasted_s=lasted_s),
            **engine_figures([before], [after]),
            **resize_figures(self._outcomes),
            "link_bytes_per_s": after.link_bytes_per_s,
            "is_link_emulated": after.is_link_emulated,
            "splits": [{"cap": after.split.cap, "kv_blocks": after.split.kv_blocks}],
            "moves": moves(self._outcomes, since_s),
            "reasons": self._reasons,
            "timeline": self._timeline,
        }

    def _decide(self, now_s: float) -> None:
        snapshot = self._engine.snapshot()
        decision, self._state = self._policy.decide(snapshot, self._state)
        if decision.split != snapshot.split:
            outcome = move(self._engine, decision.split)
            self._outcomes.append(outcome)
            self._reasons.append({"at_s": round(now_s, 1), "outcome": outcome.outcome.value, "reason": decision.reason})
        if now_s >= self._next_sample_s:
            self._next_sample_s = now_s + _SAMPLE_S
            self._timeline.append(
                {
                    "at_s": round(now_s, 1),
                    "cap": snapshot.split.cap,
                    "kv_blocks": snapshot.split.kv_blocks,
                    "running": snapshot.kv.running_turns,
                    "waiting": snapshot.kv.waiting_turns,
                    "busy": round(snapshot.busy_s_per_s, 3),
                }
            )


def _policy(name: str, cap: int | None) -> Damped[Any]:
    """As a service would run it: a static split is held at once and exactly."""
    if cap is None:
        return Damped(policy=load_policy(name, {}))
    held = Damping(confirmations=1, dead_zone_fraction=0.0)
    return Damped(policy=load_policy("static_split", {"cap": cap}), damping=held)
