"""The circuit breaker and the keys."""

from __future__ import annotations

import time

import pytest

from wisp_core.contracts import Placement, Split, SplitPlan
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.breaker import CircuitBreaker
from wisp_core.store.keys import SESSION_TTL_S, Keys
from wisp_core.store.memory_store import MemoryStore


def test_a_closed_breaker_lets_everything_through() -> None:
    breaker = CircuitBreaker()
    assert all(breaker.allows() for _ in range(3))
    assert not breaker.is_open


def test_an_open_breaker_tries_once_per_period(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    breaker = CircuitBreaker(first_period_s=1, max_period_s=3)
    breaker.record_failure()
    assert breaker.is_open
    assert not breaker.allows()
    now_s = 101.0
    assert breaker.allows()
    assert not breaker.allows(), "the one try of this period is out"
    breaker.record_failure()
    now_s = 102.9
    assert not breaker.allows(), "the second period is twice as long"
    now_s = 103.1
    assert breaker.allows()
    breaker.record_success()
    assert not breaker.is_open
    assert breaker.allows()


def test_periods_do_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    breaker = CircuitBreaker(first_period_s=1, max_period_s=3)
    for _ in range(50):
        breaker.record_failure()
    now_s += 3
    assert breaker.allows()


def test_all_keys_of_a_service_share_one_cluster_slot() -> None:
    keys = Keys("wisp-a")
    every = [
        keys.snapshot("r"),
        keys.replicas,
        keys.plan("r"),
        keys.plan_wakeup("r"),
        keys.outcomes("r"),
        keys.decisions("r"),
        keys.signature("t/u/s"),
        keys.placement("t/u/s"),
        keys.placements,
        keys.session("t/u/s"),
        keys.sessions,
        keys.tenants,
        keys.tenant_usage("t"),
        keys.limit("t", "requests"),
        keys.limit("t", "tokens"),
        keys.turns("t"),
        keys.lease("policy"),
    ]
    assert len(set(every)) == len(every)
    assert all(key.startswith("wisp:{wisp-a}:") for key in every)


async def test_memory_placements_expire_unless_used() -> None:
    now_s = 1000.0
    store = MemoryStore(clock=lambda: now_s)
    first = Placement(session_key="t/u/s", replica_id="r1", version=1, reason="")
    await store.place("t/u/s", None, first)
    now_s += SESSION_TTL_S - 1
    await store.place("t/u/s", 1, first.model_copy(update={"version": 2}))
    now_s += SESSION_TTL_S - 1
    assert await store.read_placements(["t/u/s"]) == {"t/u/s": first}
    now_s += 2
    assert await store.read_placements(["t/u/s"]) == {}


async def test_a_switched_off_memory_store_raises() -> None:
    store = MemoryStore()
    store.is_available = False
    with pytest.raises(StoreUnavailableError):
        await store.list_snapshots()
    with pytest.raises(StoreUnavailableError):
        await store.write_plan(
            SplitPlan(
                replica_id="r", incarnation="i", revision=1, split=Split(cap=1, kv_blocks=1), policy="", reason=""
            )
        )
