from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_snapshots import PAGE, make_layout, make_snapshot

from wisp_core.allocation.floor import floor_blocks
from wisp_core.allocation.solver import Rule, clamp, explain_infeasible, feasible_splits, solve, violations
from wisp_core.contracts import KvDemand, MemoryLayout, ReplicaSnapshot, Split

Cost = Callable[[Split], float]


@st.composite
def layouts(draw: st.DrawFn) -> MemoryLayout:
    """Any sizes; the experts' table grows by whole pages, not evenly."""
    num_experts = draw(st.integers(2, 12))
    steps = draw(st.lists(st.integers(0, 9), min_size=num_experts, max_size=num_experts))
    table = [0]
    for step in steps:
        table.append(table[-1] + step * PAGE)
    return make_layout(
        num_experts=num_experts,
        min_cap=draw(st.integers(1, num_experts)),
        experts_bytes_by_cap=tuple(table),
        block_bytes=PAGE // draw(st.sampled_from([1, 2, 4])),
        kv_group_blocks=draw(st.sampled_from([1, 4, 8])),
        max_kv_blocks=draw(st.integers(1, 60)),
        max_model_len=draw(st.integers(1, 200)),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> ReplicaSnapshot:
    layout = draw(layouts())
    return make_snapshot(
        layout=layout,
        budget_bytes=draw(st.integers(0, 140)) * PAGE,
        split=Split(cap=draw(st.integers(1, layout.num_experts)), kv_blocks=draw(st.integers(0, layout.max_kv_blocks))),
        kv=KvDemand(floor_blocks=draw(st.integers(0, 40))),
    )


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    """Any function of the cap, cliffs and bumps included, plus any that never grows with KV blocks."""
    by_cap = draw(st.lists(st.integers(0, 50), min_size=13, max_size=13))
    drops = draw(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 50)), max_size=4))
    return lambda split: float(by_cap[split.cap] + sum(height for blocks, height in drops if split.kv_blocks < blocks))


def every_allowed_split(snapshot: ReplicaSnapshot) -> list[Split]:
    """By the rules' own words, without the code under test."""
    layout = snapshot.layout
    return [
        Split(cap=cap, kv_blocks=blocks)
        for cap in range(layout.min_cap, layout.num_experts + 1)
        for blocks in range(floor_blocks(snapshot), layout.max_kv_blocks + 1)
        if layout.experts_bytes_by_cap[cap] + layout.kv_bytes(blocks) <= snapshot.budget_bytes
    ]


@given(snapshots(), costs())
def test_equals_brute_force_over_all_pairs(snapshot: ReplicaSnapshot, cost: Cost) -> None:
    allowed = every_allowed_split(snapshot)
    solution = solve(snapshot, cost)
    if solution is None:
        assert allowed == []
        assert "infeasible" in explain_infeasible(snapshot)
    else:
        assert solution.cost == cost(solution.split) == min(map(cost, allowed))


@given(snapshots(), costs())
def test_never_above_budget_nor_below_the_floor(snapshot: ReplicaSnapshot, cost: Cost) -> None:
    solution = solve(snapshot, cost)
    if solution is not None:
        assert solution.split in every_allowed_split(snapshot)
        assert violations(snapshot, solution.split) == []


@given(snapshots(), costs())
def test_solving_again_at_the_answer_changes_nothing(snapshot: ReplicaSnapshot, cost: Cost) -> None:
    solution = solve(snapshot, cost)
    if solution is not None:
        assert solve(snapshot.model_copy(update={"split": solution.split}), cost) == solution


@given(snapshots(), costs())
def test_no_exchange_of_up_to_one_granule_improves_it(snapshot: ReplicaSnapshot, cost: Cost) -> None:
    """A granule is one cap, or as many whole KV groups as lie in one cap: the least that can change hands."""
    solution = solve(snapshot, cost)
    if solution is None:
        return
    layout, split = snapshot.layout, solution.split
    table = layout.experts_bytes_by_cap
    for cap in (split.cap - 1, split.cap, split.cap + 1):
        if not layout.min_cap <= cap <= layout.num_experts:
            continue
        groups = abs(table[cap] - table[split.cap]) // (layout.kv_group_blocks * layout.block_bytes) + 1
        for moved in range(-groups, groups + 1):
            exchanged = Split(cap=cap, kv_blocks=max(0, split.kv_blocks + moved * layout.kv_group_blocks))
            if violations(snapshot, exchanged) == []:
                assert cost(exchanged) >= solution.cost


@given(snapshots(), costs())
def test_whole_pages_slots_and_groups_change_hands(snapshot: ReplicaSnapshot, cost: Cost) -> None:
    solution = solve(snapshot, cost)
    if solution is not None and solution.split.kv_blocks < snapshot.layout.max_kv_blocks:
        layout = snapshot.layout
        assert (solution.split.kv_blocks + 1) % layout.kv_group_blocks == 0
        left_bytes = snapshot.budget_bytes - layout.pool_bytes(solution.split)
        assert left_bytes < layout.kv_group_blocks * layout.block_bytes, "nothing that could be used is left over"


@given(snapshots(), costs(), st.integers(0, 60))
def test_a_larger_budget_never_costs_more(snapshot: ReplicaSnapshot, cost: Cost, more_pages: int) -> None:
    larger = snapshot.model_copy(update={"budget_bytes": snapshot.budget_bytes + more_pages * PAGE})
    solution, with_more = solve(snapshot, cost), solve(larger, cost)
    if solution is not None:
        assert with_more is not None
        assert with_more.cost <= solution.cost


@given(snapshots(), st.integers(0, 40), st.integers(0, 200))
def test_clamp_gives_a_feasible_split_and_keeps_feasible_ones(snapshot: ReplicaSnapshot, cap: int, blocks: int) -> None:
    clamped = clamp(snapshot, Split(cap=cap, kv_blocks=blocks))
    if clamped is None:
        assert every_allowed_split(snapshot) == []
        return
    assert clamped in every_allowed_split(snapshot)
    assert clamp(snapshot, clamped) == clamped
    assert all(clamp(snapshot, split) == split for split in feasible_splits(snapshot))


@given(snapshots(), st.integers(0, 14), st.integers(0, 80))
def test_violations_are_exactly_what_is_not_allowed(snapshot: ReplicaSnapshot, cap: int, blocks: int) -> None:
    split = Split(cap=cap, kv_blocks=blocks)
    assert (violations(snapshot, split) == []) == (split in every_allowed_split(snapshot))


def test_a_cliff_is_found_where_every_single_step_towards_it_costs() -> None:
    snapshot = make_snapshot(budget_bytes=48 * PAGE)
    cliff = (9.0, 9.0, 8.0, 8.1, 8.2, 8.3, 8.4, 0.0, 0.5)  # the union fits at 7
    solution = solve(snapshot, lambda split: cliff[split.cap])
    assert solution is not None
    assert solution.split.cap == 7


def test_kv_gets_everything_beside_the_cap() -> None:
    snapshot = make_snapshot(budget_bytes=40 * PAGE)
    assert [s.cap for s in feasible_splits(snapshot)] == [2, 3, 4, 5, 6, 7, 8]
    assert {snapshot.layout.pool_bytes(s) for s in feasible_splits(snapshot)} == {40 * PAGE}


@pytest.mark.parametrize(
    ("split", "rule"),
    [
        (Split(cap=1, kv_blocks=20), Rule.CAP_RANGE),
        (Split(cap=9, kv_blocks=20), Rule.CAP_RANGE),
        (Split(cap=2, kv_blocks=128), Rule.KV_RANGE),
        (Split(cap=4, kv_blocks=107), Rule.OVER_BUDGET),
        (Split(cap=4, kv_blocks=7), Rule.BELOW_FLOOR),
    ],
)
def test_a_violation_names_its_rule_and_numbers(split: Split, rule: Rule) -> None:
    found = violations(make_snapshot(), split)
    assert found[0].rule is rule
    assert any(character.isdigit() for character in found[0].message)


def test_infeasible_is_explained_with_all_numbers() -> None:
    snapshot = make_snapshot(budget_bytes=9 * PAGE)
    assert solve(snapshot, lambda _: 0.0) is None
    text = explain_infeasible(snapshot)
    assert all(str(number) in text for number in (8, 12288, 8 * PAGE, 8 * PAGE + 12288, 9 * PAGE))


def test_marginals_are_savings_per_byte_of_the_next_cap() -> None:
    snapshot = make_snapshot()
    by_cap = (90.0, 80.0, 70.0, 60.0, 10.0, 8.0, 8.0, 8.0, 8.0)
    solution = solve(snapshot, lambda s: by_cap[s.cap] + (127 - s.kv_blocks) * 0.5)
    assert solution is not None
    assert solution.split.cap == 4
    assert solution.marginals.experts_s_per_byte == pytest.approx(2.0 / (4 * PAGE))
    assert solution.marginals.kv_s_per_byte == pytest.approx(0.5 / (PAGE // 4))


def test_at_a_smooth_optimum_a_byte_is_worth_the_same_in_both_pools() -> None:
    caps = 64
    layout = make_layout(
        num_experts=caps,
        experts_bytes_by_cap=tuple(cap * 4 * PAGE for cap in range(caps + 1)),
        max_kv_blocks=1023,
        max_model_len=16,
    )
    snapshot = make_snapshot(layout=layout, budget_bytes=300 * PAGE)
    solution = solve(snapshot, lambda s: 3.0 / s.cap + 400.0 / (s.kv_blocks + 1) / 16)
    assert solution is not None
    marginals = solution.marginals
    assert marginals.experts_s_per_byte == pytest.approx(marginals.kv_s_per_byte, rel=0.15)


def test_with_every_expert_resident_another_byte_for_experts_saves_nothing() -> None:
    solution = solve(make_snapshot(budget_bytes=64 * PAGE), lambda s: 10.0 - s.cap)
    assert solution is not None
    assert solution.split.cap == 8
    assert solution.marginals.experts_s_per_byte == 0.0
