"""Values of each kind that a store keeps, and a client of the session's Valkey."""

from __future__ import annotations

from typing import Any

from wisp_core.contracts import MemoryLayout, Placement, ReplicaSnapshot, Split, SplitPlan
from wisp_core.store.interface import TurnRequest
from wisp_core.store.redis_store import RedisStore
from wisp_core.tenant_contracts import TenantSpec

LAYOUT = MemoryLayout(
    page_bytes=4096,
    num_layers=2,
    num_experts=4,
    top_k=2,
    min_cap=2,
    experts_bytes_by_cap=(0, 8192, 16384, 24576, 32768),
    expert_bytes=4096,
    block_tokens=16,
    block_bytes=4096,
    kv_group_blocks=1,
    max_kv_blocks=100,
    max_model_len=256,
    max_num_seqs=4,
)
SPLIT = Split(cap=2, kv_blocks=10)


def snapshot(replica_id: str = "r1") -> ReplicaSnapshot:
    return ReplicaSnapshot(
        replica_id=replica_id, incarnation="i1", model="m", layout=LAYOUT, split=SPLIT, budget_bytes=1 << 20
    )


def plan(revision: int, replica_id: str = "r1") -> SplitPlan:
    return SplitPlan(replica_id=replica_id, incarnation="i1", revision=revision, split=SPLIT, policy="p", reason="why")


def placement(replica_id: str, version: int, session_key: str = "t/u/s") -> Placement:
    return Placement(session_key=session_key, replica_id=replica_id, version=version, reason="score")


def tenant(tenant_id: str, *keys: str) -> TenantSpec:
    return TenantSpec(tenant_id=tenant_id, key_sha256=keys, requests_per_minute=3, tokens_per_minute=600)


def turn(turn_id: str, tokens: int = 10, **limits: float) -> TurnRequest:
    values = {
        "requests_per_minute": 3,
        "tokens_per_minute": 600,
        "max_concurrent_turns": 100,
        "lease_s": 30.0,
        **limits,
    }
    return TurnRequest(tenant_id="t", turn_id=turn_id, tokens=tokens, **values)  # type: ignore[arg-type]


def open_redis_store(valkey: Any, service: str = "test", timeout_s: float = 1.0) -> RedisStore:
    return RedisStore(valkey.url, service, password=valkey.password, timeout_s=timeout_s)
