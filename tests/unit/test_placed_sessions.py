"""The policy service predicts for the sessions placed on a replica, not only for those that it has seen decode."""

from __future__ import annotations

import time

import numpy as np
import pytest
from policy_snapshots import make_layout, make_snapshot

from services.policy.placed import ACTIVE_S, with_placed_sessions
from wisp_core.contracts import Placement, Signature
from wisp_core.store.memory_store import MemoryStore
from wisp_core.tenant_contracts import TurnRecord
from wisp_core.working_set.placed_misses import miss_ratio_by_cap
from wisp_core.working_set.signature import pack

LAYERS, EXPERTS = 2, 8


def usage(*experts: int) -> np.ndarray:
    counts = np.zeros((LAYERS, EXPERTS))
    counts[:, list(experts)] = 1.0
    return counts


def signature(key: str, *experts: int) -> Signature:
    return Signature(key=key, num_layers=LAYERS, num_experts=EXPERTS, weights=pack(usage(*experts)), decode_tokens=100)


def test_the_same_work_has_ratio_one_at_every_cap() -> None:
    assert miss_ratio_by_cap(usage(0, 1, 2), usage(0, 1, 2) * 7) == pytest.approx([1.0] * 9)


def test_a_wider_union_misses_more_until_it_fits() -> None:
    ratios = miss_ratio_by_cap(usage(0, 1, 2, 3, 4, 5), usage(0, 1))
    assert ratios[0] == pytest.approx(1.0)
    assert ratios[2] == 4.0
    assert ratios[6] == pytest.approx(1.0, abs=0.01)


def test_a_narrower_union_misses_less() -> None:
    assert miss_ratio_by_cap(usage(0, 1), usage(0, 1, 2, 3, 4, 5))[2] == 0.25


def test_nothing_known_is_nothing_predicted() -> None:
    assert miss_ratio_by_cap(np.zeros((LAYERS, EXPERTS)), usage(0)) == ()


async def place(store: MemoryStore, session: str, replica: str, at_s: float) -> None:
    placement = Placement(session_key=session, replica_id=replica, version=1, reason="test", at_s=at_s)
    await store.place(session, None, placement)


async def test_sessions_count_where_they_are_placed_even_before_their_first_step_there() -> None:
    store, now_s = MemoryStore(), time.time()
    await store.write_signatures(
        "r1", [signature("t/u/a", 0, 1), signature("t/u/b", 4, 5), signature("r1", 0, 1), signature("r2", 4, 5)]
    )
    await place(store, "t/u/a", "r1", now_s)
    await place(store, "t/u/b", "r1", now_s)  # it has decoded on r2 so far
    snapshots = [make_snapshot(replica_id=name, layout=make_layout(num_experts=EXPERTS)) for name in ("r1", "r2")]
    first, second = await with_placed_sessions(store, snapshots)
    assert (first.placed_sessions, second.placed_sessions) == (2, 0)
    assert first.placed_miss_ratio_by_cap[2] == 4.0, "two working sets where one was seen"
    assert second.placed_miss_ratio_by_cap == ()


async def test_sessions_that_ended_long_ago_do_not_count() -> None:
    store, now_s = MemoryStore(), time.time()
    await place(store, "t/u/old", "r1", now_s - 2 * ACTIVE_S)
    await place(store, "t/u/talks", "r1", now_s - 2 * ACTIVE_S)
    await store.record_turn(TurnRecord(session_key="t/u/talks", replica_id="r1", at_s=now_s))
    (only,) = await with_placed_sessions(store, [make_snapshot()])
    assert only.placed_sessions == 1


async def test_mostly_unknown_sessions_predict_nothing() -> None:
    store = MemoryStore()
    await store.write_signatures("r1", [signature("t/u/a", 0), signature("r1", 0)])
    for name in "abcd":
        await place(store, f"t/u/{name}", "r1", time.time())
    (only,) = await with_placed_sessions(store, [make_snapshot()])
    assert only.placed_sessions == 4
    assert only.placed_miss_ratio_by_cap == ()


async def test_the_safe_size_is_that_of_all_placed_sessions_and_users_speak_for_new_ones() -> None:
    store, now_s = MemoryStore(), time.time()
    await store.write_signatures("r2", [signature("t/u/a", 0, 1), signature("t/v", 4, 5, 6)])
    await place(store, "t/u/a", "r1", now_s)
    snapshot = make_snapshot(layout=make_layout(num_layers=LAYERS, num_experts=EXPERTS))
    (alone,) = await with_placed_sessions(store, [snapshot])
    assert alone.placed_safe_cap == 2
    await place(store, "t/v/new", "r1", now_s)
    (both,) = await with_placed_sessions(store, [snapshot])
    assert both.placed_safe_cap == 5
    assert snapshot.placed_safe_cap == 0
