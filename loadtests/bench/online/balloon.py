"""How soon KV blocks leave a pool that is in use: by the balloon, and behind a drained barrier.

Eight sessions a replica send turn after turn, without a pause. A plan is written as the policy service writes them, one
that takes 30 % of the KV pool from one replica and gives their bytes to experts; then another one that gives them back.
The balloon takes blocks while turns run; the drained barrier waits for those that run and sends new ones elsewhere.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from loadtests.bench.online.config import SERVED_NAME, OnlineConfig, service_config
from loadtests.bench.online.drive import Player
from loadtests.bench.online.figures import TurnFigures
from loadtests.bench.online.run import with_policy
from loadtests.rows import Row
from loadtests.traces import Agent, Phase, Workload, generate
from services.app import Service
from services.demo.connected import tenant_clients
from services.preflight import checked_start
from wisp_core.contracts import Barrier, Outcome, ReplicaSnapshot, ResizeOutcome, Split, SplitPlan
from wisp_core.simulator.trace import Trace
from wisp_core.store.interface import Store
from wisp_core.tiny_model.tiny import write_tiny_model

_POLL_S = 0.02
_OUTCOME_TIMEOUT_S = 60.0
_STEADY = Agent(
    first_prompt_tokens=(600, 2000),
    added_tokens=(60, 200),
    output_tokens=(32, 96),
    turns=(8, 24),
    gap_s=(0.01, 0.02),
)


@dataclass(frozen=True, kw_only=True)
class BalloonConfig:
    """The traffic, and what is taken from the pool."""

    name: str = "balloon"
    online: OnlineConfig = field(
        default_factory=lambda: OnlineConfig(policy="static_split", epoch_s=3600.0, link_bytes_per_s=100e6)
    )
    """Service and model; nothing but this benchmark moves the split."""
    sessions: int = 16
    """At once, over both replicas: eight a replica."""
    shrink_fraction: float = 0.3
    balloon_rounds: int = 6
    drained_rounds: int = 4
    settle_s: float = 2.0
    """Between two plans."""
    seed: int = 0


def run_balloon(config: BalloonConfig, directory: Path, say: Callable[[str], None]) -> list[Row]:
    """A row for each plan that shrank the pool."""
    write_tiny_model(directory / "model", config.online.model)
    of_service = service_config(config.online, directory)
    with checked_start(of_service), Service(of_service) as service:
        service.config = with_policy(service, config.online, None)
        service.run_policy()
        return asyncio.run(_Bench(config, service, say).run())


class _Bench:
    def __init__(self, config: BalloonConfig, service: Service, say: Callable[[str], None]) -> None:
        self._config, self._service, self._say = config, service, say
        self._player: Player | None = None
        self._started_s = 0.0

    async def run(self) -> list[Row]:
        """Shrink and grow while the traffic goes on; then add what became of the turns around each shrink."""
        config = self._config
        async with AsyncExitStack() as stack:
            store = self._service.store()
            stack.push_async_callback(store.close)
            service = self._service
            clients = await stack.enter_async_context(
                tenant_clients(service.config, service.url, timeout_s=_OUTCOME_TIMEOUT_S)
            )
            self._player = Player(_traffic(config), clients, SERVED_NAME, config.online.model, label=0)
            self._started_s = time.monotonic()
            playing = asyncio.create_task(self._player.play())
            stack.callback(playing.cancel)
            await _busy(store, config.sessions)
            barriers = [Barrier.BALLOON] * config.balloon_rounds + [Barrier.DRAINED] * config.drained_rounds
            rows = [await self._round(store, barrier) for barrier in barriers]
            await asyncio.sleep(_longest_s(self._player.figures))  # those that ran at the last plan have ended
        return [row | turns_around(row, self._player.figures) for row in rows]

    async def _round(self, store: Store, barrier: Barrier) -> Row:
        before = await _busiest(store)
        target = shrunk(before, self._config.shrink_fraction)
        written_s = time.monotonic() - self._started_s
        outcome, applied_s = await _carry_out(store, before, target, barrier)
        after = next(one for one in await store.list_snapshots() if one.replica_id == before.replica_id)
        row = {
            "barrier": barrier.value,
            "outcome": outcome.outcome.value,
            "kv_blocks_before": outcome.before.kv_blocks,
            "kv_blocks": outcome.after.kv_blocks,
            "written_at_s": written_s,
            "applied_s": applied_s,
            "pause_ms": outcome.pause_ms,
            "bytes_moved": outcome.bytes_moved,
            "running_turns_before": before.kv.running_turns,
            "running_turns_after": after.kv.running_turns,
            "preemptions": after.kv.preemptions - before.kv.preemptions,
        }
        self._say(f"{barrier.value}: {row['outcome']} in {applied_s:.2f} s, {row['running_turns_before']} turns ran")
        await asyncio.sleep(self._config.settle_s)
        grown, _ = await _carry_out(store, after, before.split, Barrier.BALLOON)
        row["is_given_back"] = grown.outcome is Outcome.APPLIED
        await asyncio.sleep(self._config.settle_s)
        return row


async def _carry_out(
    store: Store, replica: ReplicaSnapshot, split: Split, barrier: Barrier
) -> tuple[ResizeOutcome, float]:
    """Write a plan and wait for its outcome; also the seconds in between."""
    last = await store.read_plan(replica.replica_id)
    plan = SplitPlan(
        replica_id=replica.replica_id,
        incarnation=replica.incarnation,
        revision=max(last.revision if last else 0, replica.plan_revision) + 1,
        split=split,
        barrier=barrier,
        policy="bench",
        reason="the benchmark asks for it",
    )
    started_s = time.monotonic()
    await store.write_plan(plan)
    while time.monotonic() - started_s < _OUTCOME_TIMEOUT_S:
        for outcome in await store.list_outcomes(replica.replica_id, 4):
            if outcome.revision == plan.revision:
                return outcome, time.monotonic() - started_s
        await asyncio.sleep(_POLL_S)
    raise TimeoutError(f"plan {plan.revision} for {replica.replica_id} had no outcome in {_OUTCOME_TIMEOUT_S:g} s")


async def _busiest(store: Store) -> ReplicaSnapshot:
    return max(await store.list_snapshots(), key=lambda one: one.kv.running_turns)


async def _busy(store: Store, sessions: int) -> None:
    """Return once most of the sessions have a turn."""
    deadline_s = time.monotonic() + _OUTCOME_TIMEOUT_S
    while sum(one.kv.running_turns for one in await store.list_snapshots()) < sessions * 3 // 4:
        if time.monotonic() > deadline_s:
            raise TimeoutError("the traffic did not begin")
        await asyncio.sleep(0.2)


def shrunk(replica: ReplicaSnapshot, fraction: float) -> Split:
    """The smallest cap beside which at most the rest of the blocks fits, with exactly that rest."""
    layout, kv_blocks = replica.layout, int((1 - fraction) * replica.split.kv_blocks)
    caps = range(replica.split.cap, layout.num_experts + 1)
    within = (cap for cap in caps if layout.pool_bytes(Split(cap=cap, kv_blocks=kv_blocks)) <= replica.budget_bytes)
    return Split(cap=max(within), kv_blocks=kv_blocks)


def _traffic(config: BalloonConfig) -> Trace:
    """Far more turns than will run: the benchmark ends first."""
    phase = Phase(name="steady", agents=((_STEADY, config.sessions, "acme"),))
    workload = Workload(
        name="steady",
        phases=(phase,),
        num_turns=200 * config.sessions,
        max_context_tokens=config.online.max_context_tokens,
        num_topics=config.online.model.topics,
    )
    return generate(workload, seed=config.seed)


def _longest_s(turns: list[TurnFigures]) -> float:
    return max((turn.duration_s for turn in turns), default=0.0)


def turns_around(row: Row, turns: list[TurnFigures]) -> Row:
    """Of the turns that ran when the plan was written: how many, how many failed, and when the last one ended."""
    at_s = row["written_at_s"]
    running = [turn for turn in turns if turn.sent_at_s <= at_s < turn.sent_at_s + turn.duration_s]
    ends_s = [turn.sent_at_s + turn.duration_s - at_s for turn in running]
    return {
        "turns_in_flight": len(running),
        "failed_turns": sum(turn.error is not None for turn in running),
        "longest_running_s": max(ends_s, default=0.0),
    }


def summarize(rows: list[Row]) -> Row:
    """The slowest of each kind, against what it may take."""
    of = {barrier: [row for row in rows if row["barrier"] == barrier.value] for barrier in Barrier}
    return {
        "balloon_applied_s_max": max(row["applied_s"] for row in of[Barrier.BALLOON]),
        "drained_applied_s_max": max(row["applied_s"] for row in of[Barrier.DRAINED]),
        "drained_over_longest_turn_s_max": max(
            row["applied_s"] - row["longest_running_s"] for row in of[Barrier.DRAINED]
        ),
        "not_applied": sum(row["outcome"] != Outcome.APPLIED.value for row in rows),
        "failed_turns": sum(row["failed_turns"] for row in rows),
        "turns_in_flight": sum(row["turns_in_flight"] for row in rows),
    }
