"""The share of turns that are followed by another one of their conversation."""

from __future__ import annotations

import pytest

from wisp_core.demand.returns import EXPIRES_S, Returns


def test_before_anything_is_known_every_second_turn_is_expected_back() -> None:
    assert Returns().share(0.0) == 0.5


def test_turns_that_run_or_pause_say_nothing() -> None:
    returns = Returns()
    for turn in range(20):  # conversations of two turns: ended once, come back once, pause now
        returns.begin([turn], 10.0)
        returns.end(turn, 11.0)
        returns.begin([turn], 12.0)
        returns.end(turn, 13.0)
    for new in range(100, 200):  # a phase of new conversations begins
        returns.begin([new], 14.0)
    known = returns.share(14.0)
    assert known == pytest.approx(21 / 22)
    for new in range(100, 200):
        returns.end(new, 15.0)
    assert returns.share(13.0 + 0.9 * EXPIRES_S) == pytest.approx(known)


def test_a_turn_that_nobody_follows_counts_once_its_time_is_up() -> None:
    returns = Returns()
    for turn in range(10):
        returns.end(turn, 0.0)
    assert returns.share(EXPIRES_S - 1) == 0.5
    assert returns.share(EXPIRES_S) == pytest.approx(1 / 12)
    returns.begin([3], EXPIRES_S + 1)  # too late to count
    assert returns.share(EXPIRES_S + 1) == pytest.approx(1 / 12)


def test_a_conversation_is_found_by_any_of_the_keys_and_counts_once() -> None:
    returns = Returns()
    returns.end("prompt of three blocks", 0.0)
    returns.begin(["four", "prompt of three blocks", "two"], 1.0)
    returns.begin(["prompt of three blocks"], 1.0)
    assert returns.share(1.0) == pytest.approx(2 / 3)
