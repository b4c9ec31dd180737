"""Limits of a tenant: 429 with a Retry-After that is right, refunds, and what holds without the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from services.ingress import limits
from services.ingress.errors import ApiError
from services.ingress.limits import PromptEstimator, TurnLimiter
from services.ingress.request_fields import COMPLETIONS_PATH, parse
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.interface import Admission, TurnRequest
from wisp_core.store.memory_store import MemoryStore
from wisp_core.tenant_contracts import TenantSpec

TENANT = TenantSpec(tenant_id="a", key_sha256=(), requests_per_minute=4, tokens_per_minute=600, max_concurrent_turns=2)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", clock)
    return clock


async def refusal(limiter: TurnLimiter, turn_id: str, tokens: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await limiter.admit(TENANT, turn_id, tokens)
    assert caught.value.status == 429
    assert caught.value.error["code"] == "rate_limit_exceeded"
    return caught.value


async def test_whoever_waits_as_told_is_admitted(clock: Clock) -> None:
    limiter = TurnLimiter(MemoryStore())
    for i in range(4):
        await limiter.admit(TENANT, f"t{i}", 1)
        await limiter.settle(f"t{i}", 1)
    error = await refusal(limiter, "t4", 1)
    assert error.headers["retry-after"] == "15"
    assert error.error["type"] == "requests"
    clock.now_s += 15
    await limiter.admit(TENANT, "t4", 1)


async def test_tokens_taken_but_not_used_come_back(clock: Clock) -> None:
    limiter = TurnLimiter(MemoryStore())
    await limiter.admit(TENANT, "t0", 600)
    error = await refusal(limiter, "t1", 100)
    assert (error.error["type"], error.headers["retry-after"]) == ("tokens", "10")
    await limiter.settle("t0", 450)
    await limiter.admit(TENANT, "t1", 150)
    await refusal(limiter, "t2", 1)


async def test_more_tokens_than_a_minute_holds_can_never_pass(clock: Clock) -> None:
    error = await refusal(TurnLimiter(MemoryStore()), "t0", 601)
    assert "retry-after" not in error.headers
    assert "too large" in error.error["message"]


async def test_turns_at_once(clock: Clock) -> None:
    limiter = TurnLimiter(MemoryStore())
    await limiter.admit(TENANT, "t0", 1)
    await limiter.admit(TENANT, "t1", 1)
    error = await refusal(limiter, "t2", 1)
    assert error.headers["retry-after"] == "1"
    await limiter.settle("t0", 1)
    await limiter.admit(TENANT, "t2", 1)


async def test_what_a_turn_used_beyond_its_reservation_is_owed_however_late_it_ends(clock: Clock) -> None:
    limiter = TurnLimiter(MemoryStore())
    await limiter.admit(TENANT, "t0", 10)
    clock.now_s += 50
    await limiter.settle("t0", 910)
    assert (await refusal(limiter, "t1", 1)).headers["retry-after"] == "31"


async def test_limits_hold_in_this_process_while_the_store_is_away(clock: Clock) -> None:
    store = MemoryStore()
    limiter = TurnLimiter(store)
    store.is_available = False
    await limiter.admit(TENANT, "t0", 300)
    await limiter.admit(TENANT, "t1", 300)
    await refusal(limiter, "t2", 1)
    await limiter.settle("t0", 300)
    await refusal(limiter, "t2", 1)
    store.is_available = True
    await limiter.settle("t1", 300)
    await limiter.admit(TENANT, "t3", 600)


async def test_turns_admitted_without_the_store_stay_counted_while_it_is_away(clock: Clock) -> None:
    store = MemoryStore()
    limiter = TurnLimiter(store)
    await limiter.admit(TENANT, "before", 1)
    store.is_available = False
    await limiter.admit(TENANT, "t0", 1)
    await limiter.admit(TENANT, "t1", 1)
    for _ in range(3):
        clock.now_s += 30
        await limiter.renew()
    assert (await refusal(limiter, "t2", 1)).error["message"].startswith("Rate limit reached on concurrent turns")


@pytest.fixture
async def keeping(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[TurnLimiter], None]]:
    """Starts a limiter's own task, which waits for less than it usually does to settle, and does not come to renew."""
    monkeypatch.setattr(limits, "SETTLE_RETRY_S", 0.01)
    tasks = list[asyncio.Task[None]]()
    yield lambda limiter: tasks.append(asyncio.create_task(limiter.renew_forever()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_turn_that_ends_while_the_store_is_away_is_settled_as_soon_as_it_is_back(
    clock: Clock, keeping: Callable[[TurnLimiter], None]
) -> None:
    store = MemoryStore()
    limiter, other_ingress = TurnLimiter(store), TurnLimiter(store)
    keeping(limiter)
    for turn_id in ("t0", "t1"):
        await limiter.admit(TENANT, turn_id, 300)
    store.is_available = False
    await limiter.settle("t0", 0)
    await asyncio.sleep(0.05)
    store.is_available = True
    await asyncio.sleep(0.2)
    await other_ingress.admit(TENANT, "t2", 300)
    assert set(store._turns["a"]) == {"t1", "t2"}


async def test_an_admission_does_not_wait_for_that(clock: Clock) -> None:
    store = MemoryStore()
    limiter = TurnLimiter(store)
    for turn_id in ("t0", "t1"):
        await limiter.admit(TENANT, turn_id, 300)
    store.is_available = False
    await limiter.settle("t0", 0)
    store.is_available = True
    await limiter.admit(TENANT, "t2", 300)


async def test_a_lease_that_has_ended_need_not_be_settled(clock: Clock, keeping: Callable[[TurnLimiter], None]) -> None:
    store = MemoryStore()
    limiter = TurnLimiter(store)
    keeping(limiter)
    for turn_id in ("t0", "t1"):
        await limiter.admit(TENANT, turn_id, 300)
    store.is_available = False
    for turn_id in ("t0", "t1"):
        await limiter.settle(turn_id, 0)
    clock.now_s += 60
    await asyncio.sleep(0.2)
    assert not limiter._ended


async def test_a_turn_whose_admission_was_not_answered_is_settled_wherever_it_may_be_counted(clock: Clock) -> None:
    class SlowStore(MemoryStore):
        async def admit(self, turn: TurnRequest, now_s: float) -> Admission:
            await super().admit(turn, now_s)
            raise StoreUnavailableError("no reply in time", may_have_run=True)

    store = SlowStore()
    limiter = TurnLimiter(store)
    await limiter.admit(TENANT, "t0", 300)
    assert len(store._turns["a"]) == len(limiter._fallback._turns["a"]) == 1
    await limiter.settle("t0", 0)
    await limiter.admit(TENANT, "t1", 600)
    error = await refusal(limiter, "t2", 1)
    assert error.error["type"] == "tokens", "by this process's count"
    assert set(store._turns["a"]) == {"t1"}, "whoever is refused holds no place anywhere"
    assert not limiter._ended


def test_prompt_estimates_follow_what_the_engine_counts() -> None:
    estimator = PromptEstimator()
    text = parse(COMPLETIONS_PATH, b'{"model": "m", "prompt": "' + b"x" * 300 + b'"}')
    assert estimator.tokens("a", text) == 100
    for _ in range(200):
        estimator.learn("a", text, 60)
    assert estimator.tokens("a", text) == pytest.approx(60, abs=1)
    assert estimator.tokens("b", text) == 100, "another tenant's prompts change nothing"
    ids = parse(COMPLETIONS_PATH, b'{"model": "m", "prompt": [1, 2, 3]}')
    assert estimator.tokens("a", ids) == 3


async def test_a_turn_that_has_ended_refuses_nobody_while_it_waits_to_be_settled(clock: Clock) -> None:
    store = MemoryStore()
    limiter = TurnLimiter(store)
    await limiter.admit(TENANT, "t0", 300)
    await limiter.admit(TENANT, "t1", 300)
    settling = asyncio.create_task(limiter.settle("t0", 100, delay_s=60.0))
    await asyncio.sleep(0)
    # Neither its place nor what it did not use.
    await limiter.admit(TENANT, "t2", 200)
    assert (await refusal(limiter, "t3", 1)).error["message"].startswith("Rate limit")
    settling.cancel()
    await asyncio.gather(settling, return_exceptions=True)
    await limiter.settle("t1", 300)
    await limiter.settle("t2", 200)
    assert not limiter._running
    assert not limiter._ended


async def test_a_refused_client_that_leaves_does_not_undo_the_end_of_another_s_turn(clock: Clock) -> None:
    class SlowStore(MemoryStore):
        asked, may_go_on = asyncio.Event(), asyncio.Event()

        async def settle(self, turn: TurnRequest, used_tokens: int, now_s: float) -> None:
            self.asked.set()
            await self.may_go_on.wait()
            await super().settle(turn, used_tokens, now_s)

    store = SlowStore()
    limiter = TurnLimiter(store)
    await limiter.admit(TENANT, "t0", 600)
    ending = asyncio.create_task(limiter.settle("t0", 0, delay_s=0.05))
    await asyncio.sleep(0)
    refused = asyncio.create_task(limiter.admit(TENANT, "t1", 100))
    await store.asked.wait()
    refused.cancel()
    await asyncio.gather(refused, return_exceptions=True)
    store.may_go_on.set()
    await ending
    await limiter.admit(TENANT, "t2", 600)


@pytest.mark.parametrize(("tokens", "num_choices"), [(300, 1), (601, 1), (1, 2), (1, 3)])
async def test_a_turn_that_is_refused_takes_one_request(clock: Clock, tokens: int, num_choices: int) -> None:
    limiter = TurnLimiter(MemoryStore())
    await limiter.admit(TENANT, "t0", 400)
    for number in range(3):
        with pytest.raises(ApiError) as caught:
            await limiter.admit(TENANT, f"r{number}", tokens, num_choices=num_choices)
        assert "requests per min" not in caught.value.error["message"]
    error = await refusal(limiter, "r", 1)
    assert error.error["message"].startswith("Rate limit reached on requests per min")
    assert error.headers["retry-after"] == "15"


async def test_a_turn_that_asks_twice_since_another_has_just_ended_takes_one_request(clock: Clock) -> None:
    limiter = TurnLimiter(MemoryStore())
    await limiter.admit(TENANT, "t0", 600)
    ending = asyncio.create_task(limiter.settle("t0", 600, delay_s=60.0))
    await asyncio.sleep(0)
    await refusal(limiter, "r", 1)
    ending.cancel()
    await asyncio.gather(ending, return_exceptions=True)
    for _ in range(2):
        await limiter.charge(TENANT)
    with pytest.raises(ApiError, match="requests per min"):
        await limiter.charge(TENANT)
