"""What Serve gets from the router: short ranks, one decision for a turn that waits, and never an exception."""

from __future__ import annotations

import importlib
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

from services.config import (
    ModelSettings,
    ReplicaSettings,
    RouterName,
    RoutingSettings,
    ServiceConfig,
    TenantSettings,
)
from services.ingress.placement import PlacementDirectory
from services.ingress.router import DECISION_AGE_S, WispRouter
from services.ingress.routers import RouterConfig, router_of
from services.store_address import StoreAddress
from wisp_core.routing.hashing import hash_order
from wisp_core.routing.views import RoutingWeights
from wisp_core.store.memory_store import MemoryStore

NAMES = [f"r{i}" for i in range(20)]


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


REPLICAS = [replica(name) for name in NAMES]


class CountingDirectory(PlacementDirectory):
    """Counts decisions."""

    decisions = 0

    async def rank(self, *args: Any, **kwargs: Any) -> Any:
        self.decisions += 1
        return await super().rank(*args, **kwargs)


@pytest.fixture
def router() -> WispRouter:
    """A router with Serve's own state left out: what is tested here does not use it."""
    made: WispRouter = WispRouter.__new__(WispRouter)
    config = RouterConfig(store=StoreAddress(url="redis://unused", service="test"))
    made.initialize_state(**config.kwargs())
    made._by_id = dict(zip(NAMES, REPLICAS, strict=True))
    made._directory = CountingDirectory(MemoryStore(), config)
    made._directory.keep_replicas(NAMES)
    return made


def pending(number: int = 0, **kwargs: Any) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(internal_request_id=f"request-{number}", session_id="t/u/s"),
        kwargs={"session_key": "t/u/s", **kwargs},
        routing_context=SimpleNamespace(should_backoff=False),
    )


def names(ranks: list[list[Any]]) -> list[list[str]]:
    return [[one.replica_id.unique_id for one in rank] for rank in ranks]


async def test_a_turn_that_waits_is_decided_once_and_then_sees_everybody(router: WispRouter) -> None:
    request = pending()
    first = names(await router.choose_replicas(REPLICAS, request))
    assert request.routing_context.should_backoff
    assert [len(rank) for rank in first] == [1, RoutingWeights().num_scored - 1]
    for _ in range(10):
        later = names(await router.choose_replicas(REPLICAS, request))
        assert later[:2] == first
        assert sorted(chain.from_iterable(later)) == sorted(NAMES)
    assert router._directory.decisions == 1  # type: ignore[union-attr]


async def test_a_decision_is_made_anew_when_it_is_old_or_its_turn_has_started(router: WispRouter) -> None:
    directory = router._directory
    assert isinstance(directory, CountingDirectory)
    request = pending()
    await router.choose_replicas(REPLICAS, request)
    made_at_s, order = router._orders["request-0"]
    router._orders["request-0"] = (made_at_s - DECISION_AGE_S, order)
    await router.choose_replicas(REPLICAS, request)
    assert directory.decisions == 2
    router.on_request_routed(request, REPLICAS[0].replica_id, None)
    assert router._orders == {}
    router.on_request_completed(REPLICAS[0].replica_id, "request-0")
    assert directory._own_turns["r0"] == 0


async def test_an_attempt_that_failed_is_not_sent_there_again(router: WispRouter) -> None:
    request = pending(turn_id="turn-1")
    (home, *_), _ = names(await router.choose_replicas(REPLICAS, request))
    router.on_request_routed(request, router._by_id[home].replica_id, None)
    ranks = names(await router.choose_replicas(REPLICAS, pending(1, turn_id="turn-1")))
    assert home not in chain.from_iterable(ranks)


async def test_whatever_breaks_the_hash_decides(router: WispRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(router._directory, "rank", broken)
    ranks = names(await router.choose_replicas(REPLICAS, pending()))
    assert ranks == [[name] for name in hash_order("t/u/s", NAMES)[:8]]


async def test_without_replicas_there_is_nothing_to_choose(router: WispRouter) -> None:
    assert await router.choose_replicas([], pending()) == []
    assert await router.choose_replicas(REPLICAS, None) == [REPLICAS]


@pytest.mark.parametrize("name", RouterName)
def test_each_router_has_a_class_that_exists(name: RouterName) -> None:
    config = ServiceConfig(
        model=ModelSettings(path="tiny"),
        replica=ReplicaSettings(vram_budget_bytes=1 << 20),
        routing=RoutingSettings(router=name),
        tenants=(TenantSettings(tenant_id="a", key_sha256="0" * 64),),
    )
    path, kwargs = router_of(config, StoreAddress(url="redis://unused", service="test"))
    module, _, attribute = path.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    assert (found is WispRouter) == (name is RouterName.WORKING_SET) == bool(kwargs)
