"""The balloon on vLLM's own block pool, under any order of allocations, takes and gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine_fixtures  # noqa: F401  first: imports vLLM without its warnings
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool

from wisp_core.engine.block_balloon import BlockBalloon
from wisp_core.errors import IntegrityError

NUM_BLOCKS, GROUP = 24, 3


def fresh(watermark: float = 0.0) -> tuple[Any, BlockBalloon]:
    pool = BlockPool(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=16)
    balloon = BlockBalloon(SimpleNamespace(block_pool=pool, watermark_blocks=0), watermark=watermark)
    balloon.configure(GROUP)
    return pool, balloon


STEPS = st.lists(st.tuples(st.sampled_from(["take", "give", "alloc", "free"]), st.integers(1, 9)), max_size=40)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_blocks_are_conserved(steps: list[tuple[str, int]]) -> None:
    pool, balloon = fresh()
    held: list[Any] = []
    for step, number in steps:
        if step == "take":
            balloon.take(balloon.available_groups()[:number])
        elif step == "give":
            balloon.give(balloon.taken[:number])
        elif step == "alloc" and number <= pool.get_num_free_blocks():
            held += pool.get_new_blocks(number)
        elif step == "free":
            pool.free_blocks(held[:number])
            held = held[number:]
        balloon.check_integrity()
        assert balloon.used_blocks == len(held)
        assert balloon.usable_blocks == NUM_BLOCKS - 1 - GROUP * len(balloon.taken)
        taken = {block for group in balloon.taken for block in range(group * GROUP, (group + 1) * GROUP)}
        assert not taken & {block.block_id for block in held}
        assert 0 not in taken


def test_a_group_with_a_block_in_use_cannot_be_taken() -> None:
    pool, balloon = fresh()
    (block,) = pool.get_new_blocks(1)
    group = block.block_id // GROUP
    assert group not in balloon.available_groups()
    with pytest.raises(IntegrityError, match="not all free"):
        balloon.take([group or 1, 0])
    assert balloon.taken == []


def test_what_was_not_taken_cannot_be_given() -> None:
    _, balloon = fresh()
    balloon.take([2])
    with pytest.raises(IntegrityError, match=r"\[5\] are not out of the pool"):
        balloon.give([2, 5])
    assert balloon.taken == [2]


def test_the_watermark_follows_the_pool() -> None:
    pool = BlockPool(num_gpu_blocks=NUM_BLOCKS, enable_caching=True, hash_block_size=16)
    manager = SimpleNamespace(block_pool=pool, watermark_blocks=12)
    balloon = BlockBalloon(manager, watermark=0.5)
    balloon.configure(GROUP)
    balloon.take(balloon.available_groups()[:4])
    assert manager.watermark_blocks == 6
    balloon.give(balloon.taken)
    assert manager.watermark_blocks == 12


def test_a_taken_block_that_is_freed_behind_the_balloon_is_found() -> None:
    pool, balloon = fresh()
    balloon.take([3])
    pool.free_blocks([pool.blocks[3 * GROUP]])
    with pytest.raises(IntegrityError, match="also in use"):
        balloon.check_integrity()


@pytest.mark.parametrize("group_blocks", [5, 2])
def test_the_group_size_is_set_once_and_divides_the_pool(group_blocks: int) -> None:
    _, balloon = fresh()
    with pytest.raises(ValueError, match="group_blocks"):
        balloon.configure(group_blocks)
