"""Geometry of KV groups, and which of them go first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_snapshots import make_layout

from wisp_core.errors import ConfigurationError
from wisp_core.memory.balloon import (
    KvGeometry,
    KvPlacement,
    free_groups,
    group_blocks_of,
)

PAGE = 4096


def layer_outer(num_blocks: int, stride: int, layers: int = 2, page: int = PAGE) -> KvGeometry:
    placement = KvPlacement(offset=0, layer_stride=num_blocks * stride, block_stride=stride, num_layers=layers)
    return KvGeometry.of([placement], num_blocks=num_blocks, page_bytes=page)


@pytest.mark.parametrize(
    ("stride", "page", "group"),
    [(4096, 4096, 1), (16384, 4096, 1), (6144, 4096, 2), (1024, 4096, 4), (1 << 20, 2 << 20, 2)],
)
def test_a_group_is_the_least_number_of_blocks_on_whole_pages(stride: int, page: int, group: int) -> None:
    assert group_blocks_of([stride], page) == group
    assert group * stride % page == 0


def test_layer_outermost_blocks_have_a_range_per_layer_and_neighbours_are_joined() -> None:
    geometry = layer_outer(num_blocks=8, stride=6144)
    assert (geometry.group_blocks, geometry.num_groups, geometry.group_bytes) == (2, 4, 2 * 2 * 6144)
    assert geometry.ranges([1, 3, 2]) == [(12288, 49152), (61440, 98304)]


def test_block_outermost_layers_share_one_range() -> None:
    placement = KvPlacement(offset=0, layer_stride=1024, block_stride=3072, num_layers=3)
    geometry = KvGeometry.of([placement], num_blocks=8, page_bytes=PAGE)
    assert (geometry.group_blocks, geometry.block_bytes) == (4, 3072)
    assert geometry.ranges([1]) == [(12288, 24576)]


def test_groups_that_overlay_each_other_count_once() -> None:
    placement = KvPlacement(offset=0, layer_stride=8 * PAGE, block_stride=PAGE, num_layers=2)
    geometry = KvGeometry.of([placement, placement], num_blocks=8, page_bytes=PAGE)
    assert geometry.block_bytes == 2 * PAGE


def test_pages_shared_between_groups_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="7 blocks does not divide into groups of 2"):
        layer_outer(num_blocks=7, stride=6144)


def test_overlapping_tensors_of_different_strides_are_refused() -> None:
    small = KvPlacement(offset=0, layer_stride=8 * PAGE, block_stride=PAGE, num_layers=1)
    large = KvPlacement(offset=4 * PAGE, layer_stride=16 * PAGE, block_stride=2 * PAGE, num_layers=1)
    with pytest.raises(ConfigurationError, match="hybrid"):
        KvGeometry.of([small, large], num_blocks=8, page_bytes=PAGE)


@given(
    groups=st.sets(st.integers(0, 15), min_size=1),
    stride=st.sampled_from([1024, 2048, 6144, 4096, 12288]),
    layers=st.integers(1, 3),
)
def test_ranges_cover_each_byte_of_the_groups_once(groups: set[int], stride: int, layers: int) -> None:
    group_blocks = group_blocks_of([stride], PAGE)
    geometry = layer_outer(num_blocks=16 * group_blocks, stride=stride, layers=layers)
    covered = [page for start, stop in geometry.ranges(groups) for page in range(start, stop, PAGE)]
    assert len(covered) == len(set(covered)) == len(groups) * geometry.group_bytes // PAGE
    assert all(page % PAGE == 0 for page in covered)
    other = set(range(16)) - groups
    assert not set(covered) & {p for start, stop in geometry.ranges(other) for p in range(start, stop, PAGE)}


def test_usable_blocks_leave_out_the_null_block() -> None:
    layout = make_layout(kv_group_blocks=4)
    assert [layout.groups_for_blocks(blocks) for blocks in (0, 3, 4, 7)] == [1, 1, 2, 2]
    assert layout.usable_blocks(2) == 7


def test_uncached_groups_go_first_then_the_least_recently_used() -> None:
    # vLLM evicts from the left. Groups of two: 4 is uncached, 2 was used last, 1 before it, 3 has a block in use.
    are_cached = [False, False, True, True, True, True, True]
    assert free_groups([8, 9, 2, 4, 3, 5, 7], are_cached, 2) == [4, 1, 2]


def test_the_null_group_never_goes() -> None:
    assert free_groups([1, 2, 3], [False] * 3, 2) == [1]
    assert free_groups([1, 0], [False] * 2, 2) == []


def test_no_free_block_is_no_free_group() -> None:
    assert free_groups([], [], 2) == []


def test_a_group_is_as_valuable_as_its_most_valuable_block() -> None:
    assert free_groups([2, 4, 5, 3], [False, True, True, True], 2) == [2, 1]
