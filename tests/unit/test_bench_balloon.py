"""What the balloon benchmark asks for, and how it judges what it saw."""

from __future__ import annotations

import pytest
from policy_snapshots import make_snapshot

from loadtests.bench.online.balloon import BalloonConfig, shrunk, summarize, turns_around
from loadtests.bench.online.figures import TurnFigures
from wisp_core.allocation.solver import violations
from wisp_core.contracts import Split


def turn(sent_at_s: float, duration_s: float, error: str | None = None) -> TurnFigures:
    return TurnFigures(
        client=0, session=0, phase=0, sent_at_s=sent_at_s, ttft_s=0.1, duration_s=duration_s, error=error
    )


def test_a_shrink_takes_its_share_of_the_blocks_and_gives_their_bytes_to_experts() -> None:
    snapshot = make_snapshot(split=Split(cap=4, kv_blocks=103))
    target = shrunk(snapshot, BalloonConfig().shrink_fraction)
    assert target.kv_blocks == 72
    assert target.cap == 5
    assert violations(snapshot, target) == []


def test_only_turns_that_ran_when_the_plan_was_written_are_looked_at() -> None:
    turns = [turn(0.0, 4.0), turn(1.0, 9.5), turn(4.9, 1.0, error="lost"), turn(5.1, 50.0)]
    row = turns_around({"written_at_s": 5.0}, turns)
    assert row == {"turns_in_flight": 2, "failed_turns": 1, "longest_running_s": pytest.approx(5.5)}


def test_a_drained_barrier_is_judged_by_the_turn_that_ended_last() -> None:
    balloon = {"barrier": "balloon", "outcome": "applied", "applied_s": 0.5, "failed_turns": 0, "turns_in_flight": 8}
    drained = balloon | {"barrier": "drained", "applied_s": 6.0, "longest_running_s": 5.5, "outcome": "deferred"}
    summary = summarize([balloon, drained])
    assert (summary["balloon_applied_s_max"], summary["drained_over_longest_turn_s_max"]) == (0.5, 0.5)
    assert (summary["not_applied"], summary["turns_in_flight"]) == (1, 16)
