"""The split that an engine starts with."""

from __future__ import annotations

import pytest
from resize_fake_engine import BUDGET_BYTES, LAYOUT, PAGE

from wisp_core.contracts import Split
from wisp_core.errors import ConfigurationError
from wisp_core.memory.initial_split import initial_split


def test_half_of_the_budget_goes_to_experts() -> None:
    assert initial_split(LAYOUT, budget_bytes=BUDGET_BYTES, cap=None) == Split(cap=5, kv_blocks=19)


def test_a_configured_cap_leaves_the_rest_to_kv() -> None:
    assert initial_split(LAYOUT, budget_bytes=BUDGET_BYTES, cap=3) == Split(cap=3, kv_blocks=27)


def test_half_of_a_small_budget_still_holds_the_smallest_cap() -> None:
    assert initial_split(LAYOUT, budget_bytes=14 * PAGE, cap=None) == Split(cap=2, kv_blocks=5)


def test_a_cap_that_leaves_too_little_kv_is_refused_with_one_that_fits() -> None:
    with pytest.raises(ConfigurationError, match=r"κ_min of 4 KV blocks .* the largest cap that does is 2"):
        initial_split(LAYOUT, budget_bytes=14 * PAGE, cap=3)


def test_a_budget_without_room_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="raise vram_budget_bytes"):
        initial_split(LAYOUT, budget_bytes=13 * PAGE, cap=None)


def test_a_large_budget_does_not_go_beyond_the_experts_there_are() -> None:
    split = initial_split(LAYOUT, budget_bytes=1000 * PAGE, cap=None)
    assert split == Split(cap=8, kv_blocks=LAYOUT.max_kv_blocks)
