"""The store while Redis refuses, hangs, ends and comes back: few calls pay for it, and nothing is done twice."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest
import uvloop
from store_values import open_redis_store, placement, plan

from wisp_core.errors import StoreUnavailableError
from wisp_core.store import keys as k
from wisp_core.store.redis_store import RedisStore
from wisp_core.tenant_contracts import TurnRecord

if TYPE_CHECKING:
    from valkey_process import ValkeyProcess


async def test_a_wrong_password_is_unavailable(valkey) -> None:
    store = RedisStore(valkey.url, "test", password="wrong", timeout_s=1)
    with pytest.raises(StoreUnavailableError) as caught:
        await store.ping()
    assert "AuthenticationError: invalid username-password pair" in str(caught.value)
    assert valkey.url.partition("//")[2].partition("/")[0] in str(caught.value)
    assert "wrong" not in str(caught.value)
    await store.close()


async def test_a_connection_that_ended_while_idle_is_replaced_before_it_is_used(valkey) -> None:
    store = open_redis_store(valkey)
    await store.ping()
    for _ in range(5):
        valkey.client().client_kill_filter(_type="normal", skipme=True)
        await asyncio.sleep(0.01)
        await store.ping()
    await store.close()


async def test_what_a_server_refuses_is_logged_once_and_in_its_words(valkey, caplog: pytest.LogCaptureFixture) -> None:
    store = open_redis_store(valkey)
    key = k.Keys("test").placement("t/user/secret-session")
    valkey.client().set(key, "no hash")
    for _ in range(3):
        with pytest.raises(StoreUnavailableError):
            await store.read_placements(["t/user/secret-session"])
        await asyncio.sleep(0.6)
    await store.close()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "wisp_core.store.connection"]
    assert "WRONGTYPE Operation against a key holding the wrong kind of value" in line
    assert "secret-session" not in line


async def test_a_server_that_takes_no_writes_does_not_pass_for_one_that_answers(valkey) -> None:
    client, store = valkey.client(), open_redis_store(valkey)
    client.replicaof("127.0.0.1", valkey.port)
    try:
        with pytest.raises(StoreUnavailableError, match="ReadOnlyError"):
            await store.ping()
    finally:
        client.replicaof("NO", "ONE")
    await store.close()


async def test_while_redis_hangs_few_calls_pay_the_timeout(valkey) -> None:
    store = open_redis_store(valkey, timeout_s=0.2)
    await store.ping()
    valkey.pause()
    try:
        began_s, slow_calls = time.monotonic(), 0
        while time.monotonic() - began_s < 3:
            call_began_s = time.monotonic()
            with pytest.raises(StoreUnavailableError):
                await store.place("t/u/s", None, placement("r1", 1))
            slow_calls += time.monotonic() - call_began_s > 0.05
            await asyncio.sleep(0.01)
    finally:
        valkey.resume()
    assert slow_calls <= 4
    await asyncio.sleep(2.1)
    assert (await store.place("t/u/s", None, placement("r1", 1))).replica_id == "r1"
    await store.close()


async def test_a_turn_that_a_slow_server_records_is_recorded_once(valkey) -> None:
    store = open_redis_store(valkey, timeout_s=0.2)
    await store.record_turn(TurnRecord(session_key="t/u/s", replica_id="r1"))
    valkey.pause()
    recording = asyncio.create_task(store.record_turn(TurnRecord(session_key="t/u/s", replica_id="r1")))
    await asyncio.sleep(0.3)
    valkey.resume()
    with pytest.raises(StoreUnavailableError) as caught:
        await recording
    assert caught.value.may_have_run
    with pytest.raises(StoreUnavailableError) as refused:
        await store.list_turns(9)
    assert not refused.value.may_have_run, "the breaker is open"
    await asyncio.sleep(0.6)
    assert len(await store.list_turns(9)) == 2
    await store.close()


async def test_watching_outlives_a_restart_with_empty_data(valkey) -> None:
    store = open_redis_store(valkey)
    watcher = store.watch_plans("r1", period_s=0.2)
    await store.write_plan(plan(1))
    assert (await anext(watcher)).revision == 1
    waiting = asyncio.ensure_future(anext(watcher))
    await asyncio.sleep(0.1)
    valkey.kill()
    await asyncio.sleep(0.5)
    assert not waiting.done()
    valkey.start()
    writer = open_redis_store(valkey)
    assert await writer.write_plan(plan(2))
    assert (await asyncio.wait_for(waiting, 5)).revision == 2
    # An engine that was started again counts from 0, and an empty store no longer knows the last revision.
    valkey.kill()
    valkey.start()
    await asyncio.sleep(0.01)  # The loop has to see that connections have ended.
    again = plan(1).model_copy(update={"incarnation": "later"})
    assert await writer.write_plan(again)
    assert await asyncio.wait_for(anext(watcher), 5) == again
    await watcher.aclose()
    await store.close()
    await writer.close()


def test_whoever_waits_for_plans_outlives_every_end_of_redis(valkey: ValkeyProcess) -> None:
    """In uvloop, as Serve has it: connections that end while they begin raise what is no error of Redis's there."""

    async def follow(store: RedisStore) -> None:
        async for _ in store.watch_plans("r", period_s=0.05):
            pass

    async def kill_again_and_again() -> list[asyncio.Task[None]]:
        ended = []
        for number in range(20):
            store = open_redis_store(valkey)
            tasks = [asyncio.create_task(follow(store)) for _ in range(16)]
            await asyncio.sleep(number * 0.001)
            valkey.kill()
            await asyncio.sleep(0.1)
            valkey.start()
            ended += [task for task in tasks if task.done()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await store.close()
        return ended

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(kill_again_and_again()) == []
