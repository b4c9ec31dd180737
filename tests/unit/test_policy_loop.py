"""The control loop on the in-memory store, with the real policies in their own process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from policy_snapshots import make_snapshot, wants_experts, wants_kv

from services.config import DampingSettings, PolicySettings
from services.policy.loop import Action, PolicyLoop
from services.policy.metrics import PolicyMetrics
from services.policy.runner import PolicyRunner
from wisp_core.contracts import Barrier, Outcome, ReplicaSnapshot, ResizeOutcome, Split, SplitPlan
from wisp_core.store.memory_store import MemoryStore


class Bench:
    """A store, a runner and loops on it; ``replica`` plays a replica that applies plans at once."""

    def __init__(self, settings: PolicySettings) -> None:
        self.store = MemoryStore()
        self.metrics = PolicyMetrics()
        self.settings = settings
        self.runner = PolicyRunner(settings, self.metrics)
        self.loop = self.new_loop()

    def new_loop(self, **changes: Any) -> PolicyLoop:
        fields: dict[str, Any] = {"stale_after_s": 5.0} | changes
        return PolicyLoop(self.store, self.runner, self.metrics, self.settings, **fields)

    async def epoch(self, *snapshots: ReplicaSnapshot) -> dict[str, Action]:
        for snapshot in snapshots:
            await self.store.write_snapshot(snapshot)
        return await self.loop.run_epoch()

    async def plan(self) -> SplitPlan:
        plan = await self.store.read_plan("r1")
        assert plan is not None
        return plan

    async def finish(self, outcome: Outcome, at_s: float | None = None) -> None:
        """Log ``outcome`` for the last plan."""
        plan = await self.plan()
        split = plan.split if outcome is Outcome.APPLIED else Split(cap=4, kv_blocks=103)
        await self.store.append_outcome(
            ResizeOutcome(
                at_s=time.time() if at_s is None else at_s,
                replica_id="r1",
                revision=plan.revision,
                outcome=outcome,
                reason="test",
                before=Split(cap=4, kv_blocks=103),
                after=split,
            )
        )


@pytest_asyncio.fixture
async def bench() -> AsyncIterator[Bench]:
    damping = DampingSettings(confirmations=2)
    bench = Bench(PolicySettings(name="mv_wsa", epoch_s=0.05, deadline_s=30.0, damping=damping))
    await bench.runner.start()
    yield bench
    await bench.runner.close()


async def test_plans_after_confirmation_and_rests_when_applied(bench: Bench) -> None:
    assert await bench.epoch(wants_experts()) == {"r1": Action.HOLD}
    assert await bench.store.read_plan("r1") is None
    assert await bench.epoch(wants_experts()) == {"r1": Action.PLAN}
    plan = await bench.plan()
    assert (plan.revision, plan.split.cap, plan.policy, plan.incarnation) == (1, 8, "mv_wsa", "i1")
    assert plan.barrier is Barrier.BALLOON
    assert plan.marginals is not None
    assert await bench.epoch(wants_experts(split=plan.split, plan_revision=1)) == {"r1": Action.HOLD}
    assert (await bench.plan()).revision == 1


async def test_waits_while_a_plan_is_pending_or_being_applied(bench: Bench) -> None:
    await bench.epoch(wants_experts())
    await bench.epoch(wants_experts())
    assert await bench.epoch(wants_experts()) == {"r1": Action.PENDING}
    assert await bench.epoch(wants_experts(plan_revision=1, is_resizing=True)) == {"r1": Action.PENDING}


async def test_a_plan_that_a_replica_dropped_is_replaced(bench: Bench) -> None:
    dropped = SplitPlan(
        at_s=time.time() - 61,
        replica_id="r1",
        incarnation="i1",
        revision=3,
        split=Split(cap=8, kv_blocks=39),
        policy="mv_wsa",
        reason="dropped",
    )
    await bench.store.write_plan(dropped)
    await bench.epoch(wants_experts(plan_revision=2))
    assert await bench.epoch(wants_experts(plan_revision=2)) == {"r1": Action.PLAN}
    assert (await bench.plan()).revision == 4


async def test_both_directions_within_four_epochs_each(bench: Bench) -> None:
    split, revision = Split(cap=4, kv_blocks=103), 0
    for phase, goal in [(wants_experts, 8), (wants_kv, 4), (wants_experts, 8)]:
        for _ in range(4):
            await bench.epoch(phase(split=split, plan_revision=revision))
            plan = await bench.store.read_plan("r1")
            split, revision = (plan.split, plan.revision) if plan else (split, revision)
        assert split.cap == goal
    assert revision == 3


async def test_a_deferred_plan_is_issued_again_once_turns_may_have_ended(bench: Bench) -> None:
    await bench.epoch(wants_experts())
    await bench.epoch(wants_experts())
    await bench.finish(Outcome.DEFERRED)
    for _ in range(4):
        assert await bench.epoch(wants_experts(plan_revision=1)) == {"r1": Action.HOLD}
    await bench.finish(Outcome.DEFERRED, at_s=time.time() - 6)
    assert await bench.epoch(wants_experts(plan_revision=1)) == {"r1": Action.PLAN}
    assert (await bench.plan()).revision == 2


async def test_slots_may_be_given_up_at_once_after_a_deferred_plan(bench: Bench) -> None:
    await bench.epoch(wants_experts())
    await bench.epoch(wants_experts())
    await bench.finish(Outcome.DEFERRED)
    split = Split(cap=6, kv_blocks=71)
    actions = [await bench.epoch(wants_kv(plan_revision=1, split=split)) for _ in range(4)]
    assert {"r1": Action.PLAN} in actions


async def test_a_failed_split_is_left_alone_for_a_while(bench: Bench) -> None:
    await bench.epoch(wants_experts())
    await bench.epoch(wants_experts())
    await bench.finish(Outcome.FAILED)
    assert await bench.epoch(wants_experts(plan_revision=1)) == {"r1": Action.HOLD}
    await bench.finish(Outcome.FAILED, at_s=time.time() - 60)
    assert await bench.epoch(wants_experts(plan_revision=1)) == {"r1": Action.PLAN}


async def test_a_new_engine_may_be_given_the_split_in_which_the_last_one_died(bench: Bench) -> None:
    await bench.epoch(wants_experts())
    await bench.epoch(wants_experts())
    await bench.finish(Outcome.FAILED)
    assert await bench.epoch(wants_experts(plan_revision=1)) == {"r1": Action.HOLD}
    for _ in range(3):
        await bench.epoch(wants_experts(incarnation="i2"))
    assert (await bench.plan()).incarnation == "i2"


async def test_a_drain_that_ended_for_nothing_is_left_alone_for_a_while_whatever_the_split(bench: Bench) -> None:
    bench.loop = bench.new_loop(barrier=Barrier.DRAINED)
    await bench.epoch(wants_experts())
    await bench.epoch(wants_experts())
    await bench.finish(Outcome.DEFERRED)
    for wants, split in ((wants_experts, {}), (wants_kv, {"split": Split(cap=6, kv_blocks=71)})):
        for _ in range(4):
            assert await bench.epoch(wants(plan_revision=1, **split)) == {"r1": Action.HOLD}
    await bench.finish(Outcome.DEFERRED, at_s=time.time() - 300)
    assert await bench.epoch(wants_kv(plan_revision=1, split=Split(cap=6, kv_blocks=71))) == {"r1": Action.PLAN}


async def test_stale_and_unhealthy_replicas_are_left_alone(bench: Bench) -> None:
    stale = wants_experts(replica_id="old", at_s=time.time() - 6)
    dead = wants_experts(replica_id="dead", is_healthy=False)
    for _ in range(3):
        assert await bench.epoch(stale, dead) == {"old": Action.STALE, "dead": Action.STALE}


async def test_a_new_engine_gets_plans_of_its_own(bench: Bench) -> None:
    await bench.epoch(wants_experts())
    await bench.epoch(wants_experts())
    restarted = wants_experts(incarnation="i2")
    assert await bench.epoch(restarted) == {"r1": Action.HOLD}
    assert await bench.epoch(restarted) == {"r1": Action.PLAN}
    plan = await bench.plan()
    assert (plan.revision, plan.incarnation) == (2, "i2")


async def test_revisions_grow_across_restarts_and_lost_stores(bench: Bench) -> None:
    await bench.epoch(wants_experts())
    await bench.epoch(wants_experts())
    await bench.loop._release_lease()
    bench.loop = bench.new_loop()
    assert await bench.epoch(wants_kv(split=Split(cap=8, kv_blocks=39), plan_revision=1)) == {"r1": Action.PLAN}
    assert (await bench.plan()).revision == 2, "below the floor: at once"

    bench.store = MemoryStore()  # as after a Valkey that kept nothing
    bench.loop = bench.new_loop()
    await bench.epoch(wants_experts(plan_revision=7))
    await bench.epoch(wants_experts(plan_revision=7))
    assert (await bench.plan()).revision == 8


async def test_only_one_of_two_loops_decides(bench: Bench) -> None:
    other = bench.new_loop()
    assert await bench.epoch(wants_experts()) == {"r1": Action.HOLD}
    assert await other.run_epoch() == {}
    await bench.loop._release_lease()
    assert await other.run_epoch() == {"r1": Action.PLAN}
    assert await bench.loop.run_epoch() == {}


async def test_a_plan_that_another_writer_overtook_is_fenced(bench: Bench) -> None:
    await bench.epoch(wants_experts())
    read_plan = bench.store.read_plan

    async def overtaken(replica_id: str) -> SplitPlan | None:
        seen = await read_plan(replica_id)
        split = Split(cap=5, kv_blocks=87)
        await bench.store.write_plan(
            SplitPlan(replica_id="r1", incarnation="i1", revision=5, split=split, policy="x", reason="other writer")
        )
        return seen

    bench.store.read_plan = overtaken  # type: ignore[method-assign]
    assert await bench.epoch(wants_experts()) == {"r1": Action.FENCED}
    bench.store.read_plan = read_plan  # type: ignore[method-assign]
    assert (await bench.plan()).reason == "other writer"


async def test_decisions_are_logged_with_inputs_and_holds_only_once(bench: Bench) -> None:
    for _ in range(2):
        await bench.epoch(wants_experts())
    after = wants_experts(split=(await bench.plan()).split, plan_revision=1)
    for _ in range(3):
        await bench.epoch(after)
    records = await bench.store.list_decisions("r1", 10)
    assert [r.plan_revision for r in records] == [None, 1, None]
    plan = records[1]
    assert (plan.before, plan.decision.split.cap) == (Split(cap=4, kv_blocks=103), 8)
    assert (plan.floor_blocks, plan.demand_blocks, plan.decode_misses_per_step) == (8, 16, 4.0)
    assert plan.decision.current_cost is not None
    assert plan.decision.predicted_cost is not None
    assert plan.decision.predicted_cost < plan.decision.current_cost


async def test_an_outage_of_the_store_skips_epochs_and_ends(bench: Bench) -> None:
    await bench.store.write_snapshot(wants_experts())
    bench.store.is_available = False
    running = asyncio.create_task(bench.loop.run())
    await asyncio.sleep(0.3)
    assert not running.done()
    assert "wisp_policy_store_outages_total" in bench.metrics.scrape()
    bench.store.is_available = True
    for _ in range(200):
        if await bench.store.read_plan("r1") is not None:
            break
        await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.wait({running})
    assert (await bench.plan()).split.cap == 8
    assert await bench.store.acquire_lease("policy", "another", 1.0), "the lease was given back"


async def test_every_replica_comes_first_in_its_turn(bench: Bench) -> None:
    snapshots = [make_snapshot(replica_id=f"r{i}") for i in range(3)]
    firsts = [next(iter(await bench.epoch(*snapshots))) for _ in range(3)]
    assert sorted(firsts) == ["r0", "r1", "r2"]
