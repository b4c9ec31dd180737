"""Routers learn at once that a replica drains, and that it is done."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from policy_snapshots import make_snapshot

from services.replica.metrics import ReplicaMetrics
from services.replica.reporter import Reporter
from services.replica.resizing import PlanFollower
from services.replica.state import ReplicaState
from wisp_core.contracts import Barrier, Outcome, ReplicaSnapshot, ResizeOutcome, Signature, Split, SplitPlan
from wisp_core.store.memory_store import MemoryStore

LONG_S = 60.0


class DrainingEngine:
    """Drains until it is told that its turns have ended."""

    is_dead = False

    def __init__(self) -> None:
        self.turns_ended = asyncio.Event()
        self.is_draining = False

    async def resize(self, plan: SplitPlan) -> ResizeOutcome:
        self.is_draining = plan.barrier is Barrier.DRAINED
        if self.is_draining:
            await self.turns_ended.wait()
        self.is_draining = False
        return ResizeOutcome(
            replica_id="r1",
            revision=plan.revision,
            outcome=Outcome.APPLIED,
            reason="test",
            before=Split(cap=4, kv_blocks=103),
            after=plan.split,
        )

    async def snapshot(self) -> ReplicaSnapshot:
        return make_snapshot(is_draining=self.is_draining)

    async def signatures(self) -> list[Signature]:
        return []

    async def expect(self, signatures: list[Signature]) -> None:
        pass


async def reported(store: MemoryStore, is_draining: bool) -> bool:
    """Whether a snapshot says so within a second."""
    for _ in range(100):
        if any(one.is_draining == is_draining for one in await store.list_snapshots()):
            return True
        await asyncio.sleep(0.01)
    return False


async def test_a_drain_is_published_when_it_begins_and_when_it_ends() -> None:
    store, engine, metrics = MemoryStore(), DrainingEngine(), ReplicaMetrics()
    state = ReplicaState(replica_id="r1", engine=cast(Any, engine), store=store, metrics=metrics)
    tasks = [asyncio.create_task(Reporter(state, LONG_S).run()), asyncio.create_task(PlanFollower(state).run())]
    try:
        assert await reported(store, is_draining=False)
        plan = SplitPlan(
            replica_id="r1",
            incarnation="i1",
            revision=1,
            split=Split(cap=8, kv_blocks=39),
            barrier=Barrier.DRAINED,
            policy="test",
            reason="test",
        )
        await store.write_plan(plan)
        assert await reported(store, is_draining=True), "long before the next report is due"
        engine.turns_ended.set()
        assert await reported(store, is_draining=False)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        metrics.close()
