"""Tenants, their keys, limits and usage: both stores keep the same contract."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from store_values import open_redis_store, tenant, turn

from services.ingress.limits import TurnLimiter
from wisp_core.store import keys as k
from wisp_core.store.interface import Limit, Store, TurnRequest
from wisp_core.store.redis_store import RedisStore
from wisp_core.tenant_contracts import TenantUsage, TurnRecord

if TYPE_CHECKING:
    from valkey_process import ValkeyProcess


async def test_tenants_are_kept_until_replaced_or_deleted(store: Store) -> None:
    first = tenant("b", "k1", "k2")
    assert await store.write_tenant(first)
    assert await store.write_tenant(tenant("a", "k3"))
    assert [t.tenant_id for t in await store.list_tenants()] == ["a", "b"]
    assert await store.write_tenant(tenant("b", "k4"), replaces=first)
    assert [t.key_sha256 for t in await store.list_tenants()] == [("k3",), ("k4",)]
    await store.delete_tenant("b")
    await store.delete_tenant("nobody")
    assert [t.tenant_id for t in await store.list_tenants()] == ["a"]


async def test_whoever_writes_a_tenant_must_have_read_what_is_there(store: Store) -> None:
    first, second = tenant("a", "k1"), tenant("a", "k2")
    assert not await store.write_tenant(second, replaces=first), "there is nothing to replace"
    assert await store.write_tenant(first)
    assert not await store.write_tenant(second), "there is one already"
    assert await store.write_tenant(second, replaces=first)
    late = first.model_copy(update={"weight": 2.0, "at_s": time.time()})
    assert not await store.write_tenant(late, replaces=first)
    assert await store.list_tenants() == [second]
    await store.delete_tenant("a")
    assert not await store.write_tenant(late, replaces=second), "what was removed stays so"


async def test_requests_per_minute_and_when_to_retry(store: Store) -> None:
    now_s = 1_800_000_000.0
    for i in range(3):
        assert (await store.admit(turn(f"a{i}"), now_s)).allowed
    refused = await store.admit(turn("a3"), now_s)
    assert (refused.allowed, refused.which) == (False, Limit.REQUESTS)
    assert refused.retry_after_s == pytest.approx(20, abs=1e-3)
    assert not (await store.admit(turn("a3"), now_s + 19.99)).allowed
    assert (await store.admit(turn("a3"), now_s + 20)).allowed
    assert not (await store.admit(turn("a4"), now_s + 20)).allowed


async def test_tokens_per_minute_and_when_to_retry(store: Store) -> None:
    now_s = 1_800_000_000.0
    assert (await store.admit(turn("a", 600), now_s)).allowed
    refused = await store.admit(turn("b", 300), now_s)
    assert (refused.allowed, refused.which) == (False, Limit.TOKENS)
    assert refused.retry_after_s == pytest.approx(30, abs=1e-3)
    assert not (await store.admit(turn("b", 301), now_s + 30)).allowed
    assert (await store.admit(turn("b", 300), now_s + 30)).allowed


async def test_a_turn_above_the_limit_can_never_be_admitted(store: Store) -> None:
    refused = await store.admit(turn("a", 601), 1_800_000_000.0)
    assert (refused.allowed, refused.which, refused.retry_after_s) == (False, Limit.TOKENS, None)
    assert (await store.admit(turn("b", 600), 1_800_000_000.0)).allowed


@pytest.mark.parametrize(
    ("refused", "which"),
    [
        (turn("r", 300), Limit.TOKENS),
        (turn("r", 601), Limit.TOKENS),
        (turn("r", max_concurrent_turns=1), Limit.TURNS),
        (turn("r", num_choices=2, max_concurrent_turns=1), Limit.TURNS),
    ],
)
async def test_a_refused_turn_takes_a_request_and_nothing_else(
    store: Store, refused: TurnRequest, which: Limit
) -> None:
    now_s = 1_800_000_000.0
    assert (await store.admit(turn("a", 590), now_s)).allowed
    assert (await store.admit(refused, now_s)).which is which
    assert (await store.admit(replace(refused, num_requests=0), now_s)).which is which, "it asks again, at no cost"
    assert (await store.admit(refused, now_s)).which is which
    assert (await store.admit(refused, now_s)).which is Limit.REQUESTS
    again = await store.admit(turn("b", 10), now_s)
    assert (again.which, again.retry_after_s) == (Limit.REQUESTS, pytest.approx(20, abs=1e-3))
    assert (await store.admit(turn("b", 10, max_concurrent_turns=2), now_s + 20)).allowed


async def test_whoever_waits_as_told_has_a_request_again_too(store: Store) -> None:
    now_s = 1_800_000_000.0
    assert (await store.admit(turn("a", 600, max_concurrent_turns=1), now_s)).allowed
    assert (await store.admit(turn("b", 10), now_s)).retry_after_s == pytest.approx(1)
    last = await store.admit(turn("b", 10), now_s)
    assert (last.which, last.retry_after_s) == (Limit.TOKENS, pytest.approx(20, abs=1e-3))
    assert (await store.admit(turn("b", 10), now_s + 20)).allowed
    full = await store.admit(turn("c", 10, max_concurrent_turns=1), now_s + 40)
    assert (full.which, full.retry_after_s) == (Limit.TURNS, pytest.approx(20, abs=1e-3))


async def test_a_request_that_is_no_turn_takes_a_request_only(store: Store) -> None:
    now_s = 1_800_000_000.0
    assert (await store.admit(turn("a", 600, max_concurrent_turns=1), now_s)).allowed
    for _ in range(2):
        assert (await store.admit(turn("", 0, num_choices=0, max_concurrent_turns=1), now_s)).allowed
    refused = await store.admit(turn("", 0, num_choices=0), now_s)
    assert (refused.which, refused.retry_after_s) == (Limit.REQUESTS, pytest.approx(20, abs=1e-3))
    assert (await store.admit(turn("b", 200, max_concurrent_turns=2), now_s + 20)).allowed


async def test_settling_gives_back_unused_tokens_once(store: Store) -> None:
    now_s = 1_800_000_000.0
    first = turn("a", 600)
    assert (await store.admit(first, now_s)).allowed
    await store.settle(first, used_tokens=100, now_s=now_s)
    await store.settle(first, used_tokens=0, now_s=now_s)
    assert not (await store.admit(turn("b", 501), now_s)).allowed
    assert (await store.admit(turn("b", 500), now_s)).allowed


async def test_a_refund_never_overfills(store: Store) -> None:
    now_s = 1_800_000_000.0
    first = turn("a", 600, requests_per_minute=100)
    assert (await store.admit(first, now_s)).allowed
    await store.settle(first, used_tokens=0, now_s=now_s + 29)
    assert (await store.admit(turn("b", 600, requests_per_minute=100), now_s + 29)).allowed
    assert not (await store.admit(turn("c", 1, requests_per_minute=100), now_s + 29)).allowed


@pytest.mark.parametrize("later_s", [0.0, 20.0])
async def test_what_a_turn_used_beyond_what_it_took_is_charged_from_a_full_bucket_too(
    store: Store, later_s: float
) -> None:
    now_s = 1_800_000_000.0
    first = turn("a", 100)
    assert (await store.admit(first, now_s)).allowed
    if later_s and isinstance(store, RedisStore):  # The bucket is full again, and its key gone.
        async with store._connection.guard() as redis:
            await redis.delete(k.Keys("test").limit("t", "tokens"))
    await store.settle(first, used_tokens=700, now_s=now_s + later_s)
    refused = await store.admit(turn("b", 300), now_s + later_s)
    assert refused.which is Limit.TOKENS
    missing = 300 - (600 - 700 if later_s == 0 else 600 - 600)
    assert refused.retry_after_s == pytest.approx(missing / 10, abs=1e-3)
    assert (await store.admit(turn("b", 300), now_s + later_s + missing / 10 + 0.01)).allowed


async def test_a_bucket_that_owes_keeps_its_key_until_it_is_full(redis_store: RedisStore, valkey) -> None:
    now_s = time.time()
    first = turn("a", 10)
    assert (await redis_store.admit(first, now_s)).allowed
    await redis_store.settle(first, used_tokens=900, now_s=now_s)
    client, key = valkey.client(), k.Keys("test").limit("t", "tokens")
    assert 88_000 < client.pttl(key) <= 91_000
    second = turn("b", 10, requests_per_minute=100)
    await redis_store.admit(second, now_s + 100)
    await redis_store.settle(second, used_tokens=0, now_s=now_s + 100)
    assert client.exists(key) == 0, "a full bucket has none"


async def test_concurrent_turns_are_limited_and_leases_expire(store: Store) -> None:
    now_s = 1_800_000_000.0
    two = {"max_concurrent_turns": 2, "requests_per_minute": 100}
    first, second = turn("a", **two), turn("b", **two)
    assert (await store.admit(first, now_s)).allowed
    assert (await store.admit(second, now_s)).allowed
    refused = await store.admit(turn("c", **two), now_s)
    assert (refused.which, refused.retry_after_s) == (Limit.TURNS, 1.0)
    await store.settle(first, used_tokens=10, now_s=now_s)
    assert (await store.admit(turn("c", **two), now_s)).allowed
    await store.renew_turn(turn("c", **two), now_s + 20)
    await store.renew_turn(first, now_s + 20)
    assert (await store.admit(turn("d", **two), now_s + 31)).allowed, "the lease of b has ended, that of c was renewed"
    assert not (await store.admit(turn("e", **two), now_s + 31)).allowed


async def test_each_choice_takes_a_place(store: Store) -> None:
    now_s = 1_800_000_000.0
    four: dict[str, float] = {"max_concurrent_turns": 4, "requests_per_minute": 100}
    three_choices = turn("a", num_choices=3, **four)
    assert (await store.admit(three_choices, now_s)).allowed
    refused = await store.admit(turn("b", num_choices=2, **four), now_s)
    assert (refused.which, refused.retry_after_s) == (Limit.TURNS, 1.0)
    assert (await store.admit(turn("c", **four), now_s)).allowed
    await store.renew_turn(three_choices, now_s + 20)
    refused = await store.admit(turn("d", num_choices=2, **four), now_s + 31)
    assert refused.which is Limit.TURNS, "only the lease of c has ended"
    await store.settle(three_choices, used_tokens=10, now_s=now_s + 31)
    assert (await store.admit(turn("e", num_choices=4, **four), now_s + 31)).allowed


async def test_more_choices_than_places_can_never_be_admitted(store: Store) -> None:
    refused = await store.admit(turn("a", num_choices=5, max_concurrent_turns=4), 1_800_000_000.0)
    assert (refused.allowed, refused.which, refused.retry_after_s) == (False, Limit.TURNS, None)
    assert (await store.admit(turn("b", num_choices=4, max_concurrent_turns=4), 1_800_000_000.0)).allowed


async def test_a_turn_that_asks_again_is_admitted_once(store: Store) -> None:
    now_s = 1_800_000_000.0
    one = turn("a", 300, max_concurrent_turns=1)
    for _ in range(3):
        assert (await store.admit(one, now_s)).allowed
    assert (await store.admit(turn("b"), now_s)).allowed, "neither requests nor tokens were taken again"
    await store.settle(one, used_tokens=300, now_s=now_s)
    assert (await store.admit(turn("c", 290), now_s)).allowed


async def test_a_turn_that_a_slow_store_admits_is_not_refused_by_itself(valkey: ValkeyProcess) -> None:
    store = open_redis_store(valkey, timeout_s=0.2)
    await store.ping()
    one_at_once = tenant("t").model_copy(update={"max_concurrent_turns": 1})
    limiter = TurnLimiter(store)
    valkey.pause()
    admitting = asyncio.create_task(limiter.admit(one_at_once, "a", 300))
    await asyncio.sleep(0.3)
    valkey.resume()
    await admitting
    assert not limiter._fallback._turns, "the second try was answered"
    client, keys = valkey.client(), k.Keys("test")
    assert client.zrange(keys.turns("t"), 0, -1) == ["a"]
    assert float(client.get(keys.limit("t", "requests"))) - time.time() <= 20, "charged for one request of three"
    await limiter.settle("a", 300)
    assert client.zcard(keys.turns("t")) == 0
    await limiter.admit(one_at_once, "b", 300)
    assert client.zrange(keys.turns("t"), 0, -1) == ["b"]
    await store.close()


async def test_buckets_leave_no_keys_behind(redis_store: RedisStore, valkey) -> None:
    now_s = time.time()
    assert (await redis_store.admit(turn("a", 10), now_s)).allowed
    client, keys = valkey.client(), k.Keys("test")
    assert 0 < client.pttl(keys.limit("t", "requests")) <= 21_000
    assert 0 < client.pttl(keys.limit("t", "tokens")) <= 2_000
    assert 0 < client.pttl(keys.turns("t")) <= 31_000


async def test_turns_add_up_per_tenant(store: Store) -> None:
    await store.write_tenant(tenant("a", "k1"))
    await store.write_tenant(tenant("b", "k2"))
    assert await store.list_tenant_usage() == []
    first = TurnRecord(
        session_key="a/u/s", replica_id="r1", prompt_tokens=10, cached_tokens=4, completion_tokens=3, ttft_s=0.1
    )
    await store.record_turn(first)
    await store.record_turn(TurnRecord(session_key="a//!s2", replica_id="r2", is_failed=True, prompt_tokens=5))
    usage = TenantUsage(tenant_id="a", turns=2, failed_turns=1, prompt_tokens=15, cached_tokens=4, completion_tokens=3)
    assert await store.list_tenant_usage() == [usage]
    await store.delete_tenant("a")
    await store.record_turn(first)  # one that still ran
    await store.write_tenant(tenant("a", "k1"))
    assert await store.list_tenant_usage() == [], "a new tenant begins at nothing"
