"""Rates and constants of a snapshot from cumulative counters."""

from __future__ import annotations

import itertools

import pytest

from wisp_core.contracts import KvDemand, PagerCounts
from wisp_core.engine.cost_fit import Reading, StepFit
from wisp_core.engine.reports import PagerReport, SchedulerReport
from wisp_core.engine.step_times import StepTimes
from wisp_core.engine.telemetry import RateMeter


def reading(decode: PagerCounts | None = None, prefill: PagerCounts | None = None) -> Reading:
    decode, prefill = decode or PagerCounts(), prefill or PagerCounts()
    return Reading(decode, prefill, decode.steps + prefill.steps, decode.seconds + prefill.seconds)


def test_the_first_reading_has_no_rate() -> None:
    assert RateMeter(10.0).observe(5.0, reading(PagerCounts(steps=100))).decode_steps == 0


def test_steady_work_has_its_rates() -> None:
    meter = RateMeter(10.0)
    for second in range(61):
        decode = PagerCounts(steps=2 * second, tokens=10 * second, seconds=0.4 * second)
        rates = meter.observe(float(second), reading(decode, PagerCounts(steps=second, tokens=100 * second)))
    assert rates[1:6] == pytest.approx((2.0, 10.0, 1.0, 100.0, 0.4))


def test_rates_follow_a_change_and_forget_what_was() -> None:
    meter = RateMeter(10.0)
    for second in range(61):
        meter.observe(float(second), reading(PagerCounts(steps=10 * second)))
    for second in range(61, 91):
        rates = meter.observe(float(second), reading(PagerCounts(steps=600)))
    assert rates.decode_steps == pytest.approx(10 * 2.718 ** -(30 / 10), rel=0.05)


def test_counters_that_went_back_start_anew() -> None:
    meter = RateMeter(10.0)
    meter.observe(0.0, reading(PagerCounts(steps=500)))
    assert meter.observe(1.0, reading(PagerCounts(steps=3))).decode_steps == 0
    assert meter.observe(2.0, reading(PagerCounts(steps=5))).decode_steps == pytest.approx(2.0)


def engine(second: int, batch: int, last: Reading | None = None) -> Reading:
    """An engine of 10 ms a decode step, 2 ms a token, 50 ms a pass, 1 ms a prompt token, and 4 ms around each step."""
    before = last or Reading(PagerCounts(), PagerCounts(), 0, 0.0)
    decode = PagerCounts(
        steps=before.decode.steps + 20,
        tokens=before.decode.tokens + 20 * batch,
        seconds=before.decode.seconds + 20 * (0.010 + 0.002 * batch) + 0.3,
        link_seconds=before.decode.link_seconds + 0.3,
    )
    prompt = 30 * batch
    prefill = PagerCounts(
        steps=before.prefill.steps + 2,
        tokens=before.prefill.tokens + prompt,
        seconds=before.prefill.seconds + 2 * 0.050 + 0.001 * prompt,
    )
    forwards_s = decode.seconds + prefill.seconds - before.decode.seconds - before.prefill.seconds
    return Reading(decode, prefill, before.steps + 22, before.step_seconds + forwards_s + 22 * 0.004)


def test_the_fit_finds_the_constants_and_its_error_falls_to_nothing() -> None:
    fit, last = StepFit(60.0), None
    for second in range(120):
        last = engine(second, batch=1 + second % 7, last=last)
        found = fit.observe(float(second), last)
    assert found.step_s == pytest.approx(0.014, rel=0.02)
    assert found.token_s == pytest.approx(0.002, rel=0.02)
    assert found.pass_s == pytest.approx(0.054, rel=0.05)
    assert found.prompt_token_s == pytest.approx(0.001, rel=0.02)
    assert found.error_fraction < 0.01
    assert found.num_samples == 119


def test_a_step_that_is_counted_a_moment_later_than_its_forward_biases_nothing() -> None:
    """Steps of a second: a reading lies now before, now after the end of a step whose forward has ended."""
    fit, busy_s = StepFit(600.0), 0.0
    for half in itertools.accumulate(itertools.islice(itertools.cycle((1, 2, 2, 1, 3)), 400)):
        forwards = (half + 1) // 2
        steps = half // 2
        busy_s = 1.010 * steps
        prefill = PagerCounts(
            steps=forwards, tokens=100 * forwards, seconds=1.0 * forwards, link_seconds=0.95 * forwards
        )
        found = fit.observe(half / 2, Reading(PagerCounts(), prefill, steps, busy_s))
    assert found.pass_s + 100 * found.prompt_token_s == pytest.approx(0.06, rel=0.05)
    assert found.error_fraction < 0.05


@pytest.mark.parametrize("lag", [0, 1])
def test_counts_that_are_a_report_old_are_compared_with_the_steps_of_then(lag: int) -> None:
    meter, last, readings = RateMeter(5.0), None, list[Reading]()
    for second in range(120):
        last = engine(second, batch=1 + second * second % 7, last=last)
        readings.append(last)
        then = readings[max(0, second - lag)]
        pager = PagerReport(
            decode=then.decode,
            prefill=then.prefill,
            decode_misses_by_cap=(),
            prefill_misses_by_cap=(),
            counted_at_s=second - lag - 0.01 if lag else None,
        )
        scheduler = SchedulerReport(
            usable_blocks=0,
            taken_groups=(),
            steps=last.steps,
            step_seconds=last.step_seconds,
            kv=KvDemand(),
        )
        fit = meter.observe_reports(float(second), pager, scheduler).fit
    assert fit.step_s == pytest.approx(0.014, rel=0.02)
    assert fit.pass_s == pytest.approx(0.054, rel=0.05)
    assert fit.error_fraction < 0.01


def test_batches_that_are_all_alike_give_a_fit_that_predicts_them() -> None:
    fit, last = StepFit(60.0), None
    for second in range(60):
        last = engine(second, batch=4, last=last)
        found = fit.observe(float(second), last)
    assert found.step_s + 4 * found.token_s == pytest.approx(0.022, rel=0.01)
    assert found.error_fraction < 0.01


def test_steps_are_timed_without_the_idle_time_and_without_their_overlap() -> None:
    times = StepTimes()
    times.note_start(10.0)
    times.note_end(10.5)
    times.note_start(20.0)  # after a pause
    times.note_start(20.2)  # scheduled while the step before still runs
    times.note_end(20.4)
    assert times.note_end(20.7) == pytest.approx(0.3)
    assert times.steps == 3
    assert times.seconds == pytest.approx(0.5 + 0.4 + 0.3)
