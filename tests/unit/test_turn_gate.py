"""Which waiting turns start together: their experts fit, prefills share a pass, and nobody waits for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wisp_core.engine import turn_gate
from wisp_core.engine.turn_gate import HOLD_TURNS, MAX_GAP_S, MAX_HOLD_S, MIN_HOLD_S, TurnGate, WaitingTurn

A, B, C = [0b0011, 0b0011], [0b1100, 0b1100], [0b0110, 0b0011]
LATER_S = 100.0


def gate(cap: int = 2) -> TurnGate:
    made = TurnGate()
    made.learn(cap, {"a": A, "a2": A, "b": B, "c": C})
    return made


def waiting(*sessions: str, waited_s: float = 0.0) -> list[WaitingTurn]:
    return [WaitingTurn(session, waited_s) for session in sessions]


def test_without_working_sets_everybody_starts() -> None:
    assert TurnGate().may_start(["x"], waiting("a", "b"), LATER_S) == [True, True]


def test_turns_start_beside_others_whose_experts_they_share() -> None:
    assert gate().may_start(["a"], waiting("b", "a2", "c"), LATER_S) == [False, True, False]
    # Three experts in one layer and two in the other: five slots of six.
    assert gate(cap=3).may_start(["a"], waiting("c", "b"), LATER_S) == [True, False]
    assert gate(cap=4).may_start(["a"], waiting("b", "c"), LATER_S) == [True, True]


def test_the_first_turn_starts_where_nothing_runs() -> None:
    assert gate(cap=1).may_start([], waiting("a", "b", "a2"), LATER_S) == [True, False, True]


def test_unknown_sessions_start() -> None:
    assert gate().may_start(["a"], waiting("new", "b"), LATER_S) == [True, False]


def test_the_bound_follows_the_length_of_turns_between_two_limits() -> None:
    made = gate()
    assert made.hold_s == MIN_HOLD_S
    made.note_turn(1.0)
    assert made.hold_s == HOLD_TURNS
    assert made.may_start(["a"], waiting("b", waited_s=HOLD_TURNS - 0.1), LATER_S) == [False]
    assert made.may_start(["a"], waiting("b", waited_s=HOLD_TURNS), LATER_S) == [True]
    for _ in range(100):
        made.note_turn(60.0)
    assert made.hold_s == MAX_HOLD_S
    for _ in range(200):
        made.note_turn(0.01)
    assert made.hold_s == MIN_HOLD_S


def test_nobody_waits_longer_than_the_bound() -> None:
    assert gate().may_start(["a"], waiting("b", waited_s=MAX_HOLD_S), LATER_S) == [True]
    # Beside one that had to start, those that add nothing to it may as well.
    turns = [*waiting("b", waited_s=MAX_HOLD_S), *waiting("b", "c")]
    assert gate().may_start(["a"], turns, LATER_S) == [True, True, True]


def test_turns_that_come_after_a_pass_wait_for_the_next_one() -> None:
    made = gate(cap=4)
    made.note_pass(seconds=0.2, ended_s=10.0)
    assert made.may_start(["a"], waiting("a2", "new"), 10.1) == [False, False]
    assert made.may_start([], waiting("a2", "b"), 10.1) == [True, True], "nothing runs that a pass would stop"
    assert made.may_start(["a"], waiting("a2", "b"), 10.21) == [True, True]
    made.note_pass(seconds=9.0, ended_s=20.0)
    assert made.may_start(["a"], waiting("a2"), 20.0 + MAX_GAP_S) == [True]


def test_a_new_cap_and_new_working_sets_count_at_once() -> None:
    made = gate(cap=4)
    made.learn(2, {"b": A})
    assert made.may_start(["a"], waiting("b", "c"), LATER_S) == [True, False]


def test_memory_is_bounded() -> None:
    made = TurnGate()
    for number in range(turn_gate.MAX_SESSIONS + 10):
        made.learn(4, {f"s{number}": A})
    assert len(made._masks) == turn_gate.MAX_SESSIONS
    assert "s0" not in made._masks


masks = st.lists(st.integers(0, 255), min_size=2, max_size=2)


@given(st.dictionaries(st.sampled_from("abcdef"), masks), st.integers(1, 8), st.lists(st.sampled_from("abcdefx")))
def test_whoever_starts_early_fits(known: dict[str, list[int]], cap: int, sessions: list[str]) -> None:
    made = TurnGate()
    made.learn(cap, known)
    turns = waiting(*sessions)
    decisions = made.may_start([], turns, LATER_S)
    assert not sessions or decisions[0]
    started = [turn.session for turn, may in zip(turns, decisions, strict=True) if may]
    union = [0, 0]
    for session in started:
        union = [a | b for a, b in zip(union, known.get(session, [0, 0]), strict=True)]
    one_alone = max((sum(mask.bit_count() for mask in known.get(session, [])) for session in started), default=0)
    assert sum(mask.bit_count() for mask in union) <= max(cap * 2, one_alone)
