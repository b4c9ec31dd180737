"""What the driver counts against an engine's budget, while another process holds the rest of the card."""

from __future__ import annotations

import ctypes
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from loadtests.bench.child.engine import engine_arguments, generate, make_prompt
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.resize import feasible_caps, move, split_at
from loadtests.bench.job import BudgetJob
from wisp_core.engine.offline import OfflineEngine
from wisp_core.settings import WispSettings

Row = dict[str, Any]

_ANSWER_TOKENS = 16
_DIE_WITH_PARENT = 1  # prctl's PR_SET_PDEATHSIG


def run_budget(job: BudgetJob) -> Iterator[Row]:
    """One row: the peak over loading, capture, decode, a long prefill and resizes, each also by itself."""
    settings = WispSettings.model_validate(job.wisp)
    budget_bytes = settings.vram_budget_bytes or 0
    with _ballast(budget_bytes) as ballast_bytes:
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
            caps = _resize(engine, job)
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
                "caps": caps,
            }
        finally:
            engine.shutdown()


def _ask(engine: OfflineEngine, job: BudgetJob, batch: int, prompt_tokens: int, run: str) -> None:
    prompts = [make_prompt(session, prompt_tokens, job.vocab_size, job.seed) for session in range(batch)]
    generate(engine.llm, prompts, _ANSWER_TOKENS, run)


def _resize(engine: OfflineEngine, job: BudgetJob) -> list[int]:
    """To the largest cap, the smallest and some between, with requests after each; returns the caps."""
    rng = random.Random(job.seed)
    caps = feasible_caps(engine)
    wanted = [caps[-1], caps[0], *(rng.choice(caps) for _ in range(job.resizes - 2))]
    for index, cap in enumerate(wanted):
        outcome = move(engine, split_at(engine, cap))
        if outcome.outcome.value != "applied":
            raise RuntimeError(f"cap {cap}: {outcome.outcome.value}: {outcome.reason}")
        engine.check_integrity()
        _ask(engine, job, job.batch, 32, f"cap-{index}")
    return wanted


@contextmanager
def _ballast(left_bytes: int) -> Iterator[int]:
    """A process that leaves ``left_bytes`` of the card free. Call it before this process uses CUDA."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        _hold_the_rest(left_bytes, writes)
    try:
        os.close(writes)
        with os.fdopen(reads) as answers:
            yield int(answers.readline() or 0)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _hold_the_rest(left_bytes: int, writes: int) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    free_bytes, _ = torch.cuda.mem_get_info()
    held = torch.empty(max(0, free_bytes - left_bytes), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    os.write(writes, f"{held.numel()}\n".encode())
    while True:
        signal.pause()
