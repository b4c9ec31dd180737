from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_snapshots import PAGE, make_snapshot, wants_experts, wants_kv

from policies.damping import Damped
from policies.mv_wsa import MarginalValue, _explain
from wisp_core.allocation.cost_model import CostModel, model_error
from wisp_core.allocation.solver import feasible_splits, violations
from wisp_core.contracts import Decision, KvDemand, Marginals, ReplicaSnapshot, ReuseBin, Split


def decide(snapshot: ReplicaSnapshot) -> Split:
    return decided(snapshot).split


def decided(snapshot: ReplicaSnapshot, **settings: float) -> Decision:
    policy = MarginalValue(**settings)
    return policy.decide(snapshot, policy.initial_state())[0]


def test_bursts_get_experts_and_long_turns_get_kv() -> None:
    assert decide(wants_experts()).cap == 8
    assert decide(wants_kv(split=Split(cap=8, kv_blocks=39))) == Split(cap=4, kv_blocks=103)


def test_takes_the_cheapest_feasible_split_and_reports_its_cost() -> None:
    reuse = tuple(ReuseBin(blocks=b, turns_per_s=1, tokens_per_s=30) for b in (30, 50, 70, 90))
    snapshot = make_snapshot(kv=KvDemand(mean_turns=2, demand_blocks=60, floor_blocks=8, reuse=reuse))
    model = CostModel.from_snapshot(snapshot)

    def cost(split: Split) -> float:
        return model.cost(split) + model.move(split).total_s / 10.0

    decision = decided(snapshot, horizon_s=10.0, growth_fraction=0.0)
    assert decision.predicted_cost == cost(decision.split) == min(map(cost, feasible_splits(snapshot)))
    assert decision.current_cost == model.cost(snapshot.split)
    assert decision.marginals is not None
    assert f"-> {model.cost(decision.split):.3f} s/s" in decision.reason


def test_a_gain_that_a_refill_would_eat_is_left_alone() -> None:
    slightly = (8.0, 8.0, 8.0, 8.0, 5.0, 4.99, 4.98, 4.97, 4.96)
    snapshot = make_snapshot(decode_misses_by_cap=slightly, prefill_misses_by_cap=(0.0,) * 9)
    assert decided(snapshot, horizon_s=1e9).split.cap == 8
    assert decided(snapshot, horizon_s=1.0).split == snapshot.split


def test_the_model_s_error_is_reported_with_the_decision() -> None:
    snapshot = make_snapshot(busy_s_per_s=0.8)
    decision = decided(snapshot)
    assert decision.model_error == model_error(CostModel.from_snapshot(snapshot), snapshot)
    assert f"off by {decision.model_error:.0%}" in decision.reason


@pytest.mark.parametrize(("kv_s_per_byte", "told"), [(2.1e-39, "0"), (-1e-30, "0"), (2.5e-11, "26.2")])
def test_worth_too_small_to_be_seen_is_told_as_0(kv_s_per_byte: float, told: str) -> None:
    terms = CostModel.from_snapshot(make_snapshot()).terms(make_snapshot().split)
    worth = Marginals(experts_s_per_byte=1e-10, kv_s_per_byte=kv_s_per_byte)
    assert f"would save 104.9 µs/s in experts, {told} in KV" in _explain(terms, terms, 0.0, worth, None)


def test_the_floor_bounds_what_experts_can_take() -> None:
    snapshot = wants_experts(kv=KvDemand(mean_turns=2, floor_blocks=80))
    assert decide(snapshot) == Split(cap=5, kv_blocks=87)


@pytest.mark.parametrize("changes", [{"decode_steps_per_s": 0.0}, {"link_bytes_per_s": 0}])
def test_an_idle_or_unmeasured_replica_is_left_alone(changes: dict[str, object]) -> None:
    snapshot = make_snapshot(**changes)
    decision = decided(snapshot)
    assert decision.split == snapshot.split
    assert decision.reason.startswith("hold: ")


def test_an_infeasible_floor_is_a_hold_with_the_numbers() -> None:
    snapshot = make_snapshot(kv=KvDemand(floor_blocks=126), budget_bytes=20 * PAGE)
    decision = decided(snapshot)
    assert decision.split == snapshot.split
    assert "infeasible: κ_min is 126 KV blocks" in decision.reason


@given(
    now=st.integers(2, 8),
    decode=st.lists(st.floats(0, 50), min_size=9, max_size=9),
    demand=st.integers(0, 200),
    floor=st.integers(0, 140),
    reuse=st.lists(st.tuples(st.integers(0, 150), st.floats(0, 1e4)), max_size=4),
    budget_pages=st.integers(0, 70),
)
def test_whatever_is_measured_the_answer_keeps_every_bound(
    now: int,
    decode: list[float],
    demand: int,
    floor: int,
    reuse: list[tuple[int, float]],
    budget_pages: int,
) -> None:
    bins = tuple(ReuseBin(blocks=b, turns_per_s=1, tokens_per_s=t) for b, t in sorted(reuse))
    snapshot = make_snapshot(
        split=Split(cap=now, kv_blocks=20),
        decode_misses_by_cap=tuple(decode),
        kv=KvDemand(mean_turns=2, demand_blocks=demand, floor_blocks=floor, reuse=bins),
        budget_bytes=budget_pages * PAGE,
    )
    split = decide(snapshot)
    assert split == snapshot.split or violations(snapshot, split) == []
    assert decide(snapshot.model_copy(update={"split": split})) in (split, *feasible_splits(snapshot))


def test_follows_phases_both_ways_within_four_epochs() -> None:
    policy = Damped(policy=MarginalValue())
    state = policy.initial_state()
    split = Split(cap=4, kv_blocks=103)
    for phase, goal in [(wants_experts, 8), (wants_kv, 4), (wants_experts, 8)]:
        epochs = 0
        while split.cap != goal:
            decision, state = policy.decide(phase(split=split), state)
            split = decision.split
            epochs += 1
            assert epochs <= 4
        decision, state = policy.decide(phase(split=split), state)
        assert decision.split == split, "it rests once it is there"


def test_before_any_step_the_predicted_safe_size_counts() -> None:
    """A restarted engine is sized for the sessions that will come back to it."""
    quiet = make_snapshot(decode_steps_per_s=0.0, kv=KvDemand())
    policy = MarginalValue()
    decision, _ = policy.decide(quiet.model_copy(update={"placed_safe_cap": 6}), policy.initial_state())
    assert decision.split.cap == 6
    assert "predicted to need 6 slots" in decision.reason
    held, _ = policy.decide(quiet, policy.initial_state())
    assert held.split == quiet.split


def test_the_bottom_of_each_valley_is_named_and_phases_are_added_up() -> None:
    policy = MarginalValue()
    bursts, long = wants_experts(), wants_kv()
    assert policy.valleys([bursts]) == [Split(cap=8, kv_blocks=39)]
    assert policy.valleys([long]) == [Split(cap=2, kv_blocks=127)], "of equal ones that with most KV"
    both = policy.valleys([wants_experts(window_s=1.0), wants_kv(window_s=1.0)])
    assert both == [Split(cap=4, kv_blocks=103), Split(cap=7, kv_blocks=55)], "one serves long turns, one the bursts"
    assert policy.valleys([wants_experts(window_s=10.0), wants_kv(window_s=1.0)]) == both[1:], (
        "more bursts: only theirs"
    )
    assert policy.valleys([make_snapshot(link_bytes_per_s=0.0)]) == []
