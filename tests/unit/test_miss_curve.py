"""The miss curve against replays of the slot table, at every cap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wisp_core.pager.slot_table import SlotTable
from wisp_core.working_set.miss_curve import MissCurve, misses_by_cap
from wisp_core.working_set.order import NEVER

E, K = 9, 3
rows = st.permutations(range(E)).map(lambda p: list(p[:K]))
steps = st.lists(st.lists(rows, min_size=1, max_size=7), min_size=1, max_size=10)


def copies(table: SlotTable, ids: np.ndarray) -> int:
    return sum(len(batch.copies) for batch in table.plan(ids))


@given(work=steps)
def test_equals_replay_at_every_cap(work: list[list[list[int]]]) -> None:
    tables = {cap: SlotTable(E, cap) for cap in range(K, E + 1)}
    for step in work:
        ids = np.array(step)
        predicted = misses_by_cap(tables[E].last_use, ids)
        assert {cap: copies(table, ids) for cap, table in tables.items()} == {c: predicted[c] for c in tables}


@given(work=steps)
def test_never_rises_with_the_cap_and_starts_at_all_lookups(work: list[list[list[int]]]) -> None:
    table = SlotTable(E, E)
    for step in work:
        ids = np.array(step)
        curve = misses_by_cap(table.last_use, ids)
        assert curve.shape == (E + 1,)
        assert curve[0] == ids.size
        assert (np.diff(curve) <= 0).all()
        table.plan(ids)


def test_long_prefill_is_counted_across_chunks_of_rows() -> None:
    rng = np.random.default_rng(0)
    ids = np.array([rng.choice(32, 4, replace=False) for _ in range(700)])
    curve = misses_by_cap(np.full(32, NEVER), ids)
    assert [curve[cap] for cap in (4, 16, 31, 32)] == [copies(SlotTable(32, c), ids) for c in (4, 16, 31, 32)]
    assert curve[32] == 32  # each expert once


def test_recent_steps_weigh_more() -> None:
    curve = MissCurve(num_experts=4, half_life_steps=1.0)
    assert curve.expected() is None
    never = np.full(4, NEVER)
    curve.observe(never, np.array([[0]]))  # one miss at every cap
    curve.observe(never, np.array([[0, 1, 2]]))  # three
    expected = curve.expected()
    assert expected is not None
    assert expected[4] == pytest.approx((0.5 * 1 + 3) / 1.5)
    curve.reset()
    assert curve.expected() is None


def test_half_life_must_be_positive() -> None:
    with pytest.raises(ValueError, match="half_life_steps"):
        MissCurve(4, 0.0)


@settings(max_examples=25)
@given(work=steps, half_life=st.floats(0.5, 50))
def test_expected_is_the_decayed_mean_of_replays(work: list[list[list[int]]], half_life: float) -> None:
    table, curve = SlotTable(E, 4), MissCurve(E, half_life)
    seen = []
    for step in work:
        ids = np.array(step)
        curve.observe(table.last_use, ids)
        seen.append(copies(table, ids))
    weights = 0.5 ** (np.arange(len(seen))[::-1] / half_life)
    expected = curve.expected()
    assert expected is not None
    assert expected[4] == pytest.approx(np.average(seen, weights=weights))
