"""The device pager's reference against definitions that share no code with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wisp_core.pager.device.reference import NO_SLOT, PADDING_SLOT, LayerTable

Ids = npt.NDArray[np.int64]


@dataclass
class Replay:
    """LRU at one fixed cap, by definition: keep whole use histories and sort.

    More recent: later last use; if equal, later use before that, and so on; then the smaller id.
    """

    num_experts: int
    cap: int
    resident: set[int] = field(default_factory=set)
    uses: dict[int, tuple[int, ...]] = field(default_factory=dict)  # latest first
    num_steps: int = 0

    def step(self, needed: set[int]) -> tuple[list[int], list[int], set[int]]:
        """One step; returns missing experts that get a slot, those that get none, and the evicted."""
        by_recency = sorted(range(self.num_experts), key=lambda e: (self.uses.get(e, ()), -e), reverse=True)
        missing = [e for e in by_recency if e in needed and e not in self.resident]
        room = self.cap - len(needed & self.resident)
        admitted, overflow = missing[:room], missing[room:]
        unneeded = [e for e in by_recency if e in self.resident and e not in needed]
        num_kept = min(len(unneeded), room - len(admitted))
        evicted = set(unneeded[num_kept:])
        self.resident = (self.resident - evicted) | set(admitted)
        self.num_steps += 1
        for expert in needed:
            self.uses[expert] = (self.num_steps, *self.uses.get(expert, ()))
        return admitted, overflow, evicted


@st.composite
def steps(draw: st.DrawFn, max_rows: int = 4) -> tuple[int, int, list[Ids]]:
    """``(num_experts, top_k, ids of each step)``; ids are distinct within a row."""
    num_experts = draw(st.integers(2, 12))
    top_k = draw(st.integers(1, min(4, num_experts)))
    row = st.permutations(range(num_experts)).map(lambda order: order[:top_k])
    routed = draw(st.lists(st.lists(row, min_size=1, max_size=max_rows), min_size=1, max_size=12))
    return num_experts, top_k, [np.array(ids) for ids in routed]


@given(steps(), st.data())
def test_each_step_is_lru_by_definition(routed: tuple[int, int, list[Ids]], data: st.DataObject) -> None:
    num_experts, top_k, all_ids = routed
    cap = data.draw(st.integers(top_k, num_experts))
    table, replay = LayerTable(num_experts, cap), Replay(num_experts, cap)
    for ids in all_ids:
        before = dict(table.slot_of)
        plan = table.plan(ids)
        admitted, overflow, evicted = replay.step(set(ids.reshape(-1).tolist()))
        assert [e for e, slot in plan.misses if slot != NO_SLOT] == admitted
        assert [e for e, slot in plan.misses if slot == NO_SLOT] == overflow
        assert plan.num_copies == len(admitted)
        assert set(before) - set(table.slot_of) == evicted
        assert all(table.slot_of[e] == slot for e, slot in before.items() if e not in evicted)
        table.check_integrity()


@given(steps())
def test_predicted_curve_equals_replay_at_every_cap(routed: tuple[int, int, list[Ids]]) -> None:
    """Also where steps overflow, and whatever the cap was at which the distances were measured."""
    num_experts, top_k, all_ids = routed
    table = LayerTable(num_experts, top_k)
    for ids in all_ids:
        table.plan(ids)
    predicted = table.misses_by_cap()
    for cap in range(1, num_experts + 1):
        replay = Replay(num_experts, cap)
        copied = [replay.step(set(ids.reshape(-1).tolist())) for ids in all_ids]
        assert predicted[cap] == sum(len(admitted) + len(overflow) for admitted, overflow, _ in copied)
    assert predicted[0] == sum(len(np.unique(ids)) for ids in all_ids)


@given(steps(), st.data())
def test_slots_hold_what_the_slot_ids_say(routed: tuple[int, int, list[Ids]], data: st.DataObject) -> None:
    """Slots are played through as memory, with caps that change and moves that are carried out."""
    num_experts, top_k, all_ids = routed
    table = LayerTable(num_experts, data.draw(st.integers(top_k, num_experts)))
    memory: dict[int, int] = {}
    for ids in all_ids:
        if data.draw(st.booleans()):
            cap = data.draw(st.integers(top_k, num_experts))
            kept = [e for e in table.stack if e in table.slot_of][:cap]
            moves = table.set_cap(cap)
            assert not {source for source, _ in moves} & {target for _, target in moves}
            memory.update({target: memory[source] for source, target in moves})
            memory = {slot: expert for slot, expert in memory.items() if slot < cap}
            assert sorted(table.slot_of) == sorted(kept)
            table.check_integrity()
        hits = set(table.slot_of) & set(ids.reshape(-1).tolist())
        plan = table.plan(ids)
        copies = plan.misses[: plan.num_copies]
        assert not {memory.get(slot) for _, slot in copies} & hits, "a hit of this step was overwritten"
        memory.update({slot: expert for expert, slot in copies})
        assert all(slot < table.cap for slot in memory)
        overflow = {expert for expert, slot in plan.misses if slot == NO_SLOT}
        for at, slot_id in np.ndenumerate(plan.slot_ids):
            expert = int(ids[at])
            assert slot_id == num_experts + expert if expert in overflow else memory[int(slot_id)] == expert


@given(steps(), st.data())
def test_padding_changes_nothing(routed: tuple[int, int, list[Ids]], data: st.DataObject) -> None:
    num_experts, top_k, all_ids = routed
    cap = data.draw(st.integers(top_k, num_experts))
    clean, padded = LayerTable(num_experts, cap), LayerTable(num_experts, cap)
    garbage = (
        st.integers(-(2**31), 2**31 - 1) | st.sampled_from([NO_SLOT, num_experts]) | st.integers(0, num_experts - 1)
    )
    for ids in all_ids:
        padding = np.array(data.draw(st.lists(st.lists(garbage, min_size=top_k, max_size=top_k), max_size=3)))
        expected = clean.plan(ids)
        plan = padded.plan(np.concatenate((ids, padding.reshape(-1, top_k).astype(np.int64))), num_valid_rows=len(ids))
        assert plan.misses == expected.misses
        assert (plan.slot_ids[: len(ids)] == expected.slot_ids).all()
        assert (plan.slot_ids[len(ids) :] == PADDING_SLOT).all()
    assert (padded.stack, padded.slot_of, padded.decode) == (clean.stack, clean.slot_of, clean.decode)


@pytest.mark.parametrize("garbage", [-1, -(2**31), 8, 2**31 - 1])
def test_ids_outside_the_experts_are_ignored_in_real_rows_too(garbage: int) -> None:
    table = LayerTable(num_experts=8, cap=2)
    plan = table.plan(np.array([[3, garbage]]))
    assert plan.misses == [(3, 0)]
    assert plan.slot_ids.tolist() == [[0, PADDING_SLOT]]


@given(steps())
def test_look_up_leaves_the_working_set_alone(routed: tuple[int, int, list[Ids]]) -> None:
    num_experts, top_k, all_ids = routed
    table = LayerTable(num_experts, top_k)
    table.plan(all_ids[0])
    stack, slot_of, decode = list(table.stack), dict(table.slot_of), table.distances.tolist()
    for ids in all_ids:
        plan = table.look_up(ids)
        needed = set(ids.reshape(-1).tolist())
        assert {expert for expert, _ in plan.misses} == needed - set(slot_of)
        assert plan.num_copies == 0
        for at, slot_id in np.ndenumerate(plan.slot_ids):
            expert = int(ids[at])
            assert slot_id == slot_of.get(expert, num_experts + expert)
    assert (table.stack, table.slot_of, table.distances.tolist()) == (stack, slot_of, decode)
    assert table.streamed.steps == len(all_ids)


def test_counts() -> None:
    table = LayerTable(num_experts=6, cap=2)
    table.plan(np.array([[0, 1]]))
    table.plan(np.array([[1, 2], [2, 3]]))  # 1 is a hit, 2 and 3 missing, one of them gets the slot of 0
    counts = table.decode
    assert (counts.steps, counts.rows, counts.distinct) == (2, 3, 5)
    assert (counts.hits, counts.misses, counts.overflow) == (1, 4, 1)


def test_working_set_survives_a_shrink() -> None:
    table = LayerTable(num_experts=8, cap=4)
    for expert in (0, 1, 2, 3):
        table.plan(np.array([[expert]]))
    table.plan(np.array([[1]]))
    moves = table.set_cap(2)
    assert set(table.slot_of) == {1, 3}
    assert moves == [(3, 0)]
    assert table.plan(np.array([[1, 3]])).misses == []


@pytest.mark.parametrize("cap", [0, -1, 9])
def test_caps_out_of_range_are_refused(cap: int) -> None:
    with pytest.raises(ValueError, match=r"cap must be in 1\.\.8"):
        LayerTable(num_experts=8, cap=cap)
    with pytest.raises(ValueError, match=r"cap must be in 1\.\.8"):
        LayerTable(num_experts=8, cap=4).set_cap(cap)
