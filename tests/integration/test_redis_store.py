"""Both stores keep the same contract; Redis alone: keys and TTLs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np
import pytest
from store_values import SPLIT, open_redis_store, placement, plan, snapshot, tenant, turn

from wisp_core.contracts import Decision, DecisionRecord, Outcome, Placement, ResizeOutcome, Signature
from wisp_core.store import keys as k
from wisp_core.store.interface import Store
from wisp_core.store.keys import SIGNATURE_TTL_S
from wisp_core.store.redis_store import RedisStore
from wisp_core.store.signature_parts import MAX_PARTS
from wisp_core.tenant_contracts import TurnRecord
from wisp_core.working_set.signature import pack, use_rates


async def test_snapshots_are_listed_replaced_and_deleted(store: Store) -> None:
    assert await store.list_snapshots() == []
    second, first = snapshot("r2"), snapshot("r1")
    await store.write_snapshot(second)
    await store.write_snapshot(first)
    newer = first.model_copy(update={"plan_revision": 7})
    await store.write_snapshot(newer)
    assert await store.list_snapshots() == [newer, second]
    await store.delete_snapshot("r1")
    assert await store.list_snapshots() == [second]


async def test_only_a_higher_revision_replaces_a_plan(store: Store) -> None:
    assert await store.read_plan("r1") is None
    fourth = plan(4)
    assert await store.write_plan(fourth)
    assert not await store.write_plan(plan(4))
    assert not await store.write_plan(plan(3))
    assert await store.read_plan("r1") == fourth
    assert await store.write_plan(plan(10))
    assert await store.read_plan("r2") is None


async def test_of_many_writers_of_one_revision_one_wins(store: Store) -> None:
    written = await asyncio.gather(*(store.write_plan(plan(1)) for _ in range(20)))
    assert sum(written) == 1


async def test_watching_plans_yields_the_current_and_each_newer_one(store: Store) -> None:
    await store.write_plan(plan(1))
    watcher = store.watch_plans("r1", period_s=30)
    assert (await anext(watcher)).revision == 1
    waiting = asyncio.ensure_future(anext(watcher))
    await asyncio.sleep(0.2)
    await store.write_plan(plan(1, replica_id="r2"))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await store.write_plan(plan(2))
    assert (await asyncio.wait_for(waiting, 2)).revision == 2
    await watcher.aclose()


async def test_logs_are_newest_first_and_bounded(store: Store) -> None:
    for revision in range(1, k.LOG_LENGTH + 6):
        outcome = ResizeOutcome(
            replica_id="r1", revision=revision, outcome=Outcome.APPLIED, reason="ok", before=SPLIT, after=SPLIT
        )
        await store.append_outcome(outcome)
    assert [o.revision for o in await store.list_outcomes("r1", 3)] == [k.LOG_LENGTH + 5 - i for i in range(3)]
    assert len(await store.list_outcomes("r1", 10_000)) == k.LOG_LENGTH
    assert await store.list_outcomes("r1", 0) == []
    assert await store.list_outcomes("r2", 5) == []


async def test_decisions_come_back_with_their_reason(store: Store) -> None:
    record = DecisionRecord(
        replica_id="r1",
        policy="mv_wsa",
        before=SPLIT,
        budget_bytes=1 << 20,
        floor_blocks=3,
        demand_blocks=5,
        mean_turns=1.5,
        decode_steps_per_s=10,
        prefill_steps_per_s=1,
        decode_misses_per_step=2.5,
        decision=Decision(split=SPLIT, reason="hold: no gain"),
    )
    await store.append_decision(record)
    assert await store.list_decisions("r1", 5) == [record]


async def test_signatures_are_read_by_key(store: Store) -> None:
    signature = Signature(key="t/u/s", num_layers=2, num_experts=4, weights=bytes(range(8)), decode_tokens=5)
    await store.write_signatures("r1", [signature, signature.model_copy(update={"key": "r1"})])
    found = await store.read_signatures(["t/u/s", "nobody", "r1"])
    assert set(found) == {"t/u/s", "r1"}
    assert found["t/u/s"] == signature
    assert await store.read_signatures([]) == {}


def part(weights: Sequence[Sequence[float]], tokens: int, **changes: float) -> Signature:
    fields = {"decode_tokens": tokens, "lookups": tokens, **changes}
    return Signature(key="t", num_layers=1, num_experts=4, weights=pack(np.array(weights)), **fields)


async def test_replicas_of_one_tenant_do_not_overwrite_each_other(store: Store) -> None:
    await store.write_signatures("r1", [part([[1, 0, 0, 0]], 30)])
    await store.write_signatures("r2", [part([[0, 1, 0, 0]], 10)])
    both = (await store.read_signatures(["t"]))["t"]
    assert both.decode_tokens == 40
    assert use_rates(both, 1)[0].tolist() == pytest.approx([0.75, 0.25, 0, 0], abs=0.01)
    await store.write_signatures("r2", [part([[0, 1, 0, 0]], 30)])
    later = (await store.read_signatures(["t"]))["t"]
    assert use_rates(later, 1)[0].tolist() == pytest.approx([0.5, 0.5, 0, 0], abs=0.01), "a part replaces its own"


async def test_the_newest_parts_speak_for_a_tenant_on_many_replicas(store: Store) -> None:
    now_s = time.time()
    for number in range(3 * MAX_PARTS):
        await store.write_signatures(f"r{number}", [part([[1, 0, 0, 0]], 1, at_s=now_s - 100 + number)])
    assert (await store.read_signatures(["t"]))["t"].decode_tokens == MAX_PARTS
    await store.write_signatures("slow-clock", [part([[0, 1, 0, 0]], 10, at_s=now_s - 500)])
    mixed = (await store.read_signatures(["t"]))["t"]
    assert mixed.decode_tokens == 10 + MAX_PARTS - 1, "who writes is kept, whatever its clock says"


async def test_parts_from_before_the_ttl_or_of_another_model_do_not_count(store: Store) -> None:
    await store.write_signatures("gone", [part([[1, 0, 0, 0]], 9, at_s=time.time() - SIGNATURE_TTL_S - 1)])
    assert await store.read_signatures(["t"]) == {}
    old_model = Signature(key="t", num_layers=2, num_experts=2, weights=pack(np.ones((2, 2))), decode_tokens=9)
    await store.write_signatures("r1", [old_model])
    await store.write_signatures("r2", [part([[0, 1, 0, 0]], 5, at_s=time.time() + 1)])
    assert (await store.read_signatures(["t"]))["t"].num_experts == 4


async def test_reports_say_who_has_news(store: Store) -> None:
    await store.write_snapshot(snapshot("r1"))
    first = await store.list_reports()
    assert set(first) == {"r1"}
    await store.write_snapshot(snapshot("r2"))
    assert (await store.list_reports())["r1"] == first["r1"]
    await asyncio.sleep(0.01)
    await store.write_snapshot(snapshot("r1"))
    assert (await store.list_reports())["r1"] > first["r1"]
    assert [one.replica_id for one in await store.read_snapshots(["r2", "nobody"])] == ["r2"]
    assert await store.read_snapshots([]) == []


async def test_the_first_placement_of_a_session_wins(store: Store) -> None:
    first = placement("r1", 1)
    assert await store.place("t/u/s", None, first) == first
    assert await store.place("t/u/s", None, placement("r2", 1)) == first
    assert await store.read_placements(["t/u/s"]) == {"t/u/s": first}


async def test_a_move_needs_the_current_version(store: Store) -> None:
    await store.place("t/u/s", None, placement("r1", 1))
    moved = placement("r2", 2)
    assert await store.place("t/u/s", 1, moved) == moved
    assert await store.place("t/u/s", 1, placement("r3", 2)) == moved
    assert await store.place("t/u/s", 7, placement("r3", 8)) == moved


async def test_staying_changes_nothing(store: Store) -> None:
    first = placement("r1", 1)
    await store.place("t/u/s", None, first)
    assert await store.place("t/u/s", 1, placement("r1", 2)) == first


async def test_a_lost_session_takes_any_proposal(store: Store) -> None:
    proposal = placement("r2", 6)
    assert await store.place("t/u/s", 5, proposal) == proposal


async def test_racing_placements_agree(store: Store) -> None:
    proposals = [placement(f"r{i}", 1) for i in range(20)]
    winners = await asyncio.gather(*(store.place("t/u/s", None, proposal) for proposal in proposals))
    assert len({winner.replica_id for winner in winners}) == 1


async def test_placements_are_listed_newest_first(store: Store) -> None:
    for i in range(4):
        key = f"t/u/s{i}"
        proposal = Placement(session_key=key, replica_id="r1", version=1, reason="", at_s=1000.0 + i)
        await store.place(key, None, proposal)
    assert [p.session_key for p in await store.list_placements(2)] == ["t/u/s3", "t/u/s2"]
    assert set(await store.read_placements(["t/u/s0", "t/u/nobody"])) == {"t/u/s0"}


async def test_turns_add_up_per_session(store: Store) -> None:
    good = TurnRecord(
        session_key="t/u/s",
        replica_id="r1",
        ttft_s=0.25,
        duration_s=1.0,
        prompt_tokens=100,
        cached_tokens=64,
        completion_tokens=20,
        at_s=1000.0,
    )
    await store.record_turn(good)
    await store.record_turn(
        TurnRecord(session_key="t/u/s", replica_id="r2", is_failed=True, duration_s=2.0, at_s=1001.0)
    )
    await store.record_turn(TurnRecord(session_key="t/u/other", replica_id="r2", at_s=999.0))
    await store.record_turn(TurnRecord(session_key="t//!1", replica_id="r2", at_s=998.0))  # a session of one turn
    usage, other = await store.list_sessions(10)
    assert other.session_key == "t/u/other"
    assert (usage.turns, usage.failed_turns, usage.replica_id, usage.last_turn_at_s) == (2, 1, "r2", 1001.0)
    assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (100, 64, 20)
    assert (usage.ttft_sum_s, usage.ttft_turns, usage.decode_s) == (0.25, 1, 0.75)
    newest, *older = await store.list_turns(10)
    assert newest.session_key == "t//!1"
    assert older[-1] == good
    assert len(await store.list_turns(2)) == 2


async def test_a_lease_has_one_holder(store: Store) -> None:
    assert await store.acquire_lease("policy", "a", 0.3)
    assert not await store.acquire_lease("policy", "b", 0.3)
    assert await store.acquire_lease("policy", "a", 0.3), "the holder renews"
    await asyncio.sleep(0.4)
    assert await store.acquire_lease("policy", "b", 30)
    await store.release_lease("policy", "a")
    assert not await store.acquire_lease("policy", "a", 30)
    await store.release_lease("policy", "b")
    assert await store.acquire_lease("policy", "a", 30)


async def test_snapshots_and_signatures_expire(redis_store: RedisStore, valkey) -> None:
    await redis_store.write_snapshot(snapshot())
    await redis_store.write_signatures("r1", [Signature(key="t", num_layers=1, num_experts=1, weights=b"")])
    await redis_store.place("t/u/s", None, placement("r1", 1))
    await redis_store.write_plan(plan(1))
    client, keys = valkey.client(), k.Keys("test")
    assert 0 < client.pttl(keys.snapshot("r1")) <= k.SNAPSHOT_TTL_S * 1000
    assert 0 < client.ttl(keys.signature("t")) <= k.SIGNATURE_TTL_S
    assert 0 < client.ttl(keys.placement("t/u/s")) <= k.SESSION_TTL_S
    assert 0 < client.ttl(keys.plan("r1")) <= k.PLAN_TTL_S
    client.zadd(keys.replicas, {"r0": time.time() - k.SNAPSHOT_TTL_S - 1})
    assert set(await redis_store.list_reports()) == {"r1"}, "nobody has written since r0 was gone"
    client.delete(keys.snapshot("r1"))
    assert await redis_store.list_snapshots() == [], "a member of the index without a snapshot is no replica"


async def test_every_key_starts_with_the_service(redis_store: RedisStore, valkey) -> None:
    await redis_store.write_snapshot(snapshot())
    await redis_store.write_tenant(tenant("t", "k"))
    await redis_store.admit(turn("a"), time.time())
    await redis_store.record_turn(TurnRecord(session_key="t/u/s", replica_id="r1"))
    await redis_store.acquire_lease("policy", "a", 5)
    assert all(key.startswith("wisp:{test}:") for key in valkey.client().scan_iter())


async def test_another_service_sees_nothing(redis_store: RedisStore, valkey) -> None:
    await redis_store.write_snapshot(snapshot())
    other = open_redis_store(valkey, service="other")
    assert await other.list_snapshots() == []
    await other.close()


async def test_another_schema_counts_as_missing(redis_store: RedisStore, valkey) -> None:
    await redis_store.write_snapshot(snapshot("r1"))
    await redis_store.write_snapshot(snapshot("r2"))
    client, key = valkey.client(), k.Keys("test").snapshot("r1")
    client.set(key, client.get(key).replace('"schema_version":1', '"schema_version":99'))
    assert [s.replica_id for s in await redis_store.list_snapshots()] == ["r2"]


async def test_scripts_survive_a_flush(redis_store: RedisStore, valkey) -> None:
    assert await redis_store.write_plan(plan(1))
    valkey.client().script_flush()
    assert await redis_store.write_plan(plan(2))
