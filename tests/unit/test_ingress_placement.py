"""What a router process knows: two of them agree, the store may go, sessions stay or move."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import numpy as np
import pytest
from policy_snapshots import make_layout, make_snapshot

from services.config import RoutingSettings
from services.ingress.placement import PlacementDirectory, Turn
from services.ingress.routers import RouterConfig
from services.ingress.sessions import identify
from services.store_address import StoreAddress
from wisp_core.contracts import KvDemand, Placement, ReplicaSnapshot, Signature
from wisp_core.routing.hashing import hash_order
from wisp_core.store.memory_store import MemoryStore
from wisp_core.working_set.signature import pack

REPLICAS = ["r1", "r2", "r3"]
NUM_LAYERS, NUM_EXPERTS = 2, 8


def snapshot(replica_id: str, *, turns: int = 0, is_healthy: bool = True, age_s: float = 0.0) -> ReplicaSnapshot:
    return make_snapshot(
        replica_id=replica_id,
        layout=make_layout(expert_bytes=1 << 20),
        is_healthy=is_healthy,
        link_bytes_per_s=1e8,
        kv=KvDemand(running_turns=turns),
        at_s=time.time() - age_s,
    )


def signature(key: str, *experts: int) -> Signature:
    counts = np.zeros((NUM_LAYERS, NUM_EXPERTS))
    counts[:, list(experts)] = 10
    return Signature(
        key=key, num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, weights=pack(counts), decode_tokens=10, lookups=40
    )


def directory(store: MemoryStore, refresh_s: float = 0.25) -> PlacementDirectory:
    routing = RoutingSettings(migrate_gain_s=0.5, refresh_s=refresh_s)
    known = PlacementDirectory(
        store, RouterConfig(store=StoreAddress(url="redis://unused", service="test"), routing=routing)
    )
    known.keep_replicas(REPLICAS)
    return known


def turn(session: str = "s", **fields: object) -> Turn:
    return Turn(session_key=f"t/u/{session}", user_key="t/u", tenant="t", max_tokens=100, **fields)  # type: ignore[arg-type]


async def home(known: PlacementDirectory, asked: Turn, **kwargs: object) -> str:
    return (await known.rank(asked, **kwargs)).chosen  # type: ignore[arg-type]


async def test_two_routers_never_split_a_session() -> None:
    store = MemoryStore()
    # The second one sees newer snapshots, and alone would choose another replica.
    await store.write_snapshot(snapshot("r1"))
    one = directory(store)
    await one.refresh()
    await store.write_snapshot(snapshot("r1", turns=50))
    await store.write_snapshot(snapshot("r2"))
    two = directory(store)
    await two.refresh()
    for i in range(50):
        chosen = await asyncio.gather(*(home(router, turn(f"s{i}")) for router in (one, two)))
        assert chosen == ["r1", "r1"]


async def test_a_move_by_one_router_is_followed_by_the_other() -> None:
    store = MemoryStore()
    for replica_id in REPLICAS:
        await store.write_snapshot(snapshot(replica_id))
    one, two = directory(store), directory(store)
    await one.refresh()
    await two.refresh()
    first = await home(one, turn())
    assert await home(two, turn()) == first
    await store.write_snapshot(snapshot(first, turns=40))
    await one.refresh()
    moved = await home(one, turn())
    assert moved != first
    assert await home(two, turn()) == moved, "although its own snapshots are older"
    placement = (await store.read_placements(["t/u/s"])).get("t/u/s")
    assert placement is not None
    assert (placement.version, placement.replica_id) == (2, moved)
    assert "moves" in placement.reason


async def test_a_session_leaves_a_replica_that_failed_or_is_gone() -> None:
    store = MemoryStore()
    known = directory(store)
    first = await home(known, turn())
    second = await home(known, turn(), excluded=frozenset({first}))
    assert second != first
    assert await home(known, turn()) == second
    left = [replica_id for replica_id in REPLICAS if replica_id != second]
    known.keep_replicas(left)
    assert await home(known, turn()) in left


async def test_an_unhealthy_home_is_left() -> None:
    store = MemoryStore()
    for replica_id in REPLICAS:
        await store.write_snapshot(snapshot(replica_id))
    known = directory(store)
    await known.refresh()
    first = await home(known, turn())
    await store.write_snapshot(snapshot(first, is_healthy=False))
    await known.refresh()
    assert await home(known, turn()) != first


async def test_without_the_store_sessions_keep_their_home_and_new_ones_are_hashed() -> None:
    store = MemoryStore()
    one, two = directory(store), directory(store)
    placed = await home(one, turn("old"))
    store.is_available = False
    assert await home(one, turn("old")) == placed
    for i in range(20):
        expected = hash_order(f"t/u/new{i}", REPLICAS)[0]
        assert await home(one, turn(f"new{i}")) == await home(two, turn(f"new{i}")) == expected


async def test_after_an_outage_the_store_s_word_counts() -> None:
    store = MemoryStore()
    known = directory(store)
    store.is_available = False
    hashed = await home(known, turn())
    store.is_available = True
    other = next(replica_id for replica_id in REPLICAS if replica_id != hashed)
    await store.place(
        "t/u/s", None, Placement(session_key="t/u/s", replica_id=other, version=1, reason="by another router")
    )
    assert await home(known, turn()) == other


async def test_a_store_that_lost_everything_learns_the_homes_again() -> None:
    store = MemoryStore()
    known = directory(store)
    first = await home(known, turn())
    known._store = emptied = MemoryStore()
    assert await home(known, turn()) == first
    placement = (await emptied.read_placements(["t/u/s"])).get("t/u/s")
    assert placement is not None
    assert placement.replica_id == first


async def test_a_new_session_of_a_known_user_goes_where_its_experts_are() -> None:
    store = MemoryStore()
    for replica_id, experts in (("r1", (0, 1, 2, 3)), ("r2", (4, 5, 6, 7)), ("r3", (0, 1, 2, 3))):
        await store.write_snapshot(snapshot(replica_id, turns=1))
        await store.write_signatures(replica_id, [signature(replica_id, *experts)])
    await store.write_signatures("r1", [signature("t/u", 4, 5, 6, 7)])
    known = directory(store)
    await known.refresh()
    decision = await known.rank(turn())
    assert decision.chosen == "r2"
    assert decision.scores["r1"].experts_s > decision.scores["r2"].experts_s == pytest.approx(0, abs=1e-3)


async def test_stale_snapshots_do_not_count() -> None:
    store = MemoryStore()
    for replica_id in REPLICAS:
        await store.write_snapshot(snapshot(replica_id, age_s=11))
    known = directory(store)
    await known.refresh()
    decision = await known.rank(turn())
    assert decision.scores == {}
    assert "no telemetry" in decision.reason


async def test_turns_on_their_way_count_before_a_snapshot_shows_them() -> None:
    store = MemoryStore()
    for replica_id in REPLICAS:
        await store.write_snapshot(snapshot(replica_id))
    known = directory(store)
    await known.refresh()
    for replica_id in ("r1", "r2"):
        for _ in range(3):
            known.begin_turn(replica_id)
    assert await home(known, turn()) == "r3"
    for _ in range(3):
        known.end_turn("r1", 1.0)
    known.keep_replicas({"r1", "r3"})
    assert known._own_turns == {"r1": 0}


async def test_turns_that_name_no_session_are_spread_and_leave_nothing() -> None:
    store = MemoryStore()
    known = directory(store)
    await store.write_signatures("r1", [signature("t", 0, 1), signature("t/", 0, 1)])
    chosen = Counter()
    for _ in range(60):
        session = identify("t", "", None)
        one = Turn(session_key=session.session_key, user_key=session.user_key, tenant="t", max_tokens=100)
        assert one.signature_keys() == ["t", "t/"]
        chosen[await home(known, one)] += 1
    assert set(chosen) == set(REPLICAS)
    assert await store.list_placements(100) == []
    assert (len(known._homes), len(known._last_prompt_tokens)) == (0, 0)


async def test_refreshing_outlives_an_outage() -> None:
    store = MemoryStore()
    store.is_available = False
    known = directory(store, refresh_s=0.01)
    refresher = asyncio.create_task(known.refresh_forever())
    await asyncio.sleep(0.05)
    await store_snapshot_after_outage(store)
    await asyncio.sleep(0.1)
    assert (await known.rank(turn())).scores.keys() == {"r1"}
    refresher.cancel()


async def store_snapshot_after_outage(store: MemoryStore) -> None:
    store.is_available = True
    await store.write_snapshot(snapshot("r1"))


def test_the_router_s_configuration_is_plain_json() -> None:
    config = RouterConfig(store=StoreAddress(url="redis://h", service="test"))
    assert RouterConfig.model_validate(config.kwargs()) == config


class CountingStore(MemoryStore):
    """Counts what routers settle with it."""

    num_proposals = 0

    async def place(self, session_key: str, expected_version: int | None, placement: Placement) -> Placement:
        self.num_proposals += 1
        return await super().place(session_key, expected_version, placement)


async def test_a_session_stays_where_its_turn_was_told_without_asking_the_store_again() -> None:
    store = CountingStore()
    one, two = directory(store), directory(store)
    first = await home(one, turn())
    assert store.num_proposals == 1
    assert await home(two, turn(home=first, home_version=1)) == first
    assert store.num_proposals == 1
    moved = await home(one, turn(home=first, home_version=1), excluded=frozenset({first}))
    assert moved != first
    assert store.num_proposals == 2, "a move is settled with the other routers"
    # Told before the move: what this process knows is newer.
    assert await home(one, turn(home=first, home_version=1)) == moved
    # The other one is told of the move by its next turn.
    assert await home(two, turn(home=moved, home_version=2)) == moved
    placement = (await store.read_placements(["t/u/s"])).get("t/u/s")
    assert placement is not None
    assert (placement.replica_id, placement.version) == (moved, 2)


async def test_an_old_session_met_anew_is_not_counted_as_placed() -> None:
    router = directory(MemoryStore())
    await router.rank(turn(home="r2", home_version=3))
    assert router._fleet.column("placed").tolist() == [0, 0, 0], "the replica's own reports count it"
    await router.rank(turn(home="r3", home_version=4))
    assert router._fleet.column("placed").tolist() == [0, -1, 1], "another router has moved it since"


async def test_a_turn_that_was_told_of_a_replica_that_is_gone_is_placed_anew() -> None:
    store = CountingStore()
    one, two = directory(store), directory(store)
    first = await home(one, turn())
    two.keep_replicas([name for name in REPLICAS if name != first])
    moved = await home(two, turn(home=first, home_version=1))
    assert moved != first
    placement = (await store.read_placements(["t/u/s"])).get("t/u/s")
    assert placement is not None
    assert (placement.replica_id, placement.version) == (moved, 2)
