"""The slot table against a brute-force LRU."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wisp_core.errors import IntegrityError
from wisp_core.pager.slot_table import SlotTable

E, K = 8, 2
rows = st.permutations(range(E)).map(lambda p: list(p[:K]))
steps = st.lists(st.lists(rows, min_size=1, max_size=6), min_size=1, max_size=12)


class BruteForceLru:
    """Residents as a list, the most recent first; no slots, no arrays."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.recent: list[int] = []  # every expert ever used, the most recent first
        self.resident: set[int] = set()

    def step(self, step: list[list[int]]) -> int:
        """Run one step; returns the copies it makes."""
        distinct = {expert for row in step for expert in row}
        if len(distinct) <= self.cap:
            copies = len(distinct - self.resident)
            for row in step:
                self.touch(row)
            self.resident = set(self.recent[: self.cap]) & (self.resident | distinct)
            return copies
        copies = 0
        for row in step:
            copies += len(set(row) - self.resident)
            self.touch(row)
            self.resident = set(self.recent[: self.cap]) & (self.resident | set(row))
        return copies

    def touch(self, row: list[int]) -> None:
        for expert in sorted(row, reverse=True):
            if expert in self.recent:
                self.recent.remove(expert)
            self.recent.insert(0, expert)


def run(table: SlotTable, step: list[list[int]], memory: list[int | None]) -> int:
    """Carry out a step on ``memory`` (slot → expert whose weights it holds); returns the copies."""
    copies = 0
    covered = 0
    for batch in table.plan(np.array(step, dtype=np.int32)):
        assert batch.start == covered
        covered = batch.stop
        for expert, slot in batch.copies:
            assert 0 <= slot < table.cap
            memory[slot] = expert
        copies += len(batch.copies)
        found = [[memory[slot] for slot in slots] for slots in batch.slot_ids.tolist()]
        assert found == step[batch.start : batch.stop]  # every row finds its experts when its kernel call runs
    assert covered == len(step)
    table.check_integrity()
    return copies


@given(cap=st.integers(K, E), work=steps)
def test_equals_brute_force_lru(cap: int, work: list[list[list[int]]]) -> None:
    table, reference = SlotTable(E, cap), BruteForceLru(cap)
    memory: list[int | None] = [None] * E
    for step in work:
        assert run(table, step, memory) == reference.step(step)
        assert set(table.resident()) == reference.resident


@given(first=st.integers(K, E), second=st.integers(K, E), before=steps, after=steps)
def test_resize_keeps_the_most_recent(
    first: int, second: int, before: list[list[list[int]]], after: list[list[list[int]]]
) -> None:
    table, memory = SlotTable(E, first), [None] * E
    reference = BruteForceLru(first)
    for step in before:
        run(table, step, memory)
        reference.step(step)
    resident = set(table.resident())
    moves = table.set_cap(second)
    for source, target in moves:
        assert target < second <= source
        memory[target] = memory[source]
    memory[second:] = [None] * (E - second)
    table.check_integrity()
    assert set(table.resident()) == resident & set(reference.recent[:second])
    for expert in table.resident():
        assert memory[table.slot_of[expert]] == expert
    for step in after:
        run(table, step, memory)


def test_experts_of_the_running_step_are_pinned() -> None:
    table = SlotTable(num_experts=6, cap=3)
    table.plan(np.array([[0], [1], [2]]))
    (batch,) = table.plan(np.array([[3], [0], [1]]))  # expert 0 is the least recent, but this step needs it
    assert batch.copies == [(3, 2)]


def test_step_larger_than_the_cap_is_cut_where_it_must_be() -> None:
    table = SlotTable(num_experts=6, cap=3)
    batches = table.plan(np.array([[0, 1], [1, 2], [3, 4], [4, 5]]))
    assert [(batch.start, batch.stop) for batch in batches] == [(0, 2), (2, 4)]


def test_row_larger_than_the_cap_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 3 experts, but the cap is 2"):
        SlotTable(4, 2).plan(np.array([[0, 1, 2]]))


@pytest.mark.parametrize("cap", [0, 5])
def test_cap_outside_the_experts_is_refused(cap: int) -> None:
    with pytest.raises(ValueError, match=r"cap must be in 1\.\.4"):
        SlotTable(4, cap)
    with pytest.raises(ValueError, match=r"cap must be in 1\.\.4"):
        SlotTable(4, 2).set_cap(cap)


def test_integrity_notices_a_slot_used_twice_and_a_slot_above_the_cap() -> None:
    table = SlotTable(4, 2)
    table.plan(np.array([[0, 1]]))
    table.slot_of[1] = table.slot_of[0]
    with pytest.raises(IntegrityError, match="differ"):
        table.check_integrity()
    table = SlotTable(4, 2)
    table.expert_in[3] = 0
    with pytest.raises(IntegrityError, match="slot 3 is in use"):
        table.check_integrity()
