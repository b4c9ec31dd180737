"""Complete configurations, by name: a run is one of these, and what the command line changes in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtests.bench.modes import BASELINES, Mode

_GIB = 1 << 30

CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
COMMON_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    # FlashInfer's sampler may be absent; with it in one mode and not in another, answers would differ.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


def is_gpu_machine() -> bool:
    """Whether an NVIDIA driver is here; asked without loading CUDA, which belongs in the child processes."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What every engine of a run has in common."""

    device: str
    model: str  # a name in loadtests.shapes, or a directory
    engine_args: dict[str, Any]
    env: dict[str, str]
    kv_bytes: int  # the KV cache of every engine
    timeout_s: float = 600.0  # of one engine, start included; a busy host takes minutes
    routing: str = "trace"  # or "real": the model's own router
    trace_seed: int = 0
    wisp: dict[str, Any] = field(default_factory=dict)  # settings of the paged engine beside its cap


@dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Time per decode step."""

    name: str = "decode"
    engine: EngineConfig
    fractions: tuple[float, ...] = (0.125, 0.25, 0.5, 0.75, 1.0)  # of the experts on the device, for the pager
    baselines: tuple[tuple[Mode, float], ...]  # each with the share of the experts that it may keep
    batches: tuple[int, ...] = (1, 4, 8)
    prompt_tokens: int = 32
    warmup_tokens: int = 12  # of an answer, not timed: the working set settles
    timed_tokens: int = 24
    baseline_warmup_tokens: int = 2  # of a baseline, whose steps may take most of a second and have no state
    baseline_timed_tokens: int = 8


@dataclass(frozen=True, kw_only=True)
class PrefillConfig:
    """Time to first token."""

    name: str = "prefill"
    engine: EngineConfig
    fraction: float = 0.25
    modes: tuple[Mode, ...] = (Mode.RESIDENT, Mode.PAGED, *BASELINES)
    prompt_tokens: tuple[int, ...] = (32, 128, 300, 2000, 8000)
    batches: tuple[int, ...] = (1, 4)
    chunk_tokens: tuple[int, ...] = (2048, 8192)
    repeats: int = 2
    enough_s: float = 1.5  # of one kind: a pass over all experts takes most of a second
    baseline_enough_s: float = 1.0
    baseline_max_total_tokens: int = 32000


@dataclass(frozen=True, kw_only=True)
class ResizeConfig:
    """Pause of the engine while memory moves between experts and KV."""

    name: str = "resize"
    engine: EngineConfig
    budget_bytes: int
    step_bytes: int
    resizes: int = 20
    resizes_under_traffic: int = 200
    batch: int = 4
    prompt_tokens: int = 128
    max_model_len: int = 1024


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """What `wisp plan` says of a budget, what the engine then does in it, and the memory that the system counts."""

    name: str = "budget"
    engine: EngineConfig
    budgets_bytes: tuple[int, ...]
    batches: tuple[int, ...] = (1, 4, 8)
    decode_prompt_tokens: int = 32
    warmup_tokens: int = 24
    timed_tokens: int = 48  # enough for misses to be near their mean
    prompt_tokens: tuple[int, ...] = (128, 2000, 8000)
    repeats: int = 1
    enough_s: float = 5.0
    resizes: int = 3
    max_model_len: int = 8192


@dataclass(frozen=True, kw_only=True)
class IdentityConfig:
    """Answers of paged engines against resident ones."""

    name: str = "identity"
    engine: EngineConfig
    caps: tuple[int, ...] = (8, 16, 32, 64, 128)
    splits: tuple[int, ...] = (32, 64, 12, 48)  # caps of the engine that is resized
    budget_bytes: int
    prompt_tokens: tuple[int, ...] = (32, 100, 150, 300, 500, 700, 2000, 8000)
    batches: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    sets: int = 3  # of prompts at each batch size
    answer_tokens: int = 16


@dataclass(frozen=True, kw_only=True)
class ReturnConfig:
    """A session that comes back: what is left of its prefix on the device, in host memory, or nowhere."""

    name: str = "return"
    engine: EngineConfig
    budget_bytes: int
    kv_host_bytes: int
    prompt_tokens: int = 8000
    answer_tokens: int = 16
    new_tokens: tuple[int, ...] = (8, 64)
    repeats: int = 2
    max_model_len: int = 8192


def decode_h200() -> DecodeConfig:
    """Every mode of a 30B-A3B shape with 25 % of its experts on the device, and the fastest baseline with 50 % too.

    In order of interest, so that a deadline leaves out the least.
    """
    baselines = (
        (Mode.UVA_EXPERTS, 0.25),
        (Mode.PREFETCH_OFFLOAD, 0.25),
        (Mode.UVA_ALL, 0.25),
        (Mode.OFFLOAD_COPY, 0.25),
        (Mode.UVA_EXPERTS, 0.5),
    )
    return DecodeConfig(engine=gpu_engine("qwen3-30b-a3b", kv_bytes=_GIB), baselines=baselines)


def decode_cpu() -> DecodeConfig:
    """The tiny shape on a CPU; vLLM's offloaders need a GPU and say so in their rows."""
    return DecodeConfig(engine=cpu_engine(), baselines=((Mode.UVA_EXPERTS, 0.25),), timed_tokens=24, warmup_tokens=8)


def prefill_h200() -> PrefillConfig:
    """Prompts of 32 to 8,000 tokens of a 30B-A3B shape."""
    return PrefillConfig(engine=gpu_engine("qwen3-30b-a3b", kv_bytes=4 * _GIB))


def prefill_cpu() -> PrefillConfig:
    """The tiny shape on a CPU."""
    return PrefillConfig(
        engine=cpu_engine(),
        modes=(Mode.RESIDENT, Mode.PAGED),
        prompt_tokens=(32, 128, 300),
        chunk_tokens=(256, 1024),
        repeats=2,
    )


def resize_h200() -> ResizeConfig:
    """Steps of 1 GiB of a 30B-A3B shape in a budget of 24 GB."""
    return ResizeConfig(engine=gpu_engine("qwen3-30b-a3b", kv_bytes=0), budget_bytes=24 * 10**9, step_bytes=_GIB)


def resize_cpu() -> ResizeConfig:
    """Steps of 8 MiB of the tiny shape."""
    return ResizeConfig(
        engine=cpu_engine(),
        budget_bytes=128 << 20,
        step_bytes=8 << 20,
        resizes=6,
        resizes_under_traffic=8,
        prompt_tokens=48,
        max_model_len=512,
    )


def budget_h200() -> BudgetConfig:
    """A 30B-A3B shape in 12 to 48 GB of a larger card, whose rest another process holds."""
    engine = gpu_engine("qwen3-30b-a3b", kv_bytes=0)
    return BudgetConfig(engine=engine, budgets_bytes=tuple(gb * 10**9 for gb in (16, 24, 48, 12)))


def return_h200() -> ReturnConfig:
    """Sessions of 8,000 tokens of a 30B-A3B shape in a budget of 24 GB."""
    engine = gpu_engine("qwen3-30b-a3b", kv_bytes=0)
    return ReturnConfig(engine=engine, budget_bytes=24 * 10**9, kv_host_bytes=4 * _GIB)


def return_cpu() -> ReturnConfig:
    """Sessions of 400 tokens of the tiny shape."""
    return ReturnConfig(
        engine=cpu_engine(),
        budget_bytes=128 << 20,
        kv_host_bytes=64 << 20,
        prompt_tokens=400,
        max_model_len=512,
    )


def identity_h200() -> IdentityConfig:
    """Four layers of the 30B-A3B shape: breadth of prompts, caps and batches."""
    return IdentityConfig(engine=gpu_engine("qwen3-30b-a3b-4-layers", kv_bytes=8 * _GIB), budget_bytes=12 * _GIB)


def gpu_engine(model: str, kv_bytes: int) -> EngineConfig:
    """Full decode graphs, and on every side the same MoE kernel, whose answers the pager's must equal."""
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return EngineConfig(
        device="cuda",
        model=model,
        engine_args={"compilation_config": graphs, "moe_backend": "triton", "max_num_seqs": 8},
        env=COMMON_ENV,
        kv_bytes=kv_bytes,
    )


def cpu_engine() -> EngineConfig:
    """Eager, as the pager on CPU needs no graphs; float32, as answers then do not depend on the batch."""
    return EngineConfig(
        device="cpu",
        model="tiny",
        engine_args={"enforce_eager": True, "block_size": 32, "max_num_seqs": 8, "dtype": "float32"},
        env=COMMON_ENV | CPU_ENV | {"VLLM_LOGGING_LEVEL": "WARNING"},
        kv_bytes=64 << 20,
    )
