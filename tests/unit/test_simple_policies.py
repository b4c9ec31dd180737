"""The policies that mv_wsa is compared with."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_snapshots import PAGE, make_snapshot, wants_experts, wants_kv

from policies.fifty_fifty import FiftyFifty
from policies.kv_peak import KvPeak
from policies.oracle import Oracle
from policies.registry import AnyPolicy, load_policy
from policies.working_set_proportional import WorkingSetProportional
from wisp_core.allocation.solver import feasible_splits, violations
from wisp_core.contracts import KvDemand, ReplicaSnapshot, ReuseBin, Split
from wisp_core.errors import ConfigurationError

NAMES = ["fifty_fifty", "working_set_proportional", "kv_peak"]


def split_of(policy: AnyPolicy, snapshot: ReplicaSnapshot) -> Split:
    split: Split = policy.decide(snapshot, policy.initial_state())[0].split
    return split


def test_half_of_the_budget_is_half_for_experts_whatever_the_work() -> None:
    for work in (wants_experts, wants_kv):
        assert split_of(FiftyFifty(), work()).cap == 5
    assert make_snapshot().layout.experts_bytes_by_cap[5] <= 21 * PAGE < make_snapshot().layout.experts_bytes_by_cap[6]


def test_kv_peak_leaves_peak_and_headroom_and_gives_the_rest_to_experts() -> None:
    snapshot = make_snapshot(kv=KvDemand(demand_blocks=60, floor_blocks=8))
    assert split_of(KvPeak(headroom_fraction=0.0), snapshot).cap == 6
    assert split_of(KvPeak(headroom_fraction=0.25), snapshot).cap == 5
    assert split_of(KvPeak(), snapshot).kv_blocks >= 75


def test_kv_peak_does_not_count_cached_prefixes() -> None:
    reuse = (ReuseBin(blocks=110, turns_per_s=1.0, tokens_per_s=500.0),)
    cached = make_snapshot(kv=KvDemand(demand_blocks=20, floor_blocks=8, reuse=reuse))
    assert split_of(KvPeak(), cached).cap == 8


def test_kv_peak_beyond_the_budget_gives_the_smallest_cap() -> None:
    decision, _ = KvPeak().decide(make_snapshot(kv=KvDemand(demand_blocks=500, floor_blocks=8)), None)
    assert decision.split.cap == 2
    assert "as many as it can" in decision.reason


def test_working_sets_share_the_budget_in_proportion() -> None:
    knee = (20.0, 20.0, 20.0, 8.0, 1.0, 0.5, 0.2, 0.1, 0.0)  # 90 % of what can be avoided is avoided at 4
    near, far = (ReuseBin(blocks=b, turns_per_s=1, tokens_per_s=t) for b, t in ((40, 95.0), (100, 5.0)))
    kv = KvDemand(demand_blocks=16, floor_blocks=8, reuse=(near, far))
    snapshot = make_snapshot(decode_misses_by_cap=knee, kv=kv)
    layout = snapshot.layout
    share = layout.experts_bytes_by_cap[4] / (layout.experts_bytes_by_cap[4] + layout.kv_bytes(40))
    split = split_of(WorkingSetProportional(), snapshot)
    assert layout.experts_bytes_by_cap[split.cap] <= share * snapshot.budget_bytes
    assert layout.experts_bytes_by_cap[split.cap + 1] > share * snapshot.budget_bytes


def test_without_a_curve_there_is_no_working_set() -> None:
    assert split_of(WorkingSetProportional(), make_snapshot(decode_misses_by_cap=())) == make_snapshot().split


def test_the_oracle_takes_what_is_truly_cheapest_and_is_refused_where_nothing_is_known() -> None:
    oracle = Oracle(cost=lambda snapshot, split: abs(split.cap - 3.0))
    assert split_of(oracle, wants_experts()).cap == 3
    with pytest.raises(ConfigurationError, match=r"`wisp simulate compare` runs it"):
        load_policy("oracle", {})


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("kv_peak", {"headroom_fraction": -0.1}, r"policy\.settings\.headroom_fraction"),
        ("working_set_proportional", {"coverage": 0.0}, r"policy\.settings\.coverage"),
        ("fifty_fifty", {"cap": 4}, r"policy\.settings\.cap: unknown setting"),
        ("mv_wsa", {"horizon_s": 0.0}, r"policy\.settings\.horizon_s"),
    ],
)
def test_wrong_settings_are_named(name: str, settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        load_policy(name, settings)


@given(
    name=st.sampled_from([*NAMES, "mv_wsa"]),
    now=st.integers(2, 8),
    decode=st.lists(st.floats(0, 50), min_size=9, max_size=9),
    demand=st.integers(0, 400),
    floor=st.integers(0, 140),
    reuse=st.lists(st.tuples(st.integers(0, 150), st.floats(0, 1e4)), max_size=4),
    budget_pages=st.integers(0, 70),
)
def test_every_answer_is_feasible_or_a_hold(
    name: str, now: int, decode: list[float], demand: int, floor: int, reuse: list[tuple[int, float]], budget_pages: int
) -> None:
    bins = tuple(ReuseBin(blocks=b, turns_per_s=1, tokens_per_s=t, passes_per_s=t / 100) for b, t in sorted(reuse))
    snapshot = make_snapshot(
        split=Split(cap=now, kv_blocks=20),
        decode_misses_by_cap=tuple(decode),
        kv=KvDemand(mean_turns=2, demand_blocks=demand, floor_blocks=floor, prompt_passes_per_s=1.0, reuse=bins),
        budget_bytes=budget_pages * PAGE,
    )
    split = split_of(load_policy(name, {}), snapshot)
    assert split == snapshot.split or violations(snapshot, split) == []
    assert split in [snapshot.split, *feasible_splits(snapshot)]
