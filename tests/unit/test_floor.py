from __future__ import annotations

from policy_snapshots import make_layout, make_snapshot

from wisp_core.allocation.floor import floor_blocks
from wisp_core.contracts import KvDemand


def test_a_replica_that_reports_too_small_a_floor_still_keeps_one_longest_request() -> None:
    snapshot = make_snapshot(layout=make_layout(max_model_len=161), kv=KvDemand(floor_blocks=3))
    assert floor_blocks(snapshot) == 11


def test_admitted_turns_raise_the_floor() -> None:
    assert floor_blocks(make_snapshot(kv=KvDemand(floor_blocks=33))) == 33
