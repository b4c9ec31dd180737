from __future__ import annotations

import pytest
from policy_snapshots import make_layout, make_snapshot

from wisp_core.allocation.floor import admission_floor_blocks, floor_blocks
from wisp_core.contracts import KvDemand


@pytest.mark.parametrize(
    ("turn_tokens", "blocks"),
    [
        ((), 7),  # ceil(100 / 16): one longest request, though nothing is admitted
        ((16, 16), 7),
        ((60, 60), 8),  # 4 + 4, each turn rounded up by itself
        ((1,) * 9, 9),
    ],
)
def test_floor_is_the_longest_request_or_all_admitted_turns(turn_tokens: tuple[int, ...], blocks: int) -> None:
    assert admission_floor_blocks(max_model_len=100, block_tokens=16, turn_tokens=turn_tokens) == blocks


def test_a_replica_that_reports_too_small_a_floor_still_keeps_one_longest_request() -> None:
    snapshot = make_snapshot(layout=make_layout(max_model_len=161), kv=KvDemand(floor_blocks=3))
    assert floor_blocks(snapshot) == 11


def test_admitted_turns_raise_the_floor() -> None:
    assert floor_blocks(make_snapshot(kv=KvDemand(floor_blocks=33))) == 33
