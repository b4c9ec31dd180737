"""Rates of a snapshot from cumulative counters."""

from __future__ import annotations

import pytest

from wisp_core.contracts import PagerCounts
from wisp_core.engine.telemetry import RateWindow


def test_the_first_reading_has_no_rate() -> None:
    assert RateWindow(10.0).observe(5.0, PagerCounts(steps=100), PagerCounts()).decode_steps == 0


def test_rates_are_differences_over_the_window() -> None:
    window = RateWindow(10.0)
    for second in range(31):
        decode = PagerCounts(steps=2 * second if second < 20 else 40, tokens=10 * second)
        rates = window.observe(float(second), decode, PagerCounts(steps=second, tokens=100 * second))
    assert rates.window_s == pytest.approx(10.0)
    assert rates.decode_steps == 0
    assert (rates.decode_tokens, rates.prefill_steps, rates.prefill_tokens) == (10.0, 1.0, 100.0)


def test_readings_far_apart_span_the_gap() -> None:
    window = RateWindow(10.0)
    window.observe(0.0, PagerCounts(), PagerCounts())
    rates = window.observe(40.0, PagerCounts(steps=80), PagerCounts())
    assert (rates.window_s, rates.decode_steps) == (40.0, 2.0)
