"""From a configuration to the engine processes that it needs. Pure but for the model's config.json."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtests.bench.configs import (
    BudgetConfig,
    DecodeConfig,
    EngineConfig,
    IdentityConfig,
    PrefillConfig,
    ResizeConfig,
    ReturnConfig,
)
from loadtests.bench.job import (
    BudgetJob,
    DecodeJob,
    EngineJob,
    IdentityJob,
    Job,
    LatencyJob,
    OnlineJob,
    PrefillJob,
    ResizeJob,
    ReturnJob,
    TraceJob,
)
from loadtests.bench.modes import BASELINES, Mode, mode_arguments
from loadtests.bench.online.in_process import InProcessConfig
from loadtests.shapes import SHAPES, Shape, read_shape, write_shape

NamedJob = tuple[str, Job]

_SEED = 1
_SHARE_ASKED_FOR = 0.3  # of the card, which vLLM wants to find free at the start; nothing is sized by it here
_MAX_TRACE_POSITIONS = 1024  # a longer session's routing starts over: a long prompt needs nearly every expert anyway


@dataclass(frozen=True, slots=True)
class Model:
    """A directory that vLLM can read, and its shape."""

    directory: Path
    shape: Shape
    has_made_up_weights: bool


def find_model(name: str, scratch: Path) -> Model:
    """A named shape, written into ``scratch``, or a checkpoint's directory. Raises ConfigurationError."""
    if name in SHAPES:
        write_shape(scratch / name, SHAPES[name])
        return Model(scratch / name, SHAPES[name], has_made_up_weights=True)
    directory = Path(name).resolve()
    has_weights = any(directory.glob("*.safetensors"))
    return Model(directory, read_shape(directory), has_made_up_weights=not has_weights)


def decode_jobs(config: DecodeConfig, model: Model) -> list[NamedJob]:
    """Resident first, then the pager at all its caps in one engine, then the baselines."""
    positions = _decode_positions(config)
    limits = {"max_model_len": positions, "max_num_batched_tokens": max(256, 8 * config.prompt_tokens)}
    trace = _trace(config.engine, model.shape, max(config.batches), positions)
    return list(_decode_jobs(config, model, trace, limits))


def prefill_jobs(config: PrefillConfig, model: Model) -> list[NamedJob]:
    """Every mode at all chunk sizes."""
    trace = _trace(config.engine, model.shape, max(config.batches), max(config.prompt_tokens) + 2)
    return [
        (f"{mode.value}-{_mode_cap(config, model.shape, mode)}", _prefill_job(config, model, mode, trace))
        for mode in config.modes
    ]


def latency_jobs(decode: DecodeConfig, prefill: PrefillConfig, model: Model) -> list[NamedJob]:
    """Both in the engines of the decode run, which then have room for the longest prompt; every mode once in each."""
    positions = max(_decode_positions(decode), _prefill_positions(prefill))
    limits = {"max_model_len": positions, "max_num_batched_tokens": max(prefill.chunk_tokens)}
    trace = _trace(decode.engine, model.shape, max(*decode.batches, *prefill.batches), positions)
    decode = replace(decode, engine=replace(decode.engine, kv_bytes=prefill.engine.kv_bytes))
    waiting = set(prefill.modes)
    jobs: list[NamedJob] = []
    for name, job in _decode_jobs(decode, model, trace, limits):
        mode = Mode(job.engine.mode)
        has_prompts = mode in waiting and _mode_cap(prefill, model.shape, mode) in job.caps
        measured = _prefill_job(prefill, model, mode, trace) if has_prompts else None
        waiting -= {mode} if has_prompts else set()
        jobs.append((name, LatencyJob(engine=job.engine, trace=trace, decode=job, prefill=measured)))
    return jobs


def _decode_positions(config: DecodeConfig) -> int:
    return config.prompt_tokens + config.warmup_tokens + config.timed_tokens


def _prefill_positions(config: PrefillConfig) -> int:
    return max(config.prompt_tokens) + 2


def _mode_cap(config: PrefillConfig, shape: Shape, mode: Mode) -> int:
    return shape.experts if mode is Mode.RESIDENT else _cap(shape, config.fraction)


def _decode_jobs(
    config: DecodeConfig, model: Model, trace: TraceJob | None, limits: dict[str, Any]
) -> Iterator[tuple[str, DecodeJob]]:
    shape = model.shape
    caps = tuple(sorted({_cap(shape, fraction) for fraction in config.fractions}))
    wanted = [(Mode.RESIDENT, (shape.experts,)), *([(Mode.PAGED, caps)] if caps else [])]
    wanted += [(mode, (_cap(shape, fraction),)) for mode, fraction in config.baselines]
    compared_tokens = min(
        config.warmup_tokens + config.timed_tokens, config.baseline_warmup_tokens + config.baseline_timed_tokens
    )
    for mode, mode_caps in wanted:
        is_baseline = mode in BASELINES
        job = DecodeJob(
            engine=_engine_job(_with_graphs(config.engine, config.batches), model, mode, mode_caps[0], limits),
            trace=trace,
            caps=mode_caps,
            batches=config.batches,
            prompt_tokens=config.prompt_tokens,
            warmup_tokens=config.baseline_warmup_tokens if is_baseline else config.warmup_tokens,
            timed_tokens=config.baseline_timed_tokens if is_baseline else config.timed_tokens,
            compared_tokens=compared_tokens,
            vocab_size=shape.vocab_size,
            seed=_SEED,
        )
        yield f"{mode.value}-{mode_caps[0]}", job


def _prefill_job(config: PrefillConfig, model: Model, mode: Mode, trace: TraceJob | None) -> PrefillJob:
    cap = _mode_cap(config, model.shape, mode)
    is_baseline = mode in BASELINES
    limits = {"max_model_len": _prefill_positions(config), "max_num_batched_tokens": max(config.chunk_tokens)}
    return PrefillJob(
        engine=_engine_job(config.engine, model, mode, cap, limits),
        trace=trace,
        cap=cap,
        batches=config.batches,
        prompt_tokens=config.prompt_tokens,
        chunk_tokens=config.chunk_tokens,
        max_total_tokens=(
            config.baseline_max_total_tokens if is_baseline else max(config.batches) * max(config.prompt_tokens)
        ),
        repeats=config.repeats,
        enough_s=config.baseline_enough_s if is_baseline else config.enough_s,
        vocab_size=model.shape.vocab_size,
        seed=_SEED,
    )


def resize_jobs(config: ResizeConfig, model: Model) -> list[NamedJob]:
    """One engine that WiSP sizes."""
    engine_args = {"max_model_len": config.max_model_len, "enable_prefix_caching": True}
    job = ResizeJob(
        engine=_sized_engine_job(config.engine, model, engine_args),
        wisp={"vram_budget_bytes": config.budget_bytes, "bypass_if_it_fits": False, **config.engine.wisp},
        step_bytes=config.step_bytes,
        resizes=config.resizes,
        resizes_under_traffic=config.resizes_under_traffic,
        batch=config.batch,
        prompt_tokens=config.prompt_tokens,
        vocab_size=model.shape.vocab_size,
        seed=_SEED,
    )
    return [("paged-resize", job)]


def return_jobs(config: ReturnConfig, model: Model) -> list[NamedJob]:
    """One engine with KV in host memory."""
    engine_args = {"max_model_len": config.max_model_len, "enable_prefix_caching": True}
    job = ReturnJob(
        engine=_sized_engine_job(config.engine, model, engine_args),
        wisp={
            "vram_budget_bytes": config.budget_bytes,
            "bypass_if_it_fits": False,
            "kv_host_bytes": config.kv_host_bytes,
            **config.engine.wisp,
        },
        prompt_tokens=config.prompt_tokens,
        answer_tokens=config.answer_tokens,
        new_tokens=config.new_tokens,
        repeats=config.repeats,
        vocab_size=model.shape.vocab_size,
        seed=_SEED,
    )
    return [("paged-return", job)]


def budget_jobs(config: BudgetConfig, model: Model) -> list[NamedJob]:
    """One engine that WiSP plans and sizes in each budget."""
    positions = max(config.prompt_tokens) + 2
    trace = _trace(config.engine, model.shape, max(config.batches), positions)
    with_graphs = _with_graphs(config.engine, config.batches)
    args = {"max_model_len": config.max_model_len, "max_num_seqs": max(config.batches), "enable_prefix_caching": False}
    engine = _sized_engine_job(with_graphs, model, args)
    decode = DecodeJob(
        engine=engine,
        trace=trace,
        caps=(),
        batches=config.batches,
        prompt_tokens=config.decode_prompt_tokens,
        warmup_tokens=config.warmup_tokens,
        timed_tokens=config.timed_tokens,
        compared_tokens=config.warmup_tokens + config.timed_tokens,
        vocab_size=model.shape.vocab_size,
        seed=_SEED,
    )
    prefill = PrefillJob(
        engine=engine,
        trace=trace,
        cap=0,
        batches=(1,),
        prompt_tokens=config.prompt_tokens,
        chunk_tokens=(),
        max_total_tokens=max(config.prompt_tokens),
        repeats=config.repeats,
        enough_s=config.enough_s,
        # Of those that decode in the largest batch only, which comes first: the last ones' experts are in the slots.
        first_session=max(config.batches) - 1,
        vocab_size=model.shape.vocab_size,
        seed=_SEED,
    )
    jobs: list[NamedJob] = []
    for budget_bytes in config.budgets_bytes:
        job = BudgetJob(
            engine=engine,
            wisp={"vram_budget_bytes": budget_bytes, "bypass_if_it_fits": False, **config.engine.wisp},
            trace=trace,
            decode=decode,
            prefill=prefill,
            resizes=config.resizes,
        )
        jobs.append((f"paged-in-{budget_bytes / 1e9:g}-gb", job))
    return jobs


def identity_jobs(config: IdentityConfig, model: Model) -> list[NamedJob]:
    """Resident and paged, with CUDA graphs and without; and one that WiSP resizes."""
    shape = model.shape
    longest = max(config.prompt_tokens)
    limits = {"max_model_len": longest + config.answer_tokens, "max_num_batched_tokens": longest}
    batches = _prompt_lengths(config)
    with_graphs = _with_graphs(config.engine, config.batches)
    without = replace(config.engine, engine_args={**_without_graphs(config.engine.engine_args), "enforce_eager": True})

    def job(engine: EngineJob, caps: tuple[int, ...], wisp: dict[str, object] | None = None) -> IdentityJob:
        return IdentityJob(
            engine=engine,
            caps=caps,
            wisp=wisp,
            batches=batches,
            answer_tokens=config.answer_tokens,
            vocab_size=shape.vocab_size,
            seed=_SEED,
        )

    jobs: list[NamedJob] = []
    for kind, engine in (("graphs", with_graphs), ("eager", without)):
        for mode, caps in ((Mode.RESIDENT, (shape.experts,)), (Mode.PAGED, config.caps)):
            jobs.append((f"{mode.value}-{kind}", job(_engine_job(engine, model, mode, caps[0], limits), caps)))
    sized = _sized_engine_job(with_graphs, model, {**limits, "enable_prefix_caching": False})
    wisp: dict[str, object] = {
        "vram_budget_bytes": config.budget_bytes,
        "bypass_if_it_fits": False,
        **config.engine.wisp,
    }
    return [*jobs, ("paged-resized", job(sized, config.splits, wisp))]


def online_jobs(config: InProcessConfig, model: Model) -> list[NamedJob]:
    """One engine that WiSP sizes, which plays the same turns in every way; the policy first, from a fresh engine."""
    arguments = config.engine.engine_args
    ways = (*([None] if config.policy != "none" else []), *config.caps)
    timeout_s = config.engine.timeout_s + len(ways) * config.deadline_s
    engine = replace(config.engine, timeout_s=timeout_s)
    engine = _with_graphs(engine, tuple(range(1, arguments["max_num_seqs"] + 1)))
    job = OnlineJob(
        engine=_sized_engine_job(engine, model, {}),
        wisp={
            "vram_budget_bytes": config.vram_budget_bytes,
            "bypass_if_it_fits": False,
            "window_s": config.window_s,
            **config.engine.wisp,
        },
        trace=_trace(config.engine, model.shape, config.num_topics, config.max_context_tokens),
        workflow=config.workflow,
        num_turns=config.num_turns,
        seed=config.seed,
        max_context_tokens=config.max_context_tokens,
        time_scale=config.time_scale,
        num_topics=config.num_topics,
        ways=ways,
        policy=config.policy,
        epoch_s=config.epoch_s,
        deadline_s=config.deadline_s,
        vocab_size=model.shape.vocab_size,
    )
    return [("online", job)]


def _prompt_lengths(config: IdentityConfig) -> tuple[tuple[int, ...], ...]:
    """Each length alone, then mixed ones at each batch size, with the longest in one of each."""
    rng = random.Random(_SEED)
    *shorter, longest = sorted(config.prompt_tokens)
    alone = tuple((length,) for length in config.prompt_tokens)
    return alone + tuple(
        tuple(longest if index == at == 0 else rng.choice(shorter) for at in range(batch))
        for batch in config.batches
        for index in range(config.sets)
    )


def _sized_engine_job(config: EngineConfig, model: Model, engine_args: dict[str, Any]) -> EngineJob:
    """An engine whose memory WiSP sizes."""
    return EngineJob(
        mode=Mode.PAGED.value,
        model=str(model.directory),
        device=config.device,
        engine_args=config.engine_args | engine_args,
        has_made_up_weights=model.has_made_up_weights,
        env=config.env,
        timeout_s=config.timeout_s,
    )


def _without_graphs(engine_args: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in engine_args.items() if name != "compilation_config"}


def _engine_job(config: EngineConfig, model: Model, mode: Mode, cap: int, limits: dict[str, Any]) -> EngineJob:
    own = mode_arguments(mode, model.shape, cap)
    engine_args = {**config.engine_args, **limits, **own.engine_args}
    # Equal KV on every side, no answers from a cache, and nobody profiles or takes a share of the device.
    engine_args |= {"kv_cache_memory_bytes": config.kv_bytes, "enable_prefix_caching": False}
    if config.device == "cuda":
        engine_args["gpu_memory_utilization"] = _SHARE_ASKED_FOR
    if mode is Mode.PAGED:
        engine_args["additional_config"] = {"wisp": {**engine_args["additional_config"]["wisp"], **config.wisp}}
    return EngineJob(
        mode=mode.value,
        model=str(model.directory),
        device=config.device,
        engine_args=engine_args,
        has_made_up_weights=model.has_made_up_weights,
        env=config.env | own.env,
        timeout_s=config.timeout_s,
        must_offload=mode in BASELINES,
    )


def _with_graphs(config: EngineConfig, batches: tuple[int, ...]) -> EngineConfig:
    """A graph of each batch's exact size: a padded one would replay rows that belong to no request."""
    if "compilation_config" not in config.engine_args:
        return config
    graphs = config.engine_args["compilation_config"] | {"cudagraph_capture_sizes": sorted(batches)}
    return replace(config, engine_args=config.engine_args | {"compilation_config": graphs})


def _cap(shape: Shape, fraction: float) -> int:
    return min(shape.experts, max(shape.top_k, math.floor(fraction * shape.experts + 0.5)))


def _trace(config: EngineConfig, shape: Shape, sessions: int, positions: int) -> TraceJob | None:
    if config.routing == "real":
        return None
    return TraceJob(
        sessions=sessions,
        positions=min(positions, _MAX_TRACE_POSITIONS),
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        seed=config.trace_seed,
    )
