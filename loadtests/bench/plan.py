"""From a configuration to the engine processes that it needs. Pure but for the model's config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtests.bench.configs import DecodeConfig, EngineConfig, PrefillConfig, ResizeConfig
from loadtests.bench.job import DecodeJob, EngineJob, PrefillJob, ResizeJob, TraceJob
from loadtests.bench.modes import Mode, mode_arguments
from loadtests.shapes import SHAPES, Shape, read_shape, write_shape

NamedJob = tuple[str, DecodeJob | PrefillJob | ResizeJob]

_SEED = 1


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
    shape = model.shape
    caps = tuple(sorted({_cap(shape, fraction) for fraction in config.fractions}))
    wanted = [(Mode.RESIDENT, (shape.experts,)), *([(Mode.PAGED, caps)] if caps else [])]
    wanted += [(mode, (_cap(shape, fraction),)) for mode, fraction in config.baselines]
    positions = config.prompt_tokens + config.warmup_tokens + config.timed_tokens
    trace = _trace(config.engine, shape, max(config.batches), positions)
    limits = {"max_model_len": positions, "max_num_batched_tokens": max(256, 8 * config.prompt_tokens)}
    compared_tokens = min(
        config.warmup_tokens + config.timed_tokens, config.baseline_warmup_tokens + config.baseline_timed_tokens
    )
    jobs: list[NamedJob] = []
    for mode, mode_caps in wanted:
        is_baseline = mode not in (Mode.RESIDENT, Mode.PAGED)
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
        jobs.append((f"{mode.value}-{mode_caps[0]}", job))
    return jobs


def prefill_jobs(config: PrefillConfig, model: Model) -> list[NamedJob]:
    """Every mode at every chunk size, an engine each."""
    shape = model.shape
    cap = _cap(shape, config.fraction)
    positions = max(config.prompt_tokens) + 2
    trace = _trace(config.engine, shape, max(config.batches), positions)
    jobs: list[NamedJob] = []
    for chunk_tokens in config.chunk_tokens:
        for mode in config.modes:
            mode_cap = shape.experts if mode is Mode.RESIDENT else cap
            limits = {"max_model_len": positions, "max_num_batched_tokens": chunk_tokens}
            job = PrefillJob(
                engine=_engine_job(config.engine, model, mode, mode_cap, limits),
                trace=trace,
                cap=mode_cap,
                batches=config.batches,
                prompt_tokens=config.prompt_tokens,
                repeats=config.repeats,
                vocab_size=shape.vocab_size,
                seed=_SEED,
            )
            jobs.append((f"{mode.value}-{mode_cap}-chunk-{chunk_tokens}", job))
    return jobs


def resize_jobs(config: ResizeConfig, model: Model) -> list[NamedJob]:
    """One engine that WiSP sizes."""
    engine_args = {"max_model_len": config.max_model_len, "enable_prefix_caching": True}
    job = EngineJob(
        mode=Mode.PAGED.value,
        model=str(model.directory),
        device=config.engine.device,
        engine_args=config.engine.engine_args | engine_args,
        has_made_up_weights=model.has_made_up_weights,
        env=config.engine.env,
        timeout_s=config.engine.timeout_s,
    )
    wisp: dict[str, Any] = {"vram_budget_bytes": config.budget_bytes, **config.engine.wisp}
    return [
        (
            "paged-resize",
            ResizeJob(
                engine=job,
                wisp=wisp,
                step_bytes=config.step_bytes,
                resizes=config.resizes,
                batch=config.batch,
                prompt_tokens=config.prompt_tokens,
                vocab_size=model.shape.vocab_size,
                seed=_SEED,
            ),
        )
    ]


def _engine_job(config: EngineConfig, model: Model, mode: Mode, cap: int, limits: dict[str, Any]) -> EngineJob:
    own = mode_arguments(mode, model.shape, cap)
    engine_args = {**config.engine_args, **limits, **own.engine_args}
    # Equal KV on every side, no answers from a cache, and nobody profiles or takes a share of the device.
    engine_args |= {"kv_cache_memory_bytes": config.kv_bytes, "enable_prefix_caching": False}
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
        must_offload=mode not in (Mode.RESIDENT, Mode.PAGED),
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
        positions=positions,
        layers=shape.layers,
        experts=shape.experts,
        top_k=shape.top_k,
        seed=config.trace_seed,
    )
