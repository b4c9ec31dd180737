"""How often a router talks to Redis: counted and bounded per turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from store_values import snapshot

from services.config import RoutingSettings
from services.ingress import working_sets
from services.ingress.limits import TurnLimiter
from services.ingress.placement import REPLICAS_PER_REFRESH, PlacementDirectory, Turn
from services.ingress.routers import RouterConfig
from services.store_address import StoreAddress
from wisp_core.contracts import Signature
from wisp_core.store import redis_store
from wisp_core.store.redis_store import RedisStore
from wisp_core.store.signature_parts import MAX_PARTS
from wisp_core.tenant_contracts import TenantSpec
from wisp_core.working_set.signature import pack

REPLICAS = ["r1", "r2", "r3"]
CONFIG = RouterConfig(store=StoreAddress(url="redis://unused", service="traffic-test"), routing=RoutingSettings())


@pytest.fixture
async def store(valkey: Any) -> AsyncIterator[RedisStore]:
    opened = RedisStore(valkey.url, "traffic-test", password=valkey.password, timeout_s=1)
    yield opened
    await opened.close()


@pytest.fixture
async def server(valkey: Any) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey.url, password=valkey.password, decode_responses=True)
    yield client
    await client.aclose()


def turn(session: int) -> Turn:
    return Turn(session_key=f"t/u/{session}", user_key="t/u", prompt_key="t/@p", tenant="t", max_tokens=10)


async def bytes_sent(server: Redis) -> int:
    """What the server has sent to all of its clients; routers of other tests are gone or read little."""
    stats = await server.info("stats")
    return int(stats["total_net_output_bytes"])


async def scripts_run(server: Redis) -> int:
    """Scripts as the server counts them; routers of other tests that live on only read."""
    stats = await server.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


async def test_a_session_that_stays_where_its_admission_found_it_costs_no_exchange(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_sets, "MAX_AGE_S", 600.0)
    limiter = TurnLimiter(store)
    tenant = TenantSpec(
        tenant_id="t", key_sha256=(), requests_per_minute=600, tokens_per_minute=6000, max_concurrent_turns=64
    )
    directory = PlacementDirectory(store, CONFIG)
    directory.keep_replicas(REPLICAS)
    assert await limiter.admit(tenant, "turn-0", 1, turn(0).session_key) is None
    home = (await directory.rank(turn(0))).chosen
    exchanged = store.round_trips
    for number in range(1, 101):
        placement = await limiter.admit(tenant, f"turn-{number}", 1, turn(0).session_key)
        assert placement is not None
        told = turn(0).model_copy(update={"home": placement.replica_id, "home_version": placement.version})
        assert (await directory.rank(told)).chosen == home
        await limiter.settle(f"turn-{number}", 1)
    # Admitted, placed and settled.
    assert store.round_trips - exchanged == 2 * 100


async def test_parsing_many_snapshots_lets_other_tasks_run(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"large-{number}" for number in range(REPLICAS_PER_REFRESH)]
    for name in names:
        await store.write_snapshot(snapshot(name))
    parsed, steps = 0, [0]
    parse = redis_store._parse

    def counting(*args: Any) -> Any:
        nonlocal parsed
        parsed += 1
        return parse(*args)

    async def watch() -> None:
        while True:
            await asyncio.sleep(0)
            steps.append(parsed)

    monkeypatch.setattr(redis_store, "_parse", counting)
    watching = asyncio.create_task(watch())
    assert len(await store.read_snapshots(names)) == len(names)
    watching.cancel()
    assert np.diff(steps).max() <= redis_store.SNAPSHOTS_AT_ONCE


async def test_a_turn_costs_one_exchange_and_a_new_session_two(
    store: RedisStore, server: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_sets, "MAX_AGE_S", 600.0)  # however slow this machine is
    directory = PlacementDirectory(store, CONFIG)
    directory.keep_replicas(REPLICAS)
    await directory.rank(turn(0))  # reads the replicas once and loads the script
    sent, exchanged = await scripts_run(server), store.round_trips
    for session in range(1, 101):
        await directory.rank(turn(session))
    # Where it lives, and what is known of it.
    assert store.round_trips - exchanged == 200
    assert await scripts_run(server) - sent == 100
    sent, exchanged = await scripts_run(server), store.round_trips
    for session in range(1, 101):
        await directory.rank(turn(session))
    # What is known of a session is read again only when it is old.
    assert store.round_trips - exchanged == 100
    assert await scripts_run(server) - sent == 100


def big_signature(key: str) -> Signature:
    """Of a model of 48 layers with 128 experts, every one used: as long as it can be."""
    counts = np.random.default_rng(0).integers(1, 1000, (48, 128))
    return Signature(
        key=key, num_layers=48, num_experts=128, weights=pack(counts), decode_tokens=100, lookups=100 * 48 * 8
    )


async def test_what_a_turn_reads_is_bounded_however_many_replicas_serve_its_tenant(
    store: RedisStore, server: Redis
) -> None:
    for number in range(20):
        await store.write_signatures(f"r{number}", [big_signature(key) for key in ("t", "t/@p", "t/u", "t/u/1")])
    directory = PlacementDirectory(store, CONFIG)
    directory.keep_replicas(REPLICAS)
    await directory.rank(turn(0))
    before = await bytes_sent(server)
    await directory.rank(turn(1))
    one_part = len(big_signature("t/u/1").model_dump_json())
    assert await bytes_sent(server) - before < 4 * (MAX_PARTS + 1) * one_part


async def test_a_refresh_of_many_replicas_reads_some_and_all_in_turn(store: RedisStore, server: Redis) -> None:
    names = [f"many-{number}" for number in range(3 * REPLICAS_PER_REFRESH)]
    for name in names:
        await store.write_snapshot(snapshot(name))
    directory = PlacementDirectory(store, CONFIG)
    directory.keep_replicas(names)
    sizes, exchanged = [], store.round_trips
    for _ in range(4):
        before = await bytes_sent(server)
        await directory.refresh()
        sizes.append(await bytes_sent(server) - before)
    # The index of all and a third of the values; and once all are known, no value until there is news.
    assert store.round_trips - exchanged == 3 * 3 + 1
    assert max(sizes[:3]) < 2 * min(sizes[:3])
    assert sizes[3] < sizes[0] / 3
    assert (directory._fleet.column("is_known") == 1).all()
