"""The engine of a benchmark process, and what it says about where its weights are."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm import LLM, SamplingParams
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.offloader import get_offloader
from vllm.sampling_params import RequestOutputKind

from loadtests.bench.child.replay import Replay, request_id
from loadtests.bench.child.weights import LOAD_FORMAT
from loadtests.bench.child.workers import replay_with
from loadtests.bench.job import EngineJob, TraceJob
from loadtests.routing_trace import TraceConfig, routing_trace
from wisp_core.pager.registry import current_pager

_WORKERS = {
    "cpu": "loadtests.bench.child.workers.BenchCPUWorker",
    "cuda": "loadtests.bench.child.workers.BenchGPUWorker",
}
_SETS = ("cpu_offload_params", "offload_params")  # JSON has no sets


def build_replay(trace: TraceJob | None) -> Replay | None:
    """The routing to replay, or None. The trace itself is made once per process and its forks."""
    return None if trace is None else Replay(_trace(trace))


@cache
def _trace(trace: TraceJob) -> npt.NDArray[np.int16]:
    return routing_trace(TraceConfig(**trace.model_dump()))


@contextmanager
def open_engine(job: EngineJob, replay: Replay | None) -> Iterator[LLM]:
    """An engine in this process; its memory is free only once the process ends."""
    _register_model_classes()
    arguments: dict[str, Any] = {"worker_cls": _WORKERS[job.device], "seed": 0, **engine_arguments(job)}
    replay_with(replay)
    llm = LLM(model=job.model, **arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _register_model_classes() -> None:
    """Tell vLLM the class itself: it would start a process, which imports all of vLLM, to look at it."""
    ModelRegistry.register_model("Qwen3MoeForCausalLM", Qwen3MoeForCausalLM)


def engine_arguments(job: EngineJob) -> dict[str, Any]:
    """vLLM's arguments."""
    arguments: dict[str, Any] = dict(job.engine_args)
    for name in _SETS:
        if name in arguments:
            arguments[name] = set(arguments[name])
    if job.has_made_up_weights:
        arguments |= {"load_format": LOAD_FORMAT, "skip_tokenizer_init": True}
    return arguments


def offloaded_bytes() -> int:
    """Bytes of weights that the engine keeps off its device, by the figures of whoever put them there."""
    pager = current_pager()
    if pager is not None:
        by_cap = pager.num_experts - pager.cap
        return int(by_cap * pager.expert_bytes * pager.num_layers)
    offloader = get_offloader()
    for name in ("cpu_offload_bytes", "total_offloaded_bytes"):  # vLLM's UVA and prefetch offloaders
        if hasattr(offloader, name):
            return int(getattr(offloader, name))
    return 0


@dataclass(slots=True)
class Generation:
    """Answers of one batch, all requests added before the first step."""

    started_s: float
    tokens: list[list[int]]
    token_times_s: list[list[float]] = field(default_factory=list)  # when each token came out, per request
    cached_tokens: int = 0  # of all prompts, from the prefix cache

    def output_hash(self, num_tokens: int) -> str:
        """SHA-256 of the first tokens of all answers."""
        return hashlib.sha256(repr([tokens[:num_tokens] for tokens in self.tokens]).encode()).hexdigest()

    @property
    def first_token_s(self) -> list[float]:
        """Seconds from the start to each request's first token."""
        return [times[0] - self.started_s for times in self.token_times_s]

    def step_times_s(self, first: int) -> list[float]:
        """Seconds of the steps that gave token ``first`` and later ones: all requests decode in them together."""
        done = [max(times) for times in zip(*self.token_times_s, strict=True)]
        return [after - before for before, after in zip(done[first - 1 :], done[first:], strict=False)]


def generate(
    llm: LLM,
    prompts: Sequence[list[int]],
    num_tokens: int,
    run: str,
    *,
    first_session: int = 0,
    cache_salt: str | None = None,
    after_step: Callable[[], None] | None = None,
) -> Generation:
    """Answer all prompts; request i follows session ``first_session + i`` of the trace.

    Sampled at temperature 1 with a seed each: greedy answers of random weights repeat one token and would hide errors.
    """
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    engine = llm.llm_engine
    generation = Generation(0.0, [[] for _ in prompts], [[] for _ in prompts])
    index_of = {}
    for index, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=1.0,
            seed=index,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = request_id(first_session + index, run)
        engine.add_request(name, {"prompt_token_ids": prompt, **salt}, params)
        index_of[name] = index
    gc.collect()
    gc.disable()
    try:
        generation.started_s = time.perf_counter()
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now_s = time.perf_counter()
            for output in outputs:
                index = index_of[output.request_id]
                new = output.outputs[0].token_ids
                generation.tokens[index].extend(new)
                generation.token_times_s[index].extend([now_s] * len(new))
                if output.finished:
                    generation.cached_tokens += output.num_cached_tokens or 0
            if after_step is not None:
                after_step()
    finally:
        gc.enable()
    return generation


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
