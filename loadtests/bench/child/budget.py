"""What the driver counts against an engine's budget, while another process holds the rest of the card."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from loadtests.bench.child.ballast import ballast
from loadtests.bench.child.engine import engine_arguments, generate, make_prompt
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.resize import feasible_caps, move, split_at
from loadtests.bench.job import BudgetJob
from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings

Row = dict[str, Any]

_ANSWER_TOKENS = 4
_STEP_BYTES = 1 << 30


def run_budget(job: BudgetJob) -> Iterator[Row]:
    """One row: the peak over loading, capture, decode, a long prefill and resizes, each also by itself."""
    settings = WispSettings.model_validate(job.wisp)
    budget_bytes = settings.vram_budget_bytes or 0
    with ballast(budget_bytes) as ballast_bytes:
        memory = GpuMemory()
        memory.restart()
        peaks: dict[str, int | None] = {}
        engine = OfflineEngine(job.engine.model, engine_arguments(job.engine), settings)
        try:
            peaks["load and capture"] = memory.peak_bytes()
            for phase, batch, prompt_tokens in (("decode", job.batch, 32), ("prefill", 1, job.prompt_tokens)):
                memory.restart()
                _ask(engine, job, batch, prompt_tokens, phase)
                peaks[phase] = memory.peak_bytes()
            memory.restart()
            resizes = _resize(engine, job)
            peaks["resizes"] = memory.peak_bytes()
            peak_bytes = max(peak or 0 for peak in peaks.values())
            snapshot = engine.snapshot()
            yield {
                "mode": job.engine.mode,
                "budget_bytes": budget_bytes,
                "peak_gpu_bytes": peak_bytes,
                "peak_gpu_bytes_by_phase": peaks,
                "peak_gpu_source": memory.source,
                "is_within_budget": 0 < peak_bytes <= budget_bytes,
                "ballast_bytes": ballast_bytes,
                "pooled_bytes": snapshot.budget_bytes,
                "resizes": resizes,
            }
        finally:
            engine.shutdown()


def _ask(engine: OfflineEngine, job: BudgetJob, batch: int, prompt_tokens: int, run: str) -> None:
    prompts = [make_prompt(session, prompt_tokens, job.vocab_size, job.seed) for session in range(batch)]
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
        _ask(engine, job, job.batch, 32, f"cap-{index}")
        row = {"cap_before": outcome.before.cap, "cap": cap, "kv_blocks": outcome.after.kv_blocks}
        rows.append(row | {"bytes_moved": outcome.bytes_moved, "pause_ms": outcome.pause_ms})
    return rows
