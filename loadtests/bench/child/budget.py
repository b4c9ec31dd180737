"""An engine in a budget: what `wisp plan` says of it, what it does, and what the driver counts meanwhile.

Another process holds the rest of the card. The plan is made here, from the link as measured here and the card's profile
alone, before the engine starts with the plan's cap and sizes; so what is compared was not fitted to it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from loadtests.bench.child.ballast import ballast
from loadtests.bench.child.bench import Bench
from loadtests.bench.child.decode import decode_rows
from loadtests.bench.child.engine import build_replay, engine_arguments, generate
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.link import measure_link_bytes_per_s
from loadtests.bench.child.prefill import prompt_rows
from loadtests.bench.child.resize import feasible_caps, move, split_at
from loadtests.bench.child.workers import replay_in_wisp_workers, replay_with
from loadtests.bench.job import BudgetJob
from loadtests.rows import Row
from wisp_core.engine.offline import OfflineEngine
from wisp_core.engine.pass_tokens import card_of_device
from wisp_core.pager.registry import current_pager
from wisp_core.planner.cards import Card
from wisp_core.planner.engine_pass import choose_for_engine
from wisp_core.planner.estimate import Estimate, decode_estimate, first_token_estimate
from wisp_core.planner.model_config import read_config
from wisp_core.planner.model_shape import read_shape
from wisp_core.planner.plan import PRIOR_CURVE_ERROR, Plan, PlanRequest, make_plan
from wisp_core.settings import WispSettings

_ANSWER_TOKENS = 4
_STEP_BYTES = 1 << 30


def run_budget(job: BudgetJob) -> Iterator[Row]:
    """Rows of decode steps and first tokens beside the plan's, then one for sizes and peaks."""
    settings = WispSettings.model_validate(job.engine.wisp)
    budget_bytes = settings.vram_budget_bytes or 0
    with ballast(budget_bytes) as ballast_bytes:
        memory = GpuMemory()
        link_bytes_per_s, link_source = measure_link_bytes_per_s()
        memory.restart()
        replay = build_replay(job.engine.trace)
        replay_in_wisp_workers()
        replay_with(replay)
        plan = plan_budget(job, settings, card_of_device(), link_bytes_per_s)
        planned = settings.model_copy(update={"cap": plan.split.cap, "other_bytes": plan.other_bytes})
        started_s = time.perf_counter()
        engine = OfflineEngine(job.engine.model, engine_arguments(job.engine), planned)
        start_s = time.perf_counter() - started_s
        try:
            bench = Bench(
                job.engine.mode, engine.llm, current_pager(), replay, memory, link_bytes_per_s, link_source, start_s
            )
            peaks: dict[str, int | None] = {}
            for row in _timed_rows(_Run(job, bench, plan, engine), peaks):
                yield {"budget_bytes": budget_bytes} | row
            memory.restart()
            resizes = _resize(engine, job)
            peaks["resizes"] = memory.peak_bytes()
            peak_bytes = max(peak or 0 for peak in peaks.values())
            yield {
                "mode": job.engine.mode,
                "measure": "memory",
                "budget_bytes": budget_bytes,
                "peak_gpu_bytes": peak_bytes,
                "peak_gpu_bytes_by_phase": peaks,
                "peak_gpu_source": memory.source,
                "is_within_budget": 0 < peak_bytes <= budget_bytes,
                "ballast_bytes": ballast_bytes,
                "engine_start_s": start_s,
                "resizes": resizes,
            } | _sizes(plan, engine)
        finally:
            engine.shutdown()


def plan_budget(job: BudgetJob, settings: WispSettings, card: Card, link_bytes_per_s: float) -> Plan:
    """What `wisp plan` would say of the passes that the engine will choose."""
    model, arguments = job.engine.model, job.engine.engine_args
    return make_plan(
        PlanRequest(
            shape=read_shape(read_config(model), name=model),
            card=card.with_link(link_bytes_per_s),
            budget_bytes=settings.vram_budget_bytes or 0,
            concurrency=int(str(arguments["max_num_seqs"])),
            max_model_len=int(str(arguments["max_model_len"])),
            chunk_tokens=choose_for_engine(model, arguments, settings, card).chosen.tokens,
        )
    )


@dataclass(frozen=True, slots=True)
class _Run:
    job: BudgetJob
    bench: Bench
    plan: Plan
    engine: OfflineEngine


def _timed_rows(run: _Run, peaks: dict[str, int | None]) -> Iterator[Row]:
    """Decode steps, then prompts, in the split that the plan chose."""
    bench, plan, cap = run.bench, run.plan, run.plan.split.cap
    peaks["load and capture"] = bench.memory.peak_bytes()
    bench.memory.restart()
    for row in decode_rows(bench, run.job.decode.model_copy(update={"caps": (cap,)})):
        estimate = decode_estimate(
            plan.model,
            plan.request.card,
            cap=cap,
            batch=row["batch"],
            topics=row["batch"],  # each session of the trace has experts of its own
            curve_error=PRIOR_CURVE_ERROR,
        )
        yield {"measure": "decode step"} | row | _planned(estimate, row["ms_per_step"])
    peaks["decode"] = bench.memory.peak_bytes()
    bench.memory.restart()
    tokens_of_pass = _scheduler(run.engine).max_num_scheduled_tokens
    prefill = run.job.prefill.model_copy(update={"cap": cap, "chunk_tokens": (tokens_of_pass,)})
    model = replace(plan.model, pass_tokens=tokens_of_pass)
    for row in prompt_rows(bench, prefill):
        estimate = first_token_estimate(
            model, plan.request.card, cap=cap, prompt_tokens=row["batch"] * row["prompt_tokens"]
        )
        yield {"measure": "first token"} | row | _planned(estimate, row["last_first_token_ms"])
    peaks["prefill"] = bench.memory.peak_bytes()


def _planned(estimate: Estimate, measured_ms: float) -> Row:
    planned_ms = estimate.seconds * 1e3
    return {
        "planned_ms": planned_ms,
        "planned_low_ms": estimate.low_s * 1e3,
        "planned_high_ms": estimate.high_s * 1e3,
        "planned_over_measured": planned_ms / measured_ms,
    }


def _sizes(plan: Plan, engine: OfflineEngine) -> Row:
    """Of the engine, and of its plan."""
    snapshot, tokens_of_pass = engine.snapshot(), _scheduler(engine).max_num_scheduled_tokens
    layout = snapshot.layout
    kv_blocks = layout.kv_blocks_within(snapshot.budget_bytes - layout.experts_bytes_by_cap[plan.split.cap])
    return {
        "cap": plan.split.cap,
        "kv_tokens": kv_blocks * layout.block_tokens,
        "planned_kv_tokens": plan.kv_tokens,
        "is_layout_as_planned": layout == plan.layout and kv_blocks == plan.split.kv_blocks,
        "page_bytes": layout.page_bytes,
        "pass_tokens": tokens_of_pass,
        "planned_pass_tokens": plan.choice.max_num_batched_tokens,
        "pooled_bytes": snapshot.budget_bytes,
        "planned_other_bytes": plan.other_bytes,
        "measured_other_bytes": engine.facts.measured_other_bytes,
    }


def _scheduler(engine: OfflineEngine) -> Any:
    return engine.llm.llm_engine.engine_core.engine_core.scheduler


def _ask(engine: OfflineEngine, job: BudgetJob, run: str) -> None:
    decode = job.decode
    sessions = range(max(decode.batches))
    prompts = [job.engine.prompt(session, decode.prompt_tokens) for session in sessions]
    generate(engine.llm, prompts, _ANSWER_TOKENS, run)


def _resize(engine: OfflineEngine, job: BudgetJob) -> list[Row]:
    """To the largest cap, the smallest, and some GiB to and fro, with requests after each."""
    caps = feasible_caps(engine)
    bytes_by_cap = engine.snapshot().layout.experts_bytes_by_cap
    step = next((cap for cap in caps if bytes_by_cap[cap] - bytes_by_cap[caps[0]] >= _STEP_BYTES), caps[-1])
    wanted = [caps[-1], *([caps[0], step] * job.resizes)][: job.resizes]
    rows = []
    for index, cap in enumerate(wanted):
        outcome = move(engine, split_at(engine, cap))
        if outcome.outcome.value != "applied":
            raise RuntimeError(f"cap {cap}: {outcome.outcome.value}: {outcome.reason}")
        engine.check_integrity()
        _ask(engine, job, f"cap-{index}")
        row = {"cap_before": outcome.before.cap, "cap": cap, "kv_blocks": outcome.after.kv_blocks}
        rows.append(row | {"bytes_moved": outcome.bytes_moved, "pause_ms": outcome.pause_ms})
    return rows
