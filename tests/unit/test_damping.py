from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_snapshots import PAGE, make_snapshot

from policies.damping import Confirmation, Damped, Damping
from wisp_core.allocation.solver import violations
from wisp_core.contracts import Decision, KvDemand, ReplicaSnapshot, Split
from wisp_core.errors import ConfigurationError

NOW = Split(cap=4, kv_blocks=103)


@dataclass(frozen=True)
class Wish:
    """A policy that asks for ``caps`` in turn, with KV ``kv_blocks`` and a predicted saving of ``gain``."""

    caps: tuple[int, ...]
    kv_blocks: int = 127
    gain: float | None = None

    def initial_state(self) -> int:
        return 0

    def decide(self, snapshot: ReplicaSnapshot, state: int) -> tuple[Decision, int]:
        cap = self.caps[min(state, len(self.caps) - 1)]
        costs = {} if self.gain is None else {"current_cost": 1.0, "predicted_cost": 1.0 - self.gain}
        return Decision(split=Split(cap=cap, kv_blocks=self.kv_blocks), reason="a wish", **costs), state + 1


def caps_decided(policy: Wish, damping: Damping, epochs: int, snapshot: ReplicaSnapshot | None = None) -> list[int]:
    """Caps over some epochs of a replica that follows every decision."""
    snapshot = snapshot or make_snapshot()
    damped = Damped(policy=policy, damping=damping)
    state, caps = damped.initial_state(), []
    for _ in range(epochs):
        decision, state = damped.decide(snapshot, state)
        snapshot = snapshot.model_copy(update={"split": decision.split})
        caps.append(decision.split.cap)
    return caps


@pytest.mark.parametrize(("goal", "confirmations"), [(8, 1), (8, 3), (2, 1), (2, 3)])
def test_a_direction_must_hold_for_some_epochs_in_a_row(goal: int, confirmations: int) -> None:
    caps = caps_decided(Wish((goal,)), Damping(confirmations=confirmations), 4)
    assert caps == [4] * (confirmations - 1) + [goal] * (5 - confirmations)


def test_a_change_of_direction_starts_over() -> None:
    assert caps_decided(Wish((8, 2, 8, 2, 8)), Damping(confirmations=2), 5) == [4] * 5


def test_agreement_is_on_direction_not_on_the_exact_cap() -> None:
    assert caps_decided(Wish((8, 7, 7)), Damping(confirmations=2), 2) == [4, 7]


def test_a_hold_in_between_starts_over() -> None:
    assert caps_decided(Wish((8, 4, 8, 8), kv_blocks=103), Damping(confirmations=2), 4) == [4, 4, 4, 8]


def test_small_moves_are_held() -> None:
    one_cap = 4 * PAGE / (42 * PAGE)
    held = Damping(confirmations=1, dead_zone_fraction=one_cap * 1.01)
    moved = Damping(confirmations=1, dead_zone_fraction=one_cap * 0.99)
    assert caps_decided(Wish((5,)), held, 3) == [4, 4, 4]
    assert caps_decided(Wish((5,)), moved, 1) == [5]


def test_small_gains_are_held_and_a_policy_without_predictions_is_not_asked_for_one() -> None:
    damping = Damping(confirmations=1, min_gain_fraction=0.1)
    assert caps_decided(Wish((8,), gain=0.09), damping, 2) == [4, 4]
    assert caps_decided(Wish((8,), gain=0.11), damping, 1) == [8]
    assert caps_decided(Wish((8,)), damping, 1) == [8]


def test_a_small_move_is_made_where_it_is_predicted_to_gain_enough() -> None:
    damping = Damping(confirmations=1, dead_zone_fraction=0.9, min_gain_fraction=0.1)
    assert caps_decided(Wish((5,), gain=0.11), damping, 1) == [5]
    assert caps_decided(Wish((5,), gain=0.09), damping, 2) == [4, 4]
    assert caps_decided(Wish((5,)), damping, 2) == [4, 4]


@pytest.mark.parametrize(("goal", "path"), [(8, [4, 6, 8, 8]), (2, [4, 2, 2, 2])])
def test_a_large_move_is_made_in_steps_without_confirming_each(goal: int, path: list[int]) -> None:
    damping = Damping(confirmations=2, max_step_fraction=2.5 * 4 / 42)
    assert caps_decided(Wish((goal,)), damping, 4) == path


def test_a_largest_step_below_one_cap_still_moves_one_cap() -> None:
    damping = Damping(confirmations=1, max_step_fraction=0.001)
    assert caps_decided(Wish((8,)), damping, 3) == [5, 6, 7]
    assert caps_decided(Wish((2,)), damping, 3) == [3, 2, 2]


def test_a_replica_that_breaks_a_bound_is_moved_at_once() -> None:
    starving = make_snapshot(split=Split(cap=8, kv_blocks=39), kv=KvDemand(floor_blocks=60))
    damping = Damping(confirmations=5, dead_zone_fraction=0.9, max_step_fraction=0.01)
    decision, _ = damping.apply(starving, Decision(split=Split(cap=6, kv_blocks=71), reason="x"), Confirmation())
    assert decision.split == Split(cap=6, kv_blocks=71)
    assert decision.reason.startswith("at once, 39 KV blocks are below κ_min, 60")


def test_a_hold_does_not_keep_a_split_that_breaks_a_bound() -> None:
    now = Split(cap=8, kv_blocks=39)
    starving = make_snapshot(split=now, kv=KvDemand(floor_blocks=60))
    decision, _ = Damping().apply(starving, Decision(split=now, reason="hold: nothing known"), Confirmation())
    assert decision.split == Split(cap=6, kv_blocks=71)


def test_a_wish_is_clamped_to_groups_floor_and_budget() -> None:
    snapshot = make_snapshot(kv=KvDemand(floor_blocks=60))
    wish = Decision(split=Split(cap=8, kv_blocks=127), reason="greedy", predicted_cost=0.1, current_cost=1.0)
    decision, _ = Damping(confirmations=1).apply(snapshot, wish, Confirmation())
    assert decision.split == Split(cap=6, kv_blocks=71)
    assert decision.predicted_cost is None, "the prediction was for another split"
    uneven = Decision(split=Split(cap=5, kv_blocks=70), reason="uneven")
    assert Damping(confirmations=1).apply(snapshot, uneven, Confirmation())[0].split == Split(cap=5, kv_blocks=67)


def test_nothing_feasible_is_a_hold_with_the_numbers() -> None:
    snapshot = make_snapshot(budget_bytes=9 * PAGE)
    decision, _ = Damping(confirmations=1).apply(
        snapshot, Decision(split=Split(cap=2, kv_blocks=8), reason="x"), Confirmation()
    )
    assert decision.split == snapshot.split
    assert "infeasible" in decision.reason


def test_a_hold_shows_what_was_wanted() -> None:
    wish = Decision(split=Split(cap=8, kv_blocks=39), reason="because", predicted_cost=0.5, current_cost=1.0)
    decision, _ = Damping(confirmations=2).apply(make_snapshot(), wish, Confirmation())
    assert decision.split == NOW
    assert decision.predicted_cost == 1.0
    assert decision.reason == "hold: confirmed in 1 of 2 epochs (wanted cap 8, 39 KV blocks: because)"


@given(
    now=st.tuples(st.integers(2, 8), st.integers(0, 127)),
    wish=st.tuples(st.integers(0, 20), st.integers(0, 500)),
    floor=st.integers(0, 130),
    budget_pages=st.integers(0, 70),
    max_step=st.floats(0.001, 1),
    dead_zone=st.floats(0, 0.3),
)
def test_every_move_is_feasible(
    now: tuple[int, int], wish: tuple[int, int], floor: int, budget_pages: int, max_step: float, dead_zone: float
) -> None:
    snapshot = make_snapshot(
        split=Split(cap=now[0], kv_blocks=now[1]), kv=KvDemand(floor_blocks=floor), budget_bytes=budget_pages * PAGE
    )
    damping = Damping(confirmations=1, max_step_fraction=max_step, dead_zone_fraction=dead_zone)
    wanted = Decision(split=Split(cap=wish[0], kv_blocks=wish[1]), reason="any")
    decision, _ = damping.apply(snapshot, wanted, Confirmation())
    assert decision.split == snapshot.split or violations(snapshot, decision.split) == []


def test_bad_bounds_are_named_all_at_once() -> None:
    with pytest.raises(ConfigurationError, match=r"confirmations: 0.*max_step_fraction: 0"):
        Damping(confirmations=0, max_step_fraction=0.0)
