"""The router on real Ray Serve with small replicas, real Valkey: affinity, two callers, lost replicas, no store."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from store_values import snapshot as idle_snapshot

from services.config import RoutingSettings
from services.ingress.routers import RouterConfig
from services.store_address import StoreAddress
from wisp_core.contracts import KvDemand, ReplicaSnapshot
from wisp_core.store.redis_store import RedisStore

APP, NUM_REPLICAS = "router", 3


class Answerer:
    """Answers with its name; can be asked to wait."""

    def __init__(self) -> None:
        self._tag = serve.get_replica_context().replica_tag

    async def http(self, *, wait_s: float = 0.0, **routing: Any) -> AsyncIterator[dict[str, Any] | bytes]:
        yield {"replica_id": self._tag, "pid": os.getpid()}
        await asyncio.sleep(wait_s)
        yield b"done"


class Caller:
    """Another process with a handle, and so with a router of its own."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas

    async def ask(self, session_key: str) -> str:
        call = self._replicas.options(stream=True, session_id=session_key).http.remote(session_key=session_key)
        head, _ = [item async for item in call]
        return head["replica_id"]


@pytest.fixture(scope="module")
def app(ray_serve: None, valkey_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    password_file: Path = tmp_path_factory.mktemp("secrets") / "redis.key"
    password_file.write_text(valkey_server.password + "\n")
    router = RouterConfig(
        store=StoreAddress(url=valkey_server.url, password_file=password_file, service="router-test"),
        routing=RoutingSettings(refresh_s=0.1),
    )
    replicas = serve.deployment(
        Answerer,
        name="Answerer",
        num_replicas=NUM_REPLICAS,
        max_ongoing_requests=8,
        health_check_period_s=1.0,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(
            request_router_class="services.ingress.router.WispRouter", request_router_kwargs=router.kwargs()
        ),
    ).bind()
    caller = serve.deployment(Caller, name="Caller", ray_actor_options={"num_cpus": 0.1}).bind(replicas)
    serve.run(caller, name=APP, route_prefix=None)
    yield serve.get_deployment_handle("Answerer", APP)
    serve.delete(APP)


@pytest.fixture
async def store(valkey: Any) -> AsyncIterator[RedisStore]:
    opened = RedisStore(valkey.url, "router-test", password=valkey.password, timeout_s=1)
    yield opened
    await opened.close()


async def ask(app: DeploymentHandle, session_key: str, **arguments: Any) -> dict[str, Any]:
    call = app.options(stream=True, session_id=session_key).http.remote(session_key=session_key, **arguments)
    head, _ = [item async for item in call]
    return head


async def homes(app: DeploymentHandle, session_keys: list[str]) -> list[str]:
    return [(await ask(app, session_key))["replica_id"] for session_key in session_keys]


def snapshot(replica_id: str, turns: int) -> ReplicaSnapshot:
    return idle_snapshot(replica_id).model_copy(update={"kv": KvDemand(running_turns=turns)})


async def know_all_replicas(app: DeploymentHandle) -> None:
    """Serve tells a new handle its replicas one after the other; a session placed before that stays where it is."""
    seen: set[str] = set()
    for number in range(200):
        seen |= set(await homes(app, [f"t/u/first{number}"]))
        if len(seen) == NUM_REPLICAS:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"only {len(seen)} replicas were ever chosen")


async def test_sessions_stay_and_spread(app: DeploymentHandle, store: RedisStore) -> None:
    await know_all_replicas(app)
    # So many that all replicas are some session's first choice, but for one run in five thousand.
    keys = [f"t/u/stay{i}" for i in range(24)]
    first = await homes(app, keys)
    assert len(set(first)) == NUM_REPLICAS
    for _ in range(3):
        assert await homes(app, keys) == first
    placements = await store.read_placements(keys)
    assert [placements[key].replica_id for key in keys] == first
    assert {placement.version for placement in placements.values()} == {1}


async def test_two_processes_agree(app: DeploymentHandle, store: RedisStore) -> None:
    caller = serve.get_deployment_handle("Caller", APP)
    keys = [f"t/u/agree{i}" for i in range(20)]

    async def here(key: str) -> str:
        return (await ask(app, key))["replica_id"]

    async def there(key: str) -> str:
        return await caller.ask.remote(key)

    chosen = await asyncio.gather(*(ask_one(key) for key in keys for ask_one in (here, there)))
    assert chosen[0::2] == chosen[1::2]


async def test_telemetry_moves_a_session_for_both_processes(app: DeploymentHandle, store: RedisStore) -> None:
    caller = serve.get_deployment_handle("Caller", APP)
    home = (await ask(app, "t/u/moves"))["replica_id"]
    assert await caller.ask.remote("t/u/moves") == home
    everyone = {(await ask(app, f"t/u/probe{i}"))["replica_id"] for i in range(30)}
    assert len(everyone) == NUM_REPLICAS
    for replica_id in everyone:
        await store.write_snapshot(snapshot(replica_id, turns=400 if replica_id == home else 0))
    await asyncio.sleep(0.5)
    moved = (await ask(app, "t/u/moves"))["replica_id"]
    assert moved != home
    assert await caller.ask.remote("t/u/moves") == moved


async def test_a_repeated_turn_goes_elsewhere(app: DeploymentHandle, store: RedisStore) -> None:
    attempts = [(await ask(app, "t/u/again", turn_id="turn-1"))["replica_id"] for _ in range(NUM_REPLICAS)]
    assert len(set(attempts)) == NUM_REPLICAS


async def test_a_full_home_spills_over_without_an_error(app: DeploymentHandle, store: RedisStore) -> None:
    answers = await asyncio.gather(*(ask(app, "t/u/busy", wait_s=0.3) for _ in range(20)))
    assert len(answers) == 20
    assert len({answer["replica_id"] for answer in answers}) > 1


async def test_serving_goes_on_while_the_store_hangs_and_while_it_is_gone(
    app: DeploymentHandle, store: RedisStore, valkey: Any
) -> None:
    keys = [f"t/u/outage{i}" for i in range(6)]
    before = await homes(app, keys)
    valkey.pause()
    durations_s = []
    try:
        began_s = time.monotonic()
        while time.monotonic() - began_s < 4:
            turn_began_s = time.monotonic()
            assert await homes(app, keys[:1]) == before[:1]
            durations_s.append(time.monotonic() - turn_began_s)
    finally:
        valkey.resume()
    assert len(durations_s) > 50
    assert sum(duration_s > 0.2 for duration_s in durations_s) <= 6, "the breaker spares most turns the timeout"
    valkey.kill()
    try:
        assert await homes(app, keys) == before
        new = await homes(app, [f"t/u/during{i}" for i in range(6)])
        assert len(new) == 6
    finally:
        valkey.start()
    await asyncio.sleep(2.5)
    assert await homes(app, keys) == before, "the empty store learns the homes again"
    placements = await store.read_placements(keys)
    assert [placements[key].replica_id for key in keys] == before


async def test_a_killed_replica_s_sessions_move_and_stay_together(app: DeploymentHandle, store: RedisStore) -> None:
    keys = [f"t/u/killed{i}" for i in range(12)]
    before = dict(zip(keys, await homes(app, keys), strict=True))
    victim = await ask(app, keys[0])
    os.kill(victim["pid"], 9)
    after: dict[str, str] = {}
    for key in keys:
        while key not in after:  # A turn on the dead replica fails; the ingress would repeat it.
            with contextlib.suppress(RayActorError):
                after[key] = (await ask(app, key))["replica_id"]
    assert victim["replica_id"] not in after.values()
    kept = [key for key in keys if before[key] != victim["replica_id"]]
    assert [after[key] for key in kept] == [before[key] for key in kept]
    assert await homes(app, keys) == list(after.values())
