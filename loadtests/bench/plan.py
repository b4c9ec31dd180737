"""From a configuration to the engine processes that it needs. Pure but for the model's config.json."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

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
from loadtests.shapes import SHAPES, write_shape
from wisp_core.errors import ConfigurationError
from wisp_core.planner.model_config import read_config
from wisp_core.planner.model_shape import ModelShape, read_shape

NamedJob = tuple[str, Job]
AnyJob = TypeVar("AnyJob", bound=Job)

_SHARE_ASKED_FOR = 0.3  # of the card, which vLLM wants to find free at the start; nothing is sized by it here
_MAX_TRACE_POSITIONS = 1024  # a longer session's routing starts over: a long prompt needs nearly every expert anyway


@dataclass(frozen=True, slots=True)
class Model:
    """A directory that vLLM can read, and its shape."""

    directory: Path
    shape: ModelShape
    has_made_up_weights: bool


def find_model(name: str, scratch: Path) -> Model:
    """A named shape, written into ``scratch``, or a checkpoint's directory. Raises ConfigurationError."""
    directory = Path(name).resolve()
    if name in SHAPES:
        directory = scratch / name
        write_shape(directory, SHAPES[name])
    elif not (directory / "config.json").exists():
        raise ConfigurationError(f"{name} holds no config.json: name a checkpoint, or one of {', '.join(SHAPES)}")
    config = read_config(str(directory))
    if config.get("model_type") != "qwen3_moe":
        raise ConfigurationError(f"{name}: model_type {config.get('model_type')!r}, benchmarks need 'qwen3_moe'")
    has_weights = any(directory.glob("*.safetensors"))
    return Model(directory, read_shape(config, name=name), has_made_up_weights=not has_weights)


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
        jobs.append((name, LatencyJob(engine=job.engine, decode=job, prefill=measured)))
    return jobs


def _decode_positions(config: DecodeConfig) -> int:
    return config.prompt_tokens + config.warmup_tokens + config.timed_tokens


def _prefill_positions(config: PrefillConfig) -> int:
    return max(config.prompt_tokens) + 2


def _mode_cap(config: PrefillConfig, shape: ModelShape, mode: Mode) -> int:
    return shape.num_experts if mode is Mode.RESIDENT else _cap(shape, config.fraction)


def _decode_jobs(
    config: DecodeConfig, model: Model, trace: TraceJob | None, limits: dict[str, Any]
) -> Iterator[tuple[str, DecodeJob]]:
    shape = model.shape
    caps = tuple(sorted({_cap(shape, fraction) for fraction in config.fractions}))
    wanted = [(Mode.RESIDENT, (shape.num_experts,)), *([(Mode.PAGED, caps)] if caps else [])]
    wanted += [(mode, (_cap(shape, fraction),)) for mode, fraction in config.baselines]
    own_tokens = (config.warmup_tokens, config.timed_tokens)
    baseline_tokens = (config.baseline_warmup_tokens, config.baseline_timed_tokens)
    engine = _with_graphs(config.engine, config.batches)
    for mode, mode_caps in wanted:
        warmup_tokens, timed_tokens = baseline_tokens if mode in BASELINES else own_tokens
        own = {
            "caps": mode_caps,
            "warmup_tokens": warmup_tokens,
            "timed_tokens": timed_tokens,
            "compared_tokens": min(sum(own_tokens), sum(baseline_tokens)),
        }
        job = _job(DecodeJob, config, _engine_at_cap(engine, model, mode, mode_caps[0], limits, trace), **own)
        yield f"{mode.value}-{mode_caps[0]}", job


def _prefill_job(config: PrefillConfig, model: Model, mode: Mode, trace: TraceJob | None) -> PrefillJob:
    cap = _mode_cap(config, model.shape, mode)
    limits = {"max_model_len": _prefill_positions(config), "max_num_batched_tokens": max(config.chunk_tokens)}
    own: dict[str, Any] = {"cap": cap, "max_total_tokens": max(config.batches) * max(config.prompt_tokens)}
    if mode in BASELINES:
        own |= {"max_total_tokens": config.baseline_max_total_tokens, "enough_s": config.baseline_enough_s}
    return _job(PrefillJob, config, _engine_at_cap(config.engine, model, mode, cap, limits, trace), **own)


def resize_jobs(config: ResizeConfig, model: Model) -> list[NamedJob]:
    """One engine that WiSP sizes."""
    arguments = {"max_model_len": config.max_model_len, "enable_prefix_caching": True}
    return [
        ("paged-resize", _job(ResizeJob, config, _sized_engine(config.engine, model, arguments, config.budget_bytes)))
    ]


def return_jobs(config: ReturnConfig, model: Model) -> list[NamedJob]:
    """One engine with KV in host memory."""
    arguments = {"max_model_len": config.max_model_len, "enable_prefix_caching": True}
    wisp = {"kv_host_bytes": config.kv_host_bytes}
    engine = _sized_engine(config.engine, model, arguments, config.budget_bytes, wisp)
    return [("paged-return", _job(ReturnJob, config, engine))]


def budget_jobs(config: BudgetConfig, model: Model) -> list[NamedJob]:
    """One engine that WiSP plans and sizes in each budget."""
    trace = _trace(config.engine, model.shape, max(config.batches), max(config.prompt_tokens) + 2)
    arguments = {
        "max_model_len": config.max_model_len,
        "max_num_seqs": max(config.batches),
        "enable_prefix_caching": False,
    }
    jobs: list[NamedJob] = []
    for budget_bytes in config.budgets_bytes:
        graphs = _with_graphs(config.engine, config.batches)
        engine = _sized_engine(graphs, model, arguments, budget_bytes, trace=trace)
        num_tokens = config.warmup_tokens + config.timed_tokens
        decode = _job(
            DecodeJob, config, engine, caps=(), prompt_tokens=config.decode_prompt_tokens, compared_tokens=num_tokens
        )
        prefill = _job(
            PrefillJob,
            config,
            engine,
            cap=0,
            batches=(1,),
            chunk_tokens=(),
            max_total_tokens=max(config.prompt_tokens),
            # Decoded in the largest batch only, which comes first: the slots hold the last ones' experts.
            first_session=max(config.batches) - 1,
        )
        job = _job(BudgetJob, config, engine, decode=decode, prefill=prefill)
        jobs.append((f"paged-in-{budget_bytes / 1e9:g}-gb", job))
    return jobs


def identity_jobs(config: IdentityConfig, model: Model) -> list[NamedJob]:
    """Resident and paged, with CUDA graphs and without; and one that WiSP resizes."""
    longest = max(config.prompt_tokens)
    limits = {"max_model_len": longest + config.answer_tokens, "max_num_batched_tokens": longest}
    batches = _prompt_lengths(config)
    with_graphs = _with_graphs(config.engine, config.batches)
    eager = {name: value for name, value in config.engine.engine_args.items() if name != "compilation_config"}
    without = replace(config.engine, engine_args=eager | {"enforce_eager": True})
    jobs: list[NamedJob] = []
    for kind, engine in (("graphs", with_graphs), ("eager", without)):
        for mode, caps in ((Mode.RESIDENT, (model.shape.num_experts,)), (Mode.PAGED, config.caps)):
            at_cap = _engine_at_cap(engine, model, mode, caps[0], limits)
            jobs.append((f"{mode.value}-{kind}", _job(IdentityJob, config, at_cap, caps=caps, batches=batches)))
    sized = _sized_engine(with_graphs, model, {**limits, "enable_prefix_caching": False}, config.budget_bytes)
    return [*jobs, ("paged-resized", _job(IdentityJob, config, sized, caps=config.splits, batches=batches))]


def online_jobs(config: InProcessConfig, model: Model) -> list[NamedJob]:
    """One engine that WiSP sizes, which plays the same turns in every way; the policy first, from a fresh engine."""
    ways = (*([None] if config.policy != "none" else []), *config.caps)
    engine = replace(config.engine, timeout_s=config.engine.timeout_s + len(ways) * config.deadline_s)
    engine = _with_graphs(engine, tuple(range(1, config.engine.engine_args["max_num_seqs"] + 1)))
    trace = _trace(config.engine, model.shape, config.num_topics, config.max_context_tokens)
    sized = _sized_engine(engine, model, {}, config.vram_budget_bytes, {"window_s": config.window_s}, trace)
    return [("online", _job(OnlineJob, config, sized, ways=ways))]


def _prompt_lengths(config: IdentityConfig) -> tuple[tuple[int, ...], ...]:
    """Each length alone, then mixed ones at each batch size, with the longest in one of each."""
    rng = random.Random(1)
    *shorter, longest = sorted(config.prompt_tokens)
    alone = tuple((length,) for length in config.prompt_tokens)
    return alone + tuple(
        tuple(longest if index == at == 0 else rng.choice(shorter) for at in range(batch))
        for batch in config.batches
        for index in range(config.sets)
    )


def _job(kind: type[AnyJob], config: Any, engine: EngineJob, **own: Any) -> AnyJob:
    """A job whose fields are the configuration's of the same names, but for its ``own``."""
    names = kind.model_fields.keys() & {one.name for one in fields(config)}
    return kind(**({name: getattr(config, name) for name in names} | {"engine": engine} | own))


def _sized_engine(
    config: EngineConfig,
    model: Model,
    engine_args: dict[str, Any],
    budget_bytes: int,
    wisp: dict[str, Any] | None = None,
    trace: TraceJob | None = None,
) -> EngineJob:
    """An engine whose memory WiSP sizes."""
    settings = {"vram_budget_bytes": budget_bytes, "bypass_if_it_fits": False, **(wisp or {}), **config.wisp}
    return _engine(config, model, Mode.PAGED, config.engine_args | engine_args, wisp=settings, trace=trace)


def _engine_at_cap(
    config: EngineConfig, model: Model, mode: Mode, cap: int, limits: dict[str, Any], trace: TraceJob | None = None
) -> EngineJob:
    own = mode_arguments(mode, model.shape, cap)
    engine_args = {**config.engine_args, **limits, **own.engine_args}
    # Equal KV on every side, no answers from a cache, and nobody profiles or takes a share of the device.
    engine_args |= {"kv_cache_memory_bytes": config.kv_bytes, "enable_prefix_caching": False}
    if config.device == "cuda":
        engine_args["gpu_memory_utilization"] = _SHARE_ASKED_FOR
    if mode is Mode.PAGED:
        engine_args["additional_config"] = {"wisp": {**engine_args["additional_config"]["wisp"], **config.wisp}}
    env = config.env | own.env
    return _engine(config, model, mode, engine_args, env=env, trace=trace, must_offload=mode in BASELINES)


def _engine(config: EngineConfig, model: Model, mode: Mode, engine_args: dict[str, Any], **own: Any) -> EngineJob:
    common = {
        "model": str(model.directory),
        "vocab_size": model.shape.vocab_size,
        "device": config.device,
        "has_made_up_weights": model.has_made_up_weights,
        "env": config.env,
        "timeout_s": config.timeout_s,
    }
    return EngineJob(mode=mode.value, engine_args=engine_args, **(common | own))


def _with_graphs(config: EngineConfig, batches: tuple[int, ...]) -> EngineConfig:
    """A graph of each batch's exact size: a padded one would replay rows that belong to no request."""
    if "compilation_config" not in config.engine_args:
        return config
    graphs = config.engine_args["compilation_config"] | {"cudagraph_capture_sizes": sorted(batches)}
    return replace(config, engine_args=config.engine_args | {"compilation_config": graphs})


def _cap(shape: ModelShape, fraction: float) -> int:
    return min(shape.num_experts, max(shape.top_k, math.floor(fraction * shape.num_experts + 0.5)))


def _trace(config: EngineConfig, shape: ModelShape, sessions: int, positions: int) -> TraceJob | None:
    if config.routing == "real":
        return None
    return TraceJob(
        sessions=sessions,
        positions=min(positions, _MAX_TRACE_POSITIONS),
        layers=shape.num_moe_layers,
        experts=shape.num_experts,
        top_k=shape.top_k,
        seed=config.trace_seed,
    )
