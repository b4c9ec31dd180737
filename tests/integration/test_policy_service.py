"""The policy service against real Valkey, and as a deployment on real Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from services.background import end_tasks
from services.config import DampingSettings, PolicySettings, ServiceConfig
from services.policy.loop import Action, PolicyLoop
from services.policy.metrics import PolicyMetrics
from services.policy.runner import PolicyRunner
from services.store_address import StoreAddress
from wisp_core.contracts import KvDemand, MemoryLayout, PagerCounts, ReplicaSnapshot, ReuseBin, Split, SplitPlan
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.redis_store import RedisStore

if TYPE_CHECKING:
    from valkey_process import ValkeyProcess

SERVICE = "wisp-policy-test"
PAGE = 4096
LAYOUT = MemoryLayout(
    page_bytes=PAGE,
    num_layers=4,
    num_experts=16,
    top_k=2,
    min_cap=2,
    experts_bytes_by_cap=tuple(cap * 4 * PAGE for cap in range(17)),
    expert_bytes=PAGE,
    block_tokens=16,
    block_bytes=PAGE,
    kv_group_blocks=1,
    max_kv_blocks=63,
    max_model_len=256,
    max_num_seqs=8,
)
START = Split(cap=8, kv_blocks=39)


def snapshot(phase: str, split: Split = START, revision: int = 0, replica_id: str = "r1") -> ReplicaSnapshot:
    """A replica in a phase of ``bursts`` (misses cost, KV is idle) or ``long`` turns (prefixes need 56 blocks)."""
    misses = tuple(4.0 * (16 - cap) if phase == "bursts" else 8.0 / (cap + 1) for cap in range(17))
    reuse = (ReuseBin(blocks=56, turns_per_s=2.0, tokens_per_s=900.0),) if phase == "long" else ()
    return ReplicaSnapshot(
        replica_id=replica_id,
        incarnation="i1",
        model="tiny",
        layout=LAYOUT,
        split=split,
        plan_revision=revision,
        budget_bytes=72 * PAGE,
        window_s=10.0,
        decode=PagerCounts(steps=100, tokens=200, distinct=1200, seconds=2.0, link_seconds=1.0),
        prefill=PagerCounts(steps=10, tokens=1000, seconds=2.0, link_seconds=1.0),
        decode_steps_per_s=20.0,
        prefill_steps_per_s=4.0,
        prefill_tokens_per_s=1000.0,
        decode_misses_by_cap=misses,
        prefill_misses_by_cap=misses,
        link_bytes_per_s=4e6,
        kv=KvDemand(mean_turns=2.0, demand_blocks=16, floor_blocks=16, reuse=reuse),
    )


@asynccontextmanager
async def open_store(valkey: ValkeyProcess) -> AsyncIterator[RedisStore]:
    store = RedisStore(valkey.url, SERVICE, password=valkey.password)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def running_loop(valkey: ValkeyProcess, epoch_s: float = 0.1) -> AsyncIterator[asyncio.Task[None]]:
    """A policy loop with a runner and a store of its own, as in a process of its own."""
    settings = PolicySettings(epoch_s=epoch_s, deadline_s=10.0, damping=DampingSettings(confirmations=2))
    metrics = PolicyMetrics()
    runner = PolicyRunner(settings, metrics)
    await runner.start()
    async with open_store(valkey) as store:
        task = asyncio.create_task(PolicyLoop(store, runner, metrics, settings, stale_after_s=5.0).run())
        try:
            yield task
        finally:
            await end_tasks([task])
            await runner.close()


async def follow(store: RedisStore, phase: str, split: Split, revision: int, *, timeout_s: float = 20.0) -> SplitPlan:
    """Report a replica in ``phase`` until a plan above ``revision`` comes; wait out outages of the store."""
    until_s = time.monotonic() + timeout_s
    while time.monotonic() < until_s:
        try:
            await store.write_snapshot(snapshot(phase, split, revision))
            plan = await store.read_plan("r1")
        except StoreUnavailableError:
            plan = None
        if plan is not None and plan.revision > revision:
            return plan
        await asyncio.sleep(0.05)
    raise AssertionError(f"no plan above revision {revision} within {timeout_s} s")


async def test_the_split_follows_the_phases_through_valkey(valkey: ValkeyProcess) -> None:
    async with running_loop(valkey), open_store(valkey) as store:
        up = await follow(store, "bursts", START, 0)
        assert up.split == Split(cap=13, kv_blocks=19), "all that κ_min leaves"
        down = await follow(store, "long", up.split, up.revision)
        assert down.split == Split(cap=3, kv_blocks=59), "the prefixes just fit"
        again = await follow(store, "bursts", down.split, down.revision)
        assert again.split == up.split
        assert [up.revision, down.revision, again.revision] == [1, 2, 3]
        records = [r for r in await store.list_decisions("r1", 50) if r.plan_revision is not None]
        assert [r.plan_revision for r in records] == [3, 2, 1]
        assert all(r.decision.marginals is not None for r in records)


async def test_two_loops_share_one_lease_and_a_second_takes_over(valkey: ValkeyProcess) -> None:
    async with open_store(valkey) as store:
        async with running_loop(valkey):
            plan = await follow(store, "bursts", START, 0)
            settings = PolicySettings(epoch_s=0.1)
            metrics = PolicyMetrics()
            runner = PolicyRunner(settings, metrics)
            await runner.start()
            other = PolicyLoop(store, runner, metrics, settings, stale_after_s=5.0)
            assert await other.run_epoch() == {}
        await store.write_snapshot(snapshot("long", plan.split, plan.revision))
        assert await other.run_epoch() == {"r1": Action.HOLD}
        assert await other.run_epoch() == {"r1": Action.PLAN}
        await runner.close()


async def test_an_outage_of_valkey_ends_in_plans_with_growing_revisions(valkey: ValkeyProcess) -> None:
    async with running_loop(valkey) as task, open_store(valkey) as store:
        plan = await follow(store, "bursts", START, 0)
        valkey.kill()
        await asyncio.sleep(1.0)
        assert not task.done()
        valkey.start()  # empty: plans and lease are lost, the replica still knows its revision
        assert (await follow(store, "long", plan.split, plan.revision)).revision == plan.revision + 1


class Deployed:
    """A policy service on Ray Serve and what can be seen of it from outside."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def scrape(self) -> str:
        _, page = self.handle.scrape.remote().result(timeout_s=20)
        return str(page)

    def policy_process(self, but_not: int = 0) -> psutil.Process:
        """The process in which the policy runs, once there is one other than ``but_not``."""
        until_s = time.monotonic() + 40
        while time.monotonic() < until_s:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "services.policy.child" not in process.cmdline() or process.pid == but_not:
                        continue
                    # Other tests' services have policies, too.
                    if f":{SERVICE}:" in psutil.Process(process.ppid()).cmdline()[0]:
                        return process
            time.sleep(0.1)
        raise AssertionError("no policy process came up")


@pytest.fixture
def deployed(ray_serve: None, valkey: ValkeyProcess, tmp_path: Path) -> Iterator[Deployed]:
    """The default policy, deployed with epochs of 0.1 s."""
    from ray import serve

    from services.policy.deployment import build_policy_service

    config = ServiceConfig.model_validate(
        {
            "name": SERVICE,
            "model": {"path": str(tmp_path)},
            "replica": {"vram_budget_bytes": 1 << 30},
            "policy": {"epoch_s": 0.1, "deadline_s": 10.0},
            "tenants": [{"tenant_id": "t", "key_sha256": "0" * 64}],
        }
    )
    password_file = tmp_path / "redis.key"
    password_file.write_text(valkey.password)
    address = StoreAddress(url=valkey.url, password_file=password_file, service=SERVICE)
    application = build_policy_service(config, address)
    yield Deployed(serve.run(application, name=SERVICE, route_prefix=None))
    serve.delete(SERVICE)


async def test_the_deployment_plans_survives_kills_and_leaves_no_process(
    deployed: Deployed, valkey: ValkeyProcess
) -> None:
    async with open_store(valkey) as store:
        plan = await follow(store, "bursts", START, 0)
        assert plan.policy == "mv_wsa"
        assert 'wisp_policy_decisions_total{action="plan"} 1.0' in await asyncio.to_thread(deployed.scrape)

        policy = await asyncio.to_thread(deployed.policy_process)
        policy.kill()
        plan = await follow(store, "long", plan.split, plan.revision)
        assert "wisp_policy_restarts_total 1.0" in await asyncio.to_thread(deployed.scrape)

        policy = await asyncio.to_thread(deployed.policy_process)
        os.kill(policy.ppid(), signal.SIGKILL)  # the Serve replica; its policy must end with it
        await asyncio.to_thread(policy.wait, 10)
        plan = await follow(store, "bursts", plan.split, plan.revision, timeout_s=40)
        assert plan.revision == 3

        last = await asyncio.to_thread(deployed.policy_process, policy.pid)
        from ray import serve

        await asyncio.to_thread(serve.delete, SERVICE)
        await asyncio.to_thread(last.wait, 10)
