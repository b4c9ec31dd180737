"""Stack distances of prefix blocks."""

from __future__ import annotations

import math

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
    """Forgets so slowly that rates over 10 s are counts over 10."""
    return PrefixReuse(max_blocks=max_blocks, block_tokens=16, pass_tokens=64, memory_s=1e9)


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
    assert [b.blocks for b in bins] == [1, 2, 3, 4]
    assert [b.tokens_per_s for b in bins] == pytest.approx([1.6] * 4)
    assert [b.turns_per_s for b in bins] == pytest.approx([0, 0, 0, 0.1])


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


def test_old_turns_fade() -> None:
    meter = PrefixReuse(max_blocks=64, block_tokens=16, pass_tokens=64, memory_s=10.0)
    meter.admit(blocks("a", 2), now_s=0.0)
    meter.admit(blocks("a", 2), now_s=0.0)
    fresh = sum(b.tokens_per_s for b in meter.bins(0.0, 1e9))
    assert fresh * 10 == pytest.approx(32)
    assert sum(b.tokens_per_s for b in meter.bins(10.0, 1e9)) == pytest.approx(fresh / math.e)
    assert meter.bins(200.0, 1e9) == ()


def test_a_turn_needs_one_pass_anyhow() -> None:
    meter = reuse()
    meter.admit(blocks("a", 3), now_s=0.0)
    meter.admit(blocks("a", 3), now_s=0.0, num_reusable=3, prompt_tokens=60)  # 12 tokens remain: one pass, as without
    assert [b.passes_per_s for b in meter.bins(1.0, 10.0)] == [0, 0, 0]


def test_a_long_prefix_saves_the_passes_that_its_length_takes() -> None:
    meter = reuse()
    meter.admit(blocks("a", 16), now_s=0.0)
    meter.admit(blocks("a", 16), now_s=0.0, prompt_tokens=260)  # 5 passes of 64 without a cache, 1 with all of it
    bins = meter.bins(1.0, 10.0)
    assert sum(b.passes_per_s for b in bins) * 10 == pytest.approx(4)
    assert all(b.passes_per_s >= 0 for b in bins)


def test_memory_is_bounded() -> None:
    meter = reuse(max_blocks=8)
    meter.admit(blocks("a", 8), now_s=0.0)
    meter.admit(blocks("b", 8), now_s=0.0)
    meter.admit(blocks("a", 8), now_s=0.0)
    assert meter.bins(1.0, 10.0) == ()
