"""The control loop: each epoch, snapshots in, revisioned plans out. Everything it must remember is in the store."""

from __future__ import annotations

import asyncio
import logging
import time
from enum import StrEnum
from uuid import uuid4

from services.config import PolicySettings
from services.policy.metrics import PolicyMetrics
from services.policy.placed import with_placed_sessions
from services.policy.runner import PolicyRunner
from wisp_core.allocation.floor import floor_blocks
from wisp_core.contracts import Barrier, Decision, DecisionRecord, Outcome, ReplicaSnapshot, ResizeOutcome, SplitPlan
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.interface import Store

logger = logging.getLogger(__name__)

LEASE = "policy"
MIN_LEASE_S = 2.0
FAILED_RETRY_S = 30.0
"""A split whose resize failed is not asked for again before this."""
DRAIN_RETRY_S = 150.0
"""After a drain that ended for nothing, no other begins before this: turns longer than ``drain_timeout_s`` would
otherwise keep the replica from taking new ones all the time."""
DEFERRED_RETRY_S = 5.0
"""Where running turns left no KV for even one slot more, none is asked for before this: asking holds the engine for a
moment, and it takes some turns to end."""
PENDING_S = 60.0
"""A plan that a replica neither handled nor is handling for this long was dropped; the next revision replaces it."""


class Action(StrEnum):
    """What became of one replica in one epoch; also the metric's label."""

    PLAN = "plan"
    HOLD = "hold"
    FAULT = "fault"
    STALE = "stale"
    PENDING = "pending"
    FENCED = "fenced"


class PolicyLoop:
    """Decides for every replica that reports, while it holds the lease: two loops during a hand-over never both do."""

    def __init__(
        self,
        store: Store,
        runner: PolicyRunner,
        metrics: PolicyMetrics,
        settings: PolicySettings,
        *,
        stale_after_s: float,
        barrier: Barrier = Barrier.BALLOON,
    ) -> None:
        """``stale_after_s`` is the age at which a snapshot counts as missing; ``barrier`` goes into every plan."""
        self._store = store
        self._runner = runner
        self._metrics = metrics
        self._settings = settings
        self._stale_after_s = stale_after_s
        self._barrier = barrier
        self._holder = uuid4().hex
        self._holding: set[str] = set()  # replicas whose last logged decision is a hold
        self._epoch = 0

    async def run(self) -> None:
        """Run epochs until cancelled; the lease is given back then. An outage of the store skips epochs."""
        try:
            while True:
                started_s = time.monotonic()
                await self._run_one_epoch()
                await asyncio.sleep(max(0.0, self._settings.epoch_s - (time.monotonic() - started_s)))
        finally:
            await self._release_lease()

    async def run_epoch(self) -> dict[str, Action]:
        """Decide once for every replica; empty without the lease. Raises StoreUnavailableError."""
        if not await self._store.acquire_lease(LEASE, self._holder, self._lease_s):
            return {}
        self._epoch += 1
        actions: dict[str, Action] = {}
        snapshots = await with_placed_sessions(self._store, await self._store.list_snapshots())
        for snapshot in self._in_turn(snapshots):
            # Renewed for each replica: a policy that hangs may take a deadline for every one of them.
            if not await self._store.acquire_lease(LEASE, self._holder, self._lease_s):
                break
            actions[snapshot.replica_id] = await self._handle(snapshot)
            self._metrics.count_action(actions[snapshot.replica_id])
        self._holding &= actions.keys()
        return actions

    @property
    def _lease_s(self) -> float:
        return max(MIN_LEASE_S, 3 * max(self._settings.epoch_s, self._settings.deadline_s))

    async def _run_one_epoch(self) -> None:
        try:
            await self.run_epoch()
        except StoreUnavailableError:  # Plans stay as they are. The store's client has logged why.
            self._metrics.count_outage()

    def _in_turn(self, snapshots: list[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
        """Another replica first each epoch, so that one on which the policy hangs does not starve the others."""
        if not snapshots:
            return []
        first = self._epoch % len(snapshots)
        return snapshots[first:] + snapshots[:first]

    async def _handle(self, snapshot: ReplicaSnapshot) -> Action:
        if not snapshot.is_healthy or snapshot.is_stale(time.time(), self._stale_after_s):
            return Action.STALE
        plan = await self._store.read_plan(snapshot.replica_id)
        outcome = await self._last_outcome(snapshot.replica_id)
        if snapshot.is_resizing or _is_pending(snapshot, plan):
            return Action.PENDING
        decision = await self._runner.decide(snapshot)
        if decision is None:
            return Action.FAULT
        if decision.split == snapshot.split or _failed_lately(snapshot, decision, plan, outcome):
            await self._record_hold(snapshot, decision)
            return Action.HOLD
        return await self._write_plan(snapshot, plan, decision)

    async def _write_plan(self, snapshot: ReplicaSnapshot, last: SplitPlan | None, decision: Decision) -> Action:
        """Write the next revision, above what the store and the replica know, also after either lost its memory."""
        plan = SplitPlan(
            replica_id=snapshot.replica_id,
            incarnation=snapshot.incarnation,
            revision=max(last.revision if last else 0, snapshot.plan_revision) + 1,
            split=decision.split,
            barrier=self._barrier,
            policy=self._settings.name,
            reason=decision.reason,
            marginals=decision.marginals,
        )
        if not await self._store.write_plan(plan):
            return Action.FENCED
        self._holding.discard(snapshot.replica_id)
        await self._store.append_decision(self._record(snapshot, decision, plan.revision))
        return Action.PLAN

    async def _record_hold(self, snapshot: ReplicaSnapshot, decision: Decision) -> None:
        """Log the first hold after a plan; the log has room for plans, not for every quiet epoch."""
        if snapshot.replica_id in self._holding:
            return
        self._holding.add(snapshot.replica_id)
        await self._store.append_decision(self._record(snapshot, decision, None))

    def _record(self, snapshot: ReplicaSnapshot, decision: Decision, plan_revision: int | None) -> DecisionRecord:
        misses, cap = snapshot.decode_misses_by_cap, snapshot.split.cap
        return DecisionRecord(
            replica_id=snapshot.replica_id,
            policy=self._settings.name,
            before=snapshot.split,
            budget_bytes=snapshot.budget_bytes,
            floor_blocks=floor_blocks(snapshot),
            demand_blocks=snapshot.kv.demand_blocks,
            mean_turns=snapshot.kv.mean_turns,
            decode_steps_per_s=snapshot.decode_steps_per_s,
            prefill_steps_per_s=snapshot.prefill_steps_per_s,
            decode_misses_per_step=misses[cap] if cap < len(misses) else 0.0,
            decision=decision,
            plan_revision=plan_revision,
        )

    async def _last_outcome(self, replica_id: str) -> ResizeOutcome | None:
        outcomes = await self._store.list_outcomes(replica_id, 1)
        return outcomes[0] if outcomes else None

    async def _release_lease(self) -> None:
        try:
            await self._store.release_lease(LEASE, self._holder)
        except StoreUnavailableError:
            logger.info("Lease not released, it ends by itself: the store is unavailable")


def _is_pending(snapshot: ReplicaSnapshot, plan: SplitPlan | None) -> bool:
    """Whether this engine was given a plan that it has not handled yet."""
    if plan is None or plan.incarnation != snapshot.incarnation or plan.revision <= snapshot.plan_revision:
        return False
    return time.time() - plan.at_s < PENDING_S


def _failed_lately(
    snapshot: ReplicaSnapshot, decision: Decision, plan: SplitPlan | None, outcome: ResizeOutcome | None
) -> bool:
    """Whether this engine's last plan failed a moment ago and would fail again."""
    if plan is None or outcome is None or outcome.revision != plan.revision or plan.incarnation != snapshot.incarnation:
        return False
    age_s = time.time() - outcome.at_s
    if outcome.outcome is Outcome.DEFERRED:
        if plan.barrier is Barrier.DRAINED:
            return age_s < DRAIN_RETRY_S  # whatever the split
        return decision.split.cap > snapshot.split.cap and age_s < DEFERRED_RETRY_S
    return outcome.outcome is Outcome.FAILED and plan.split == decision.split and age_s < FAILED_RETRY_S
