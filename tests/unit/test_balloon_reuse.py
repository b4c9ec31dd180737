"""Stack distances of prefix blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wisp_core.memory.kv_reuse import PrefixReuse, StackDistances


@given(st.lists(st.integers(0, 9), max_size=80), st.integers(1, 6))
def test_distances_are_places_in_the_lru_stack(keys: list[int], max_keys: int) -> None:
    stack: list[int] = []
    distances = StackDistances(max_keys)
    for key in keys:
        expected = stack.index(key) + 1 if key in stack else None
        assert distances.distance(key) == expected
        distances.touch(key)
        stack = [key, *(other for other in stack if other != key)][:max_keys]
        assert len(distances) == len(stack)


def reuse(max_blocks: int = 1024) -> PrefixReuse:
    return PrefixReuse(max_blocks=max_blocks, block_tokens=16, window_s=10.0)


def blocks(name: str, count: int) -> list[tuple[str, int]]:
    return [(name, i) for i in range(count)]


def test_a_first_turn_reuses_nothing() -> None:
    meter = reuse()
    meter.admit(blocks("a", 5), now_s=0.0)
    assert meter.bins(1.0, 10.0) == ()


def test_a_turn_again_at_once_needs_its_own_blocks() -> None:
    meter = reuse()
    meter.admit(blocks("a", 4), now_s=0.0)
    meter.admit(blocks("a", 4), now_s=0.0)
    bins = meter.bins(1.0, 10.0)
    assert [(b.blocks, b.tokens_per_s) for b in bins] == [(1, 1.6), (2, 1.6), (3, 1.6), (4, 1.6)]
    assert [b.turns_per_s for b in bins] == [0, 0, 0, 0.1]


def test_other_work_in_between_adds_to_the_distance() -> None:
    meter = reuse()
    meter.admit(blocks("a", 4), now_s=0.0)
    meter.admit(blocks("b", 100), now_s=0.0)
    meter.admit(blocks("a", 4), now_s=0.0)
    (only,) = meter.bins(1.0, 10.0)
    assert 104 <= only.blocks <= 104 * 1.2
    assert only.tokens_per_s * 10 == pytest.approx(64)


def test_a_prefix_needs_every_block_before_it() -> None:
    meter = reuse()
    chain = blocks("a", 3)
    meter.admit(chain, now_s=0.0)
    meter.touch(blocks("b", 50))
    meter.touch(chain[1:])  # the head is far away, so the rest helps no sooner
    meter.admit(chain, now_s=0.0)
    (only,) = meter.bins(1.0, 10.0)
    assert only.blocks >= 53


def test_a_chain_ends_at_the_first_unknown_block() -> None:
    meter = reuse()
    meter.admit(blocks("a", 2), now_s=0.0)
    meter.admit([*blocks("a", 2), ("new", 0), *blocks("a", 1)], now_s=0.0)
    assert sum(b.tokens_per_s for b in meter.bins(1.0, 10.0)) * 10 == pytest.approx(32)


def test_the_last_token_is_computed_anyhow() -> None:
    meter = reuse()
    meter.admit(blocks("a", 2), now_s=0.0)
    meter.admit(blocks("a", 2), now_s=0.0, num_reusable=1)
    assert sum(b.tokens_per_s for b in meter.bins(1.0, 10.0)) * 10 == pytest.approx(16)


def test_old_turns_leave_the_window() -> None:
    meter = reuse()
    meter.admit(blocks("a", 2), now_s=0.0)
    meter.admit(blocks("a", 2), now_s=0.0)
    assert meter.bins(9.0, 100.0)
    assert meter.bins(10.5, 100.0) == ()


def test_memory_is_bounded() -> None:
    meter = reuse(max_blocks=8)
    meter.admit(blocks("a", 8), now_s=0.0)
    meter.admit(blocks("b", 8), now_s=0.0)
    meter.admit(blocks("a", 8), now_s=0.0)
    assert meter.bins(1.0, 10.0) == ()
