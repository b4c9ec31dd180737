"""The miss curve against replays of the slot table, at every cap."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wisp_core.pager.slot_table import SlotTable
from wisp_core.working_set.miss_curve import MissCurve, misses_by_cap, pass_misses_by_cap
from wisp_core.working_set.order import NEVER, recency_keys
from wisp_core.working_set.union_curve import UnionCurve

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


@given(work=steps)
def test_a_pass_brings_each_expert_without_a_slot_once(work: list[list[list[int]]]) -> None:
    table = SlotTable(E, E)
    for step in work:
        ids = np.array(step)
        curve = pass_misses_by_cap(table.last_use, ids)
        needed = set(ids.reshape(-1).tolist())
        for cap in range(K, E + 1):
            order = np.argsort(-recency_keys(table.last_use))[:cap]
            resident = {int(e) for e in order if table.last_use[e] != NEVER}
            assert curve[cap] == len(needed - resident)
        table.plan(ids)


def test_recent_steps_weigh_more() -> None:
    curve = MissCurve(num_experts=4, memory_s=10.0)
    assert curve.expected() is None
    never = np.full(4, NEVER)
    curve.observe(never, np.array([[0]]), 0.0)  # one miss at every cap
    curve.observe(never, np.array([[0, 1, 2]]), 10.0)  # three
    expected = curve.expected()
    assert expected is not None
    assert expected[4] == pytest.approx((1 / math.e + 3) / (1 / math.e + 1))
    curve.reset()
    assert curve.expected() is None


def test_memory_must_be_positive() -> None:
    with pytest.raises(ValueError, match="memory_s"):
        MissCurve(4, 0.0)


def test_a_new_phase_replaces_the_old_one_within_three_memories() -> None:
    curve, table = MissCurve(32, memory_s=5.0), SlotTable(32, 32)
    rng = np.random.default_rng(1)
    for step in range(800):  # 20 steps a second: 20 s on all experts, then 20 s on eight
        ids = np.array([rng.choice(32 if step < 400 else 8, 4, replace=False)])
        curve.observe(table.last_use, ids, step / 20)
        table.plan(ids)
        if step == 700:
            expected = curve.expected()
            assert expected is not None
            assert expected[8] < 0.2  # of some 3 before


def test_after_a_pause_the_mean_is_what_it_was() -> None:
    curve = MissCurve(4, memory_s=1.0)
    curve.observe(np.full(4, NEVER), np.array([[0, 1]]), 0.0)
    before = curve.expected()
    curve.observe(np.full(4, NEVER), np.array([[0, 1]]), 1e6)
    after = curve.expected()
    assert before is not None
    assert after is not None
    assert after == pytest.approx(before)


@settings(max_examples=25)
@given(work=steps, memory_s=st.floats(0.5, 50))
def test_expected_is_the_decayed_mean_of_replays(work: list[list[list[int]]], memory_s: float) -> None:
    table, curve = SlotTable(E, 4), MissCurve(E, memory_s)
    seen = []
    for second, step in enumerate(work):
        ids = np.array(step)
        curve.observe(table.last_use, ids, float(second))
        seen.append(copies(table, ids))
    weights = np.exp(-np.arange(len(seen))[::-1] / memory_s)
    expected = curve.expected()
    assert expected is not None
    assert expected[4] == pytest.approx(np.average(seen, weights=weights))


def test_a_union_is_known_for_every_batch_up_to_the_largest() -> None:
    curve = UnionCurve(max_rows=4, memory_s=10.0)
    assert curve.sizes() == ()
    curve.observe(np.array([[0, 1], [1, 2], [0, 1]]), 0.0)
    assert curve.sizes() == pytest.approx((0.0, 2.0, 3.0, 3.0))
    curve.observe(np.array([[5, 6], [7, 8]]), 0.0)
    assert curve.sizes() == pytest.approx((0.0, 2.0, 3.5, 3.0))
    curve.observe(np.array([[0, 1]] * 9), 0.0)  # rows beyond the last are left out
    assert len(curve.sizes()) == 5


@given(work=st.lists(rows, min_size=1, max_size=6))
def test_a_union_never_falls_with_the_batch(work: list[list[int]]) -> None:
    curve = UnionCurve(max_rows=8, memory_s=10.0)
    ids = np.array(work)
    curve.observe(ids, 0.0)
    assert curve.sizes() == pytest.approx([0, *(len(set(ids[:b].reshape(-1))) for b in range(1, len(ids) + 1))])
