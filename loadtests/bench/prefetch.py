"""Prefetch on against off, and what a smaller cap buys: the two questions of ``wisp bench prefetch``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtests.bench.configs import DecodeConfig, EngineConfig, gpu_engine
from loadtests.bench.job import DecodeJob
from loadtests.bench.plan import Model, NamedJob, decode_jobs
from loadtests.rows import Row
from loadtests.shapes import SHAPES, config_of
from wisp_core.planner.cards import H200
from wisp_core.planner.estimate import EngineChoice, memory_layout, other_bytes
from wisp_core.planner.model_shape import read_shape
from wisp_core.settings import EngineSettings


@dataclass(frozen=True, kw_only=True)
class PrefetchConfig:
    """Decode steps by how many experts of each layer are fetched on a guess."""

    name: str = "prefetch"
    engine: EngineConfig
    guesses: tuple[int, ...] = (0, 1, 4)
    caps: tuple[int, ...] = (8, 16, 32)
    batches: tuple[int, ...] = (1, 4, 8)
    warmup_tokens: int = 16
    timed_tokens: int = 24
    concurrency_model: str = "qwen3-30b-a3b"  # whose concurrency by cap is told, whatever the steps are timed on
    budget_bytes: int = 24 * 10**9  # for that
    session_tokens: int = 4096


def prefetch_h200() -> PrefetchConfig:
    """A 30B-A3B shape, routing replayed from the seeded trace."""
    return PrefetchConfig(engine=gpu_engine("qwen3-30b-a3b", kv_bytes=1 << 30))


def prefetch_jobs(config: PrefetchConfig, model: Model) -> list[NamedJob]:
    """One engine for each number of guesses, all caps in turn."""
    jobs: list[NamedJob] = []
    for guesses in config.guesses:
        engine = dataclasses.replace(config.engine, wisp=config.engine.wisp | {"prefetch": guesses})
        decode = DecodeConfig(
            engine=engine,
            fractions=tuple(cap / model.shape.num_experts for cap in config.caps),
            baselines=(),
            batches=config.batches,
            warmup_tokens=config.warmup_tokens,
            timed_tokens=config.timed_tokens,
            baseline_warmup_tokens=config.warmup_tokens,
            baseline_timed_tokens=config.timed_tokens,
        )
        paged = next(job for _, job in decode_jobs(decode, model) if isinstance(job, DecodeJob) and len(job.caps) > 1)
        jobs.append((f"prefetch-{guesses}", paged))
    return jobs


def prefetch_summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Time with guesses over time without, share of guesses that were used, and whether answers are equal."""
    good = [row for row in rows if "error" not in row]
    off = {(row["cap"], row["batch"]): row for row in good if row["prefetch"] == 0}
    compared = []
    for row in good:
        base = off.get((row["cap"], row["batch"]))
        if row["prefetch"] == 0 or base is None:
            continue
        fetched = row["prefetched_bytes"]
        compared.append(
            {
                "cap": row["cap"],
                "batch": row["batch"],
                "prefetch": row["prefetch"],
                "time_over_off": row["ms_per_step"] / base["ms_per_step"],
                "missed_bytes_over_off": (
                    row["missed_bytes_per_step"] / base["missed_bytes_per_step"]
                    if base["missed_bytes_per_step"]
                    else None
                ),
                "used_share": row["prefetch_used_bytes"] / fetched if fetched else None,
            }
        )
    hashes: dict[int, set[str]] = {}
    for row in good:
        hashes.setdefault(row["batch"], set()).add(row["output_hash"])
    return {
        "compared": compared,
        "are_outputs_equal": bool(hashes) and all(len(found) == 1 for found in hashes.values()),
        "failed_rows": len(rows) - len(good),
    }


def concurrency_by_cap(config: PrefetchConfig) -> list[Row]:
    """Sessions of ``session_tokens`` whose KV fits beside each cap in one budget, by the engine's own arithmetic."""
    shape = read_shape(config_of(SHAPES[config.concurrency_model]), name=config.concurrency_model)
    choice = EngineChoice(
        max_model_len=config.session_tokens, max_num_seqs=256, settings=EngineSettings(min_cap=min(config.caps))
    )
    pooled_bytes = config.budget_bytes - other_bytes(shape, choice)
    layout = memory_layout(shape, choice, pooled_bytes=pooled_bytes, page_bytes=H200.page_bytes)
    blocks_of_session = -(-config.session_tokens // layout.block_tokens)
    found = []
    for cap in range(layout.min_cap, layout.num_experts + 1):
        blocks = layout.kv_blocks_within(pooled_bytes - layout.experts_bytes_by_cap[cap])
        if blocks < blocks_of_session:
            break
        if cap in config.caps or cap % 4 == 0:
            found.append({"cap": cap, "kv_blocks": blocks, "sessions": blocks // blocks_of_session})
    return found
