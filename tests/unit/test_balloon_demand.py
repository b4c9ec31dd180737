"""Demand of turns: floor, peak and mean."""

from __future__ import annotations

import math

import pytest

from wisp_core.demand.meter import DemandMeter, OutputLengths, TimeShares, Turn


def turn(prompt: int, output: int = 0, limit: int = 100, held: int = 0) -> Turn:
    return Turn(prompt_tokens=prompt, output_tokens=output, max_output_tokens=limit, held_blocks=held)


def meter(max_model_len: int = 320) -> DemandMeter:
    return DemandMeter(window_s=10.0, block_tokens=16, max_model_len=max_model_len)


def test_nothing_known_means_all_that_a_turn_may_put_out_within_reason() -> None:
    assert OutputLengths().expect(turn(10, limit=100)) == 100
    assert OutputLengths().expect(turn(10, limit=32_000)) == 512
    assert OutputLengths().expect(turn(10, output=600, limit=32_000)) == 601


def test_the_first_turns_without_a_limit_do_not_raise_the_floor() -> None:
    running = [turn(500, output=3, limit=32_268, held=32)] * 4
    assert meter(max_model_len=32_768).floor_blocks(4 * 32, running) == 32_768 // 16


def test_expected_output_is_learnt_and_stays_within_the_turn_s_limit() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.observe(40, 100)
    assert lengths.expect(turn(10, limit=100)) == 40
    assert lengths.expect(turn(10, limit=20)) == 20
    assert lengths.expect(turn(10, output=60, limit=100)) == 61


def test_limits_foretell_a_new_kind_of_turn_where_they_foretold_the_others() -> None:
    told, same_for_all = OutputLengths(), OutputLengths()
    for output in (8, 16, 12, 10) * 10:
        told.observe(output, output)
        same_for_all.observe(output, 4096)
    assert told.expect(turn(10, limit=90)) == 90
    assert same_for_all.expect(turn(10, limit=4096)) == pytest.approx(12, abs=2)
    assert same_for_all.expect(turn(10, limit=90)) == pytest.approx(12, abs=2), "one that differs is no evidence"


def test_the_floor_is_the_longest_request_when_nothing_runs() -> None:
    assert meter(max_model_len=321).floor_blocks(0, []) == 21


def test_the_floor_counts_held_blocks_once_and_what_turns_still_need() -> None:
    running = [turn(64, limit=16, held=3), turn(64, limit=16, held=4)]
    # Both share blocks: 5 are in use in all, and they need 2 and 1 more to reach 5 each.
    assert meter(max_model_len=96).floor_blocks(5, running) == 8


def test_a_turn_never_needs_more_than_the_longest_request() -> None:
    assert meter(max_model_len=64).full_blocks(turn(60, limit=1000)) == 4


def test_the_peak_includes_waiting_turns_and_leaves_with_the_window() -> None:
    demand = meter()
    demand.observe(0.0, used_blocks=0, running=[], waiting=[turn(64, limit=16)] * 3)
    demand.observe(1.0, used_blocks=0, running=[], waiting=[])
    assert demand.peak_demand_blocks(5.0) == 15
    assert demand.peak_demand_blocks(12.0) == 0


def test_mean_turns_is_weighted_by_time() -> None:
    demand = meter()
    demand.observe(0.0, used_blocks=0, running=[turn(16)], waiting=[turn(16)])
    demand.observe(2.5, used_blocks=0, running=[], waiting=[])
    assert demand.mean_turns(9.9) == pytest.approx(5 / 9.9, rel=0.01)


def test_a_long_silence_is_charged_with_the_state_that_held() -> None:
    demand = meter()
    demand.observe(0.0, used_blocks=0, running=[turn(64, limit=16)], waiting=[])
    assert demand.mean_turns(1000.0) == pytest.approx(1.0)
    assert demand.peak_demand_blocks(1000.0) == 5


def test_demand_is_kept_as_shares_of_the_time_at_work() -> None:
    shares = TimeShares([1, 4, 16], memory_s=100.0)
    assert shares.bins() == []
    shares.observe(0.0, 3)
    shares.observe(6.0, 99)  # beyond the last edge
    shares.observe(8.0, 0)  # idle: says nothing about demand
    shares.advance(1000.0)
    bins = dict(shares.bins())
    assert bins[4] == pytest.approx(0.75, rel=0.02)
    assert bins[4] + bins[16] == pytest.approx(1.0)


def test_demand_of_long_ago_fades() -> None:
    shares = TimeShares([1, 4, 16], memory_s=5.0)
    shares.observe(0.0, 16)
    shares.observe(20.0, 4)
    shares.advance(25.0)
    assert dict(shares.bins())[4] == pytest.approx(1 - math.exp(-1), rel=0.05)
