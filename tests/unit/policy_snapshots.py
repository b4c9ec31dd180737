"""Snapshots for tests of allocation and policies."""

from __future__ import annotations

from typing import Any

from wisp_core.contracts import KvDemand, MemoryLayout, PagerCounts, ReplicaSnapshot, ReuseBin, Split

PAGE = 4096


def make_layout(**changes: Any) -> MemoryLayout:
    """Two layers of 8 experts, two pages an expert; a KV block is a quarter page, moved in groups of 4 blocks."""
    num_experts = changes.get("num_experts", 8)
    fields: dict[str, Any] = {
        "page_bytes": PAGE,
        "num_layers": 2,
        "num_experts": num_experts,
        "top_k": 2,
        "min_cap": 2,
        "experts_bytes_by_cap": tuple(cap * 2 * 2 * PAGE for cap in range(num_experts + 1)),
        "expert_bytes": 2 * PAGE,
        "block_tokens": 16,
        "block_bytes": PAGE // 4,
        "kv_group_blocks": 4,
        "max_kv_blocks": 127,
        "max_model_len": 128,
        "max_num_seqs": 8,
    }
    return MemoryLayout(**(fields | changes))


def make_snapshot(**changes: Any) -> ReplicaSnapshot:
    """A busy replica at cap 4 of 8 whose budget holds all experts and a third of the KV range; link 1 MB/s."""
    layout = changes.pop("layout", make_layout())
    caps = range(layout.num_experts + 1)
    fields: dict[str, Any] = {
        "replica_id": "r1",
        "incarnation": "i1",
        "model": "tiny",
        "layout": layout,
        "split": Split(cap=4, kv_blocks=103),
        "budget_bytes": 42 * PAGE,
        "window_s": 10.0,
        "decode": PagerCounts(steps=100, tokens=200, distinct=600, seconds=2.0, link_seconds=1.0),
        "prefill": PagerCounts(steps=10, tokens=1000, seconds=2.0, link_seconds=1.0),
        "decode_steps_per_s": 10.0,
        "prefill_steps_per_s": 1.0,
        "prefill_tokens_per_s": 100.0,
        "decode_misses_by_cap": tuple(float(layout.num_experts - cap) for cap in caps),
        "prefill_misses_by_cap": tuple(4.0 * (layout.num_experts - cap) for cap in caps),
        "link_bytes_per_s": 1e6,
        "kv": KvDemand(mean_turns=2.0, demand_blocks=16, floor_blocks=8),
    }
    return ReplicaSnapshot(**(fields | changes))


def wants_experts(**changes: Any) -> ReplicaSnapshot:
    """Bursts of short turns: every miss costs, KV is plentiful."""
    return make_snapshot(**changes)


def wants_kv(**changes: Any) -> ReplicaSnapshot:
    """Long turns that come back: two experts are all they use, and their prefixes need a large pool."""
    reuse = (ReuseBin(blocks=95, turns_per_s=2.0, tokens_per_s=400.0),)
    flat = (4.0, 4.0, *([0.1] * 7))
    fields: dict[str, Any] = {
        "decode_misses_by_cap": flat,
        "prefill_misses_by_cap": flat,
        "prefill_tokens_per_s": 450.0,
        "kv": KvDemand(mean_turns=4.0, demand_blocks=95, floor_blocks=40, reuse=reuse),
    }
    return make_snapshot(**(fields | changes))
