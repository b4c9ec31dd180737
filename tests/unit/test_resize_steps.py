"""Long moves go in steps of bounded size: each fits the budget, together they are the move, a failure undoes all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resize_fake_engine import BUDGET_BYTES, LAYOUT, PAGE, FakeEngine

from wisp_core.contracts import Barrier, Outcome, Split, SplitPlan
from wisp_core.engine.resizer import Resizer
from wisp_core.memory.resize_plan import Move, Refusal, plan_moves, steps_of

FEW = Split(cap=2, kv_blocks=31)
MANY = Split(cap=7, kv_blocks=11)


@st.composite
def splits(draw: st.DrawFn) -> Split:
    cap = draw(st.integers(LAYOUT.min_cap, LAYOUT.num_experts))
    most = min(LAYOUT.max_kv_blocks, LAYOUT.kv_blocks_within(BUDGET_BYTES - LAYOUT.experts_bytes_by_cap[cap]))
    return Split(cap=cap, kv_blocks=draw(st.integers(4, most)))


@given(before=splits(), target=splits(), step_pages=st.integers(1, 60))
def test_steps_add_up_to_the_move_and_fit_the_budget_in_between(before: Split, target: Split, step_pages: int) -> None:
    moves = plan_moves(LAYOUT, budget_bytes=BUDGET_BYTES, before=before, target=target, floor_blocks=0)
    assert not isinstance(moves, Refusal)
    for move in moves:
        check_steps(move, step_pages)


def check_steps(move: Move, step_pages: int) -> None:
    steps = steps_of(move, LAYOUT, budget_bytes=BUDGET_BYTES, step_bytes=step_pages * PAGE)
    group_bytes = LAYOUT.kv_group_blocks * LAYOUT.block_bytes
    cap, groups = move.cap_before, move.groups_before
    for step in steps:
        for change, cap_then in ((-step.num_unmapped, cap), (0, step.cap), (step.num_mapped, step.cap)):
            groups, cap = groups + change, cap_then
            assert LAYOUT.experts_bytes_by_cap[cap] + groups * group_bytes <= BUDGET_BYTES
        assert not (step.num_unmapped and step.num_mapped)
    assert (cap, groups) == (move.cap_after, move.groups_after)
    assert len(steps) <= max(1, -(-move.bytes_moved // (step_pages * PAGE)))


@given(before=splits(), target=splits(), floor_blocks=st.integers(4, 31))
def test_shorter_moves_pay_for_their_slots_above_the_floor(before: Split, target: Split, floor_blocks: int) -> None:
    moves = plan_moves(LAYOUT, budget_bytes=BUDGET_BYTES, before=before, target=target, floor_blocks=floor_blocks)
    if isinstance(moves, Refusal):
        assert target.kv_blocks < before.kv_blocks
        return
    counts = [move.num_leaving for move in moves]
    assert counts == sorted(set(counts), reverse=True)
    for move in moves:
        kv_blocks = LAYOUT.usable_blocks(move.groups_after)
        assert LAYOUT.pool_bytes(Split(cap=move.cap_after, kv_blocks=kv_blocks)) <= BUDGET_BYTES
        assert not move.num_leaving or kv_blocks >= floor_blocks
    for move in moves[1:]:
        assert before.cap < move.cap_after < target.cap
        assert move.num_leaving > 0
        more = Split(cap=move.cap_after, kv_blocks=LAYOUT.usable_blocks(move.groups_after + 1))
        assert LAYOUT.pool_bytes(more) > BUDGET_BYTES, "no more is taken than the slots cost"


async def stepping(step_bytes: int) -> tuple[FakeEngine, Resizer]:
    engine = FakeEngine()
    resizer = Resizer(
        engine, engine.facts(), replica_id="r", incarnation="i", drain_timeout_s=0.1, step_bytes=step_bytes
    )
    await resizer.start(FEW)
    engine.log.clear()
    return engine, resizer


def plan(split: Split, revision: int = 1) -> SplitPlan:
    return SplitPlan(
        replica_id="r",
        incarnation="i",
        revision=revision,
        split=split,
        barrier=Barrier.BALLOON,
        policy="test",
        reason="because",
    )


async def test_a_long_move_takes_once_and_gives_once_with_steps_between() -> None:
    engine, resizer = await stepping(8 * PAGE)
    engine.move_s = 0.01
    assert (await resizer.resize(plan(MANY))).after == MANY
    assert engine.log == ["take", *["unmap", "set_cap"] * 3]
    await engine.check_integrity()
    assert engine.num_holds == 3, "the engine runs between the pieces of a long move"
    engine.log.clear()
    engine.step_s = 0.2
    assert (await resizer.resize(plan(FEW, revision=2))).after == FEW
    assert engine.num_holds == 4, "after a long step it waits for more of them"
    assert not engine.is_held
    assert engine.log == [*["set_cap", "map"] * 3, "give"]
    await engine.check_integrity()


@pytest.mark.parametrize("target", [FEW, MANY], ids=["to KV", "to experts"])
@pytest.mark.parametrize("failing", range(7))
async def test_a_failure_in_any_step_undoes_all_of_them(target: Split, failing: int) -> None:
    engine, resizer = await stepping(8 * PAGE)
    if target == FEW:
        await resizer.resize(plan(MANY))
    before = engine.state()
    engine.log.clear()
    commands = ["take", *["unmap", "set_cap"] * 3] if target == MANY else [*["set_cap", "map"] * 3, "give"]

    def fail_at_the_nth(command: str) -> None:
        engine.log.append(command)
        if len(engine.log) == failing + 1:
            assert command == commands[failing]
            raise engine.error(f"{command}: broken on purpose")

    engine._run = fail_at_the_nth  # type: ignore[method-assign]
    outcome = await resizer.resize(plan(target, revision=2))
    assert outcome.outcome is Outcome.FAILED
    assert (engine.state(), engine.is_held) == (before, False)
    await engine.check_integrity()


async def test_an_engine_that_cannot_be_held_is_let_go() -> None:
    engine, resizer = await stepping(8 * PAGE)
    engine.fail_at = ["hold"]
    assert (await resizer.resize(plan(MANY))).outcome is Outcome.FAILED
    assert (engine.is_held, engine.log) == (False, [])
