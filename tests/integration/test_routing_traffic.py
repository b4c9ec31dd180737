"""How often a router talks to Redis: counted and bounded per turn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from services.config import RoutingSettings
from services.ingress import working_sets
from services.ingress.placement import PlacementDirectory, RouterConfig, Turn
from wisp_core.store.redis_store import RedisStore

REPLICAS = ["r1", "r2", "r3"]


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


async def scripts_run(server: Redis) -> int:
    """Scripts as the server counts them; routers of other tests that live on only read."""
    stats = await server.info("commandstats")
    return int(stats.get("cmdstat_evalsha", {}).get("calls", 0))


async def test_a_turn_costs_one_exchange_and_a_new_session_two(
    store: RedisStore, server: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working_sets, "MAX_AGE_S", 600.0)  # however slow this machine is
    directory = PlacementDirectory(
        store, RouterConfig(redis_url="redis://unused", service="traffic-test", routing=RoutingSettings())
    )
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
