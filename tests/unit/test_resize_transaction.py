"""A resize as a transaction: order, outcomes, idempotence, and roll-back from every point of failure."""

from __future__ import annotations

import asyncio

import pytest
from resize_fake_engine import LAYOUT, PAGE, FakeEngine

from wisp_core.contracts import Barrier, Outcome, ResizeOutcome, Split, SplitPlan
from wisp_core.engine.reports import TakeReport
from wisp_core.engine.resizer import Resizer
from wisp_core.errors import CapacityError, EngineUnavailableError

START = Split(cap=4, kv_blocks=23)  # 16 + 24 pages: the whole budget
TO_EXPERTS = Split(cap=6, kv_blocks=15)
TO_KV = Split(cap=2, kv_blocks=31)
LESS = Split(cap=3, kv_blocks=15)


async def started() -> tuple[FakeEngine, Resizer]:
    engine = FakeEngine()
    resizer = Resizer(engine, engine.facts(), replica_id="r", incarnation="i", drain_timeout_s=0.1)
    await resizer.start(START)
    engine.log.clear()
    return engine, resizer


def plan(split: Split, revision: int = 1, incarnation: str = "i", barrier: Barrier = Barrier.BALLOON) -> SplitPlan:
    return SplitPlan(
        replica_id="r",
        incarnation=incarnation,
        revision=revision,
        split=split,
        barrier=barrier,
        policy="test",
        reason="because",
    )


async def test_a_fresh_engine_gets_its_first_split() -> None:
    engine, resizer = await started()
    assert resizer.split == START
    assert (engine.cap, engine.usable_blocks, engine.arena.free_bytes) == (4, 23, 0)
    await engine.check_integrity()


async def test_a_first_split_below_the_floor_is_refused() -> None:
    engine = FakeEngine()
    resizer = Resizer(engine, engine.facts(), replica_id="r", incarnation="i", drain_timeout_s=0.1)
    with pytest.raises(CapacityError, match="κ_min"):
        await resizer.start(Split(cap=4, kv_blocks=3))


@pytest.mark.parametrize(
    ("target", "commands"),
    [
        (TO_EXPERTS, ["take", "unmap", "set_cap"]),
        (TO_KV, ["set_cap", "map", "give"]),
        (LESS, ["take", "unmap", "set_cap"]),
    ],
)
async def test_the_giver_goes_first(target: Split, commands: list[str]) -> None:
    engine, resizer = await started()
    outcome = await resizer.resize(plan(target))
    assert (outcome.outcome, outcome.before, outcome.after) == (Outcome.APPLIED, START, target)
    assert engine.log == commands
    assert (engine.num_holds, engine.is_held) == (1, False)
    assert resizer.split == target
    await engine.check_integrity()


async def test_an_applied_outcome_reports_what_moved() -> None:
    _, resizer = await started()
    outcome = await resizer.resize(plan(TO_EXPERTS))
    assert outcome.bytes_moved == 8 * PAGE
    assert 0 < outcome.pause_ms < 1e3
    assert (outcome.policy, outcome.plan_reason) == ("test", "because")


@pytest.mark.parametrize("barrier", list(Barrier))
async def test_a_hold_touches_nothing(barrier: Barrier) -> None:
    engine, resizer = await started()
    before = engine.state()
    outcome = await resizer.resize(plan(START, barrier=barrier))
    assert (outcome.outcome, outcome.bytes_moved, outcome.pause_ms) == (Outcome.APPLIED, 0, 0)
    assert outcome.reason.startswith("hold")
    assert (engine.log, engine.state()) == ([], before)


@pytest.mark.parametrize(
    ("target", "command", "undone"),
    [
        (TO_EXPERTS, "take", "nothing was changed"),
        (TO_EXPERTS, "unmap", "rolled back"),
        (TO_EXPERTS, "set_cap", "rolled back"),
        (TO_KV, "set_cap", "nothing was changed"),
        (TO_KV, "map", "rolled back"),
        (TO_KV, "give", "rolled back"),
    ],
)
async def test_every_point_of_failure_is_rolled_back(target: Split, command: str, undone: str) -> None:
    engine, resizer = await started()
    before = engine.state()
    engine.fail_at = [command]
    outcome = await resizer.resize(plan(target))
    assert (outcome.outcome, outcome.before, outcome.after) == (Outcome.FAILED, START, START)
    assert f"{command}: broken on purpose" in outcome.reason
    assert undone in outcome.reason
    assert engine.state() == before
    await engine.check_integrity()
    assert (await resizer.resize(plan(target, revision=2))).outcome is Outcome.APPLIED


async def test_a_failed_roll_back_loses_blocks_until_the_next_resize_finds_them() -> None:
    engine, resizer = await started()
    engine.fail_at = ["unmap", "give"]
    outcome = await resizer.resize(plan(TO_EXPERTS))
    assert outcome.outcome is Outcome.FAILED
    assert "the next resize reconciles" in outcome.reason
    assert outcome.after == Split(cap=4, kv_blocks=15)
    await engine.check_integrity()
    assert (await resizer.resize(plan(START, revision=2))).after == START
    assert engine.usable_blocks == 23


async def test_an_engine_that_dies_is_a_failure() -> None:
    engine, resizer = await started()
    engine.error = EngineUnavailableError
    engine.fail_at = ["unmap"]
    outcome = await resizer.resize(plan(TO_EXPERTS))
    assert (outcome.outcome, outcome.reason) == (Outcome.FAILED, "unmap: broken on purpose")


async def test_blocks_without_pages_are_reported_not_touched() -> None:
    engine, resizer = await started()
    engine.arena.remove_kv_groups([3])
    outcome = await resizer.resize(plan(TO_EXPERTS))
    assert outcome.outcome is Outcome.FAILED
    assert "without pages: [3]" in outcome.reason
    assert engine.log == []


async def test_the_same_revision_is_answered_again_without_effect() -> None:
    engine, resizer = await started()
    first = await resizer.resize(plan(TO_EXPERTS))
    engine.log.clear()
    assert await resizer.resize(plan(TO_EXPERTS)) == first
    assert (engine.log, resizer.plan_revision) == ([], 1)


async def test_older_revisions_and_other_incarnations_are_stale() -> None:
    engine, resizer = await started()
    await resizer.resize(plan(TO_EXPERTS, revision=5))
    engine.log.clear()
    old = await resizer.resize(plan(TO_KV, revision=4))
    other = await resizer.resize(plan(TO_KV, revision=9, incarnation="before"))
    assert (old.outcome, other.outcome) == (Outcome.STALE, Outcome.STALE)
    assert "revision 4 is older than 5" in old.reason
    assert "incarnation before" in other.reason
    assert (engine.log, resizer.plan_revision) == ([], 5)


async def test_a_second_resize_at_once_is_a_conflict() -> None:
    engine, resizer = await started()
    gate, entered = asyncio.Event(), asyncio.Event()
    set_cap = engine.set_cap

    async def slow_set_cap(cap: int) -> None:
        entered.set()
        await gate.wait()
        await set_cap(cap)

    engine.set_cap = slow_set_cap  # type: ignore[method-assign]
    first = asyncio.create_task(resizer.resize(plan(TO_EXPERTS, revision=1)))
    await entered.wait()
    assert resizer.is_resizing
    second = await resizer.resize(plan(TO_KV, revision=2))
    assert (second.outcome, second.reason) == (Outcome.CONFLICT, "revision 1 is in progress")
    gate.set()
    assert (await first).outcome is Outcome.APPLIED
    assert not resizer.is_resizing
    assert (await resizer.resize(plan(TO_KV, revision=2))).outcome is Outcome.APPLIED


async def test_slots_follow_as_far_as_the_free_groups_pay_for_them() -> None:
    engine, resizer = await started()
    engine.busy = set(range(1, 9))  # three of the four groups are free, and a slot costs two
    outcome = await resizer.resize(plan(TO_EXPERTS))
    assert (outcome.outcome, outcome.before, outcome.after) == (Outcome.APPLIED, START, Split(cap=5, kv_blocks=19))
    assert outcome.reason.endswith("; cap 6 needs more KV groups than turns leave free")
    assert (engine.log, outcome.bytes_moved) == (["take", "unmap", "set_cap"], 4 * PAGE)
    await engine.check_integrity()
    engine.busy = set()
    assert (await resizer.resize(plan(TO_EXPERTS))) == outcome, "it was answered"
    assert (await resizer.resize(plan(TO_EXPERTS, revision=2))).after == TO_EXPERTS


async def test_slots_follow_as_far_as_running_turns_leave_blocks() -> None:
    engine, resizer = await started()
    engine.floor_blocks = 17
    outcome = await resizer.resize(plan(TO_EXPERTS))
    assert (outcome.outcome, outcome.after) == (Outcome.APPLIED, Split(cap=5, kv_blocks=19))


async def test_too_few_free_groups_defer_with_nothing_changed_and_the_revision_may_be_tried_again() -> None:
    engine, resizer = await started()
    engine.busy = set(range(1, 11))
    before = engine.state()
    outcome = await resizer.resize(plan(TO_EXPERTS))
    assert outcome.outcome is Outcome.DEFERRED
    assert "4 KV groups asked for, 2 at the least, 1 are free" in outcome.reason
    assert engine.state() == before
    engine.busy = set()
    assert (await resizer.resize(plan(TO_EXPERTS))).outcome is Outcome.APPLIED


async def test_running_turns_hold_a_shrink_back() -> None:
    engine, resizer = await started()
    engine.floor_blocks = 20
    outcome = await resizer.resize(plan(TO_EXPERTS))
    assert (outcome.outcome, engine.log) == (Outcome.DEFERRED, [])
    assert "15 KV blocks are below the 20 that running turns need" in outcome.reason


async def test_turns_admitted_between_the_decision_and_the_take_hold_it_back_too() -> None:
    engine, resizer = await started()
    engine.floor_blocks = 20
    report = await engine.scheduler_report()

    async def report_from_before() -> object:
        return report.model_copy(update={"kv": report.kv.model_copy(update={"floor_blocks": 4})})

    engine.scheduler_report = report_from_before  # type: ignore[method-assign,assignment]
    before = engine.state()
    outcome = await resizer.resize(plan(TO_EXPERTS))
    assert (outcome.outcome, engine.state()) == (Outcome.DEFERRED, before)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Split(cap=6, kv_blocks=3), "below κ_min"),
        (Split(cap=6, kv_blocks=17), "the budget is 163840"),
        (Split(cap=1, kv_blocks=15), "cap 1 is outside [2, 8]"),
        (Split(cap=9, kv_blocks=15), "cap 9 is outside [2, 8]"),
        (Split(cap=2, kv_blocks=33), "address range's 31"),
    ],
)
async def test_impossible_splits_fail_and_say_why(target: Split, reason: str) -> None:
    engine, resizer = await started()
    outcome = await resizer.resize(plan(target))
    assert (outcome.outcome, outcome.after, engine.log) == (Outcome.FAILED, START, [])
    assert reason in outcome.reason


async def test_blocks_are_rounded_up_to_the_groups_that_are_paid_anyhow() -> None:
    _, resizer = await started()
    outcome = await resizer.resize(plan(Split(cap=4, kv_blocks=14)))
    assert outcome.after.kv_blocks == 15
    assert LAYOUT.kv_bytes(14) == LAYOUT.kv_bytes(15)


async def drained(engine: FakeEngine, resizer: Resizer) -> ResizeOutcome:
    return await resizer.resize(plan(TO_EXPERTS, barrier=Barrier.DRAINED))


async def test_a_drained_barrier_waits_for_blocks_in_use() -> None:
    engine, resizer = await started()
    engine.busy = set(range(1, 12))
    assert (await drained(engine, resizer)).outcome is Outcome.APPLIED
    assert engine.log == ["drain", "take", "unmap", "set_cap", "resume"]


async def test_a_drain_that_takes_too_long_defers_and_resumes() -> None:
    engine, resizer = await started()
    engine.can_drain = False
    outcome = await drained(engine, resizer)
    assert (outcome.outcome, engine.log) == (Outcome.DEFERRED, ["drain", "resume"])
    assert "requests still run after 0.1 s" in outcome.reason


async def test_a_failure_while_drained_resumes() -> None:
    engine, resizer = await started()
    engine.fail_at = ["unmap"]
    outcome = await drained(engine, resizer)
    assert (outcome.outcome, engine.is_drained, engine.log[-1]) == (Outcome.FAILED, False, "resume")


async def test_it_says_that_it_drains_from_the_plan_s_acceptance_to_its_end() -> None:
    engine, resizer = await started()
    seen: list[bool] = []
    take = engine.take_groups

    async def watched(counts: list[int]) -> TakeReport:
        seen.append(resizer.is_draining)
        return await take(counts)

    engine.take_groups = watched  # type: ignore[method-assign]
    assert (await drained(engine, resizer)).outcome is Outcome.APPLIED
    assert (seen, resizer.is_draining) == ([True], False)
