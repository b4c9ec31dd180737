"""The arena's conservation: free + used = total, nothing counted twice, failures change nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wisp_core.errors import CapacityError, IntegrityError
from wisp_core.memory.arena import Arena

PAGE = 4096


def arena(pages: int = 10, group_pages: int = 2) -> Arena:
    return Arena(budget_bytes=pages * PAGE + 17, page_bytes=PAGE, kv_group_bytes=group_pages * PAGE)


def test_a_part_of_a_page_is_not_used() -> None:
    assert arena(pages=3).free_bytes == 3 * PAGE


def test_expert_bytes_round_up_to_pages() -> None:
    pool = arena()
    pool.set_expert_bytes(PAGE + 1)
    assert (pool.expert_bytes, pool.free_bytes) == (2 * PAGE, 8 * PAGE)


def test_pages_move_from_experts_to_kv_and_back() -> None:
    pool = arena()
    pool.set_expert_bytes(8 * PAGE)
    pool.add_kv_groups([0])
    with pytest.raises(CapacityError, match="8192 too few"):
        pool.add_kv_groups([1])
    pool.set_expert_bytes(4 * PAGE)
    pool.add_kv_groups([1, 5])
    assert (pool.expert_bytes, pool.kv_bytes, pool.free_bytes) == (4 * PAGE, 6 * PAGE, 0)
    pool.remove_kv_groups([1, 5])
    pool.set_expert_bytes(8 * PAGE)
    pool.check_integrity()
    assert pool.kv_groups == {0}


def test_a_refused_growth_changes_nothing() -> None:
    pool = arena()
    pool.set_expert_bytes(7 * PAGE)
    with pytest.raises(CapacityError):
        pool.set_expert_bytes(11 * PAGE)
    with pytest.raises(CapacityError):
        pool.add_kv_groups([3, 4])
    assert (pool.expert_bytes, pool.kv_bytes, pool.free_bytes) == (7 * PAGE, 0, 3 * PAGE)
    pool.check_integrity()


@pytest.mark.parametrize("groups", [[1], [2, 2]])
def test_a_group_is_never_counted_twice(groups: list[int]) -> None:
    pool = arena()
    pool.add_kv_groups([1])
    with pytest.raises(IntegrityError, match="twice"):
        pool.add_kv_groups(groups)
    pool.check_integrity()


@pytest.mark.parametrize("groups", [[2], [1, 1]])
def test_a_group_without_pages_cannot_be_freed(groups: list[int]) -> None:
    pool = arena()
    pool.add_kv_groups([1])
    with pytest.raises(IntegrityError, match="without pages"):
        pool.remove_kv_groups(groups)
    assert pool.kv_bytes == 2 * PAGE


def test_residency_beyond_what_is_accounted_is_found() -> None:
    pool = arena()
    pool.set_expert_bytes(PAGE)
    pool.add_kv_groups([0])
    pool.check_integrity(resident_expert_bytes=PAGE, resident_kv_bytes=2 * PAGE)
    with pytest.raises(IntegrityError, match="experts: 8192 bytes resident, 4096 accounted"):
        pool.check_integrity(resident_expert_bytes=2 * PAGE)
    with pytest.raises(IntegrityError, match="KV: 12288 bytes resident"):
        pool.check_integrity(resident_kv_bytes=3 * PAGE)


def test_lost_pages_are_found() -> None:
    pool = arena()
    pool.set_expert_bytes(4 * PAGE)
    pool._kv_groups.add(7)
    with pytest.raises(IntegrityError, match="free 6 \\+ used 6 pages != total 10"):
        pool.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["experts", "add", "remove"]), st.integers(0, 12)), max_size=40))
def test_any_sequence_keeps_the_total(steps: list[tuple[str, int]]) -> None:
    pool = arena()
    for step, number in steps:
        try:
            if step == "experts":
                pool.set_expert_bytes(number * PAGE)
            elif step == "add":
                pool.add_kv_groups([number])
            else:
                pool.remove_kv_groups([number])
        except (CapacityError, IntegrityError):
            pass
        pool.check_integrity()
        assert pool.free_bytes + pool.expert_bytes + pool.kv_bytes == 10 * PAGE
