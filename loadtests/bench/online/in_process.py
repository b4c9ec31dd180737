"""The short form: one engine in a process of its own, its policy asked between steps, and no service around it.

For a GPU that is lent by the minute. Engine, pager, resizes, measures and policy are those of a service; what is left
out is HTTP, placement and Redis, which decide nothing about how one replica divides its memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from loadtests.bench.configs import EngineConfig, cpu_engine, gpu_engine


@dataclass(frozen=True, kw_only=True)
class InProcessConfig:
    """Workload, engine and what is compared on it."""

    name: str = "online-in-process"
    engine: EngineConfig
    vram_budget_bytes: int
    workflow: str = "short"
    num_turns: int = 30
    seed: int = 0
    max_context_tokens: int
    time_scale: float = 1.0
    num_topics: int = 8
    caps: tuple[int, ...]
    """Static splits, in expert slots per layer; KV gets the rest."""
    policy: str = "mv_wsa"
    window_s: float = 5.0
    """Phases last half a minute, a quarter of those of a service on CPU."""
    epoch_s: float = 0.5
    deadline_s: float = 120.0
    """Of one way to divide the budget: it is cut there, and its throughput is then known as a bound."""
    static_limit: float = 1.2
    """A static split after the policy is cut at so many times what the policy took: time is lent by the minute."""


def in_process_h200() -> InProcessConfig:
    """A 30B-A3B shape in 24 GB; passes as in ``infra/serve/gpu.yaml``."""
    engine = _with_lengths(gpu_engine("qwen3-30b-a3b", kv_bytes=0), max_model_len=32768, pass_tokens=4096)
    return InProcessConfig(engine=engine, vram_budget_bytes=24 * 10**9, max_context_tokens=32768, caps=(10, 12, 16, 30))


def in_process_cpu() -> InProcessConfig:
    """The tiny shape, scaled down: a pass over all experts takes about a second here too."""
    engine = _with_lengths(cpu_engine(), max_model_len=1024, pass_tokens=128)
    engine = replace(engine, routing="real", wisp={"emulated_link_bytes_per_s": 100e6})
    return InProcessConfig(engine=engine, vram_budget_bytes=132 * 10**6, max_context_tokens=1024, caps=(5, 9))


def warm_up_lengths(pass_tokens: int) -> list[int]:
    """Prompts that make a GPU compile all kernels of its prefills, the longest first.

    vLLM's tables have kernels for ranges of rows that begin at powers of two and half-way between; Triton compiles each
    once more where the number of rows is odd.
    """
    powers = [2**exponent for exponent in range(4, pass_tokens.bit_length())]
    begins = [rows for power in powers for rows in (power, power * 3 // 2) if rows <= pass_tokens]
    return [rows for begin in reversed(begins) for rows in (begin + 1, begin)]


def _with_lengths(engine: EngineConfig, *, max_model_len: int, pass_tokens: int) -> EngineConfig:
    arguments = {
        "max_model_len": max_model_len,
        "max_num_batched_tokens": pass_tokens,
        "enable_prefix_caching": True,
    }
    return replace(engine, engine_args=engine.engine_args | arguments)
