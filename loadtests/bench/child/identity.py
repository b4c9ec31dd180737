"""Answers of many prompts, down to the log-probabilities, at every cap of one engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from vllm import LLM, SamplingParams
from vllm.compilation.counter import compilation_counter

from loadtests.bench.child.engine import engine_arguments, open_engine
from loadtests.bench.child.gpu_memory import GpuMemory
from loadtests.bench.child.resize import move, split_at
from loadtests.bench.job import IdentityJob
from loadtests.rows import Row
from wisp_core.engine.offline import OfflineEngine
from wisp_core.pager.registry import current_pager
from wisp_core.settings import WispSettings

_LOGPROBS = 3


def run_identity(job: IdentityJob) -> Iterator[Row]:
    """One row for each cap."""
    facts = {
        "mode": job.engine.mode,
        "has_graphs": not job.engine.engine_args.get("enforce_eager", False),
        "is_resized": job.engine.wisp is not None,
        "prompts": sum(map(len, job.batches)),
    }
    rows = _in_place(job) if job.engine.wisp is None else _resized(job)
    for row in rows:
        yield facts | row


def _in_place(job: IdentityJob) -> Iterator[Row]:
    with open_engine(job.engine, None) as llm:
        for cap in job.caps:
            pager = current_pager()
            if pager is not None:
                pager.set_cap(cap)
            yield {"cap": cap, "output_hash": _digest(llm, job)}
            if pager is not None:
                pager.check_integrity()


def _resized(job: IdentityJob) -> Iterator[Row]:
    settings = WispSettings.model_validate(job.engine.wisp)
    memory = GpuMemory()
    memory.restart()
    engine = OfflineEngine(job.engine.model, engine_arguments(job.engine), settings)
    captured = compilation_counter.num_cudagraph_captured
    try:
        for cap in job.caps:
            outcome = move(engine, split_at(engine, cap))
            row = {"cap": outcome.after.cap, "outcome": outcome.outcome.value, "bytes_moved": outcome.bytes_moved}
            row["output_hash"] = _digest(engine.llm, job)
            engine.check_integrity()
            yield row | {
                "graphs_captured_again": compilation_counter.num_cudagraph_captured - captured,
                "budget_bytes": settings.vram_budget_bytes,
                "peak_gpu_bytes": memory.peak_bytes(),
            }
    finally:
        engine.shutdown()


def _digest(llm: LLM, job: IdentityJob) -> str:
    """SHA-256 of all tokens and log-probabilities; sampled with a seed, since greedy answers repeat one token."""
    digest = hashlib.sha256()
    for index, lengths in enumerate(job.batches):
        prompts = [
            {"prompt_token_ids": job.engine.prompt(100 * index + session, length)}
            for session, length in enumerate(lengths)
        ]
        params = [
            SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=job.answer_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=_LOGPROBS,
            )
            for seed in range(len(lengths))
        ]
        for output in llm.generate(prompts, params, use_tqdm=False):
            answer = output.outputs[0]
            steps = [sorted((token, entry.logprob) for token, entry in step.items()) for step in answer.logprobs or []]
            digest.update(repr((list(answer.token_ids), steps)).encode())
    return digest.hexdigest()
