"""Routing decisions: what holds for any fleet."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from routing_fleets import NOW_S, NUM_EXPERTS, NUM_LAYERS, One, blind, decide, figures, fleet_of, one, topic, uses

from wisp_core.routing.fleet import Fleet
from wisp_core.routing.hashing import hash_order
from wisp_core.routing.route import route
from wisp_core.routing.views import RoutingRequest, RoutingWeights


def test_nothing_to_route_to_is_a_callers_error() -> None:
    with pytest.raises(ValueError, match="no replica"):
        route(RoutingRequest(session_key="s"), Fleet(), NOW_S)


def test_a_new_session_goes_where_its_experts_are() -> None:
    request = RoutingRequest(session_key="t/u/s", max_tokens=100, uses=uses(0, 1, 2, 3))
    decision = decide(request, one("other", topic(4, 5, 6, 7)), one("same", topic(0, 1, 2, 3)))
    assert decision.chosen == "same"
    assert decision.scores["same"].experts_s == pytest.approx(0.0, abs=1e-6)
    # On the other one 8 experts share 4 slots, so that 4 in each of 2 layers are copied whenever a step needs them:
    # 1 - exp(-0.5) of the steps, 1 ms each, 100 steps.
    needed = 1 - np.exp(-0.5)
    assert decision.scores["other"].experts_s == pytest.approx(4 * 2 * needed * 0.001 * 100, rel=1e-4)


def test_copies_that_others_have_to_wait_for_count_as_well() -> None:
    request = RoutingRequest(session_key="s", max_tokens=100, uses=uses(0, 1, 2, 3))
    # Five others there run without a miss until this session comes.
    decision = decide(request, one("crowd", topic(4, 5, 6, 7), turns=5, mean_turns=5))
    needed = 1 - np.exp(-0.5)
    assert decision.scores["crowd"].experts_s == pytest.approx((1 + 5) * 4 * 2 * needed * 0.001 * 100, rel=1e-3)


def test_a_large_cap_makes_experts_free() -> None:
    request = RoutingRequest(session_key="s", max_tokens=100, uses=uses(0, 1, 2, 3))
    decision = decide(request, one("a", topic(4, 5, 6, 7), cap=NUM_EXPERTS))
    assert decision.scores["a"].experts_s == 0.0


def test_an_unknown_session_keeps_away_from_a_replica_that_thrashes() -> None:
    calm, thrashing = one("calm", topic(0, 1), turns=3), one("thrashing", topic(0, 1, 2, 3, 4, 5, 6, 7), turns=3)
    assert decide(RoutingRequest(session_key="s"), thrashing, calm).chosen == "calm"


def test_turns_share_a_replica() -> None:
    """Each turn there makes the steps of this one longer, and this one theirs."""
    request = RoutingRequest(session_key="s", max_tokens=100)
    decision = decide(
        request, one("busy", turns=4, mean_turns=4, fixed_s=0.01, row_s=0.002), one("idle", fixed_s=0.01, row_s=0.002)
    )
    assert decision.chosen == "idle"
    assert decision.scores["idle"].decode_s == pytest.approx(100 * 0.012)
    assert decision.scores["busy"].decode_s == pytest.approx(100 * (0.01 + 5 * 0.002 + 4 * 0.002))


def test_sessions_that_come_in_one_breath_spread() -> None:
    """The replicas' own figures show none of them yet."""
    fleet = fleet_of(*(one(name, fixed_s=0.01, row_s=0.002) for name in "abc"))
    chosen: Counter[str] = Counter()
    for number in range(12):
        decision = route(RoutingRequest(session_key=f"s{number}", max_tokens=100), fleet, NOW_S)
        fleet.add_turns(decision.chosen, 1)
        fleet.note_placed(decision.chosen, 1)
        chosen[decision.chosen] += 1
    assert sorted(chosen.values()) == [4, 4, 4]


def test_sessions_that_think_still_count() -> None:
    """None of its turns runs at this moment, but they will return."""
    request = RoutingRequest(session_key="s", max_tokens=100)
    decision = decide(request, one("homes", mean_turns=5, row_s=0.002), one("empty", row_s=0.002))
    assert decision.chosen == "empty"


def test_a_full_batch_means_waiting() -> None:
    request = RoutingRequest(session_key="s", mean_turn_s=2.0)
    decision = decide(request, one("full", turns=11, max_num_seqs=8))
    assert decision.scores["full"].queue_s == pytest.approx(2.0 * 4 / 8)


def test_a_session_stays_where_its_kv_is() -> None:
    request = RoutingRequest(session_key="s", prompt_tokens=1000, prefix_tokens=990, home="a")
    decision = decide(request, one("a", turns=4), one("b"))
    assert decision.chosen == "a"
    assert decision.scores["a"].recompute_s == pytest.approx(0.01 * 3)
    assert decision.scores["b"].recompute_s == pytest.approx(1.0)


def test_a_prefix_that_the_pool_cannot_hold_any_more_is_not_counted() -> None:
    request = RoutingRequest(session_key="s", prompt_tokens=1000, prefix_tokens=990, home="a")
    assert decide(request, one("a", cached_blocks=0)).scores["a"].recompute_s == pytest.approx(1.0)


def test_a_short_prefill_costs_a_whole_pass() -> None:
    """Where copies dominate, a prefix in the cache saves little unless it saves the pass."""
    request = RoutingRequest(session_key="s", prompt_tokens=300, prefix_tokens=290, home="home")
    home, away = one("home", pass_s=1.0, max_pass_tokens=1000), one("away", pass_s=1.0, max_pass_tokens=1000)
    scores = decide(request, home, away).scores
    assert scores["home"].recompute_s == pytest.approx(1.0 + 0.01, rel=1e-3)
    assert scores["away"].recompute_s == pytest.approx(1.0 + 0.3)


def test_a_long_prompt_takes_several_passes_and_a_short_one_a_part_of_one() -> None:
    """Of a pass over few tokens only the experts that these need are copied."""
    figures = {"pass_s": 1.0, "pass_tokens": 1e6, "max_pass_tokens": 1000, "use_share": 0.01, "prompt_token_s": 0.0}
    for tokens, passes in ((2500, 3.0), (1000, 1.0), (100, 0.632), (10, 0.095), (0, 0.0)):
        request = RoutingRequest(session_key="s", prompt_tokens=tokens)
        scores = decide(request, one("a", **figures)).scores
        assert scores["a"].recompute_s == pytest.approx(passes, abs=0.01)


@pytest.mark.parametrize(("row_s", "chosen"), [(0.0015, "a"), (0.0025, "b")])
def test_a_session_moves_only_for_more_than_the_gain(row_s: float, chosen: str) -> None:
    request = RoutingRequest(session_key="s", home="a", max_tokens=100)
    # Two rows' worth for each of the other turns: 2 x 5 x 100 x row_s.
    decision = decide(
        request,
        one("a", turns=5, mean_turns=6, row_s=row_s),
        one("b", row_s=row_s),
        weights=RoutingWeights(migrate_gain_s=2.0),
    )
    assert decision.chosen == chosen
    assert ("moves" in decision.reason) == (chosen == "b")


def test_a_small_part_of_a_large_cost_is_no_reason_to_move() -> None:
    request = RoutingRequest(session_key="s", home="a", max_tokens=100)
    near = decide(request, one("a", fixed_s=0.1), one("b", fixed_s=0.094), weights=RoutingWeights(migrate_gain_s=0.5))
    assert near.scores["a"].total_s - near.scores["b"].total_s > 0.5
    assert near.chosen == "a"
    assert decide(request, one("a", fixed_s=0.1), one("b", fixed_s=0.08)).chosen == "b"


def test_a_lone_session_does_not_count_against_its_own_home() -> None:
    request = RoutingRequest(session_key="s", home="a", max_tokens=100, uses=uses(0, 1, 2, 3, 4))
    own = one("a", topic(0, 1, 2, 3, 4), mean_turns=1.0, row_s=0.01)
    scores = decide(request, own, one("b", row_s=0.01)).scores
    assert scores["a"].decode_s == pytest.approx(scores["b"].decode_s)
    assert scores["a"].experts_s == pytest.approx(scores["b"].experts_s)


def test_at_its_home_a_session_is_compared_with_the_others_there() -> None:
    """What the home has seen is half this session, half another one that shares no expert with it."""
    request = RoutingRequest(session_key="s", home="home", max_tokens=100, uses=uses(0, 1, 2, 3))
    mixed = (topic(0, 1, 2, 3) + topic(4, 5, 6, 7)) / 2
    scores = decide(
        request, one("home", mixed, mean_turns=2.0, turns=1), one("other", topic(4, 5, 6, 7), mean_turns=1.0, turns=1)
    ).scores
    assert scores["home"].experts_s == pytest.approx(scores["other"].experts_s)
    assert scores["home"].experts_s > 0


def test_a_resize_counts() -> None:
    assert decide(RoutingRequest(session_key="s"), one("a", is_resizing=1), one("b")).chosen == "b"


def test_a_lack_of_free_blocks_counts() -> None:
    request = RoutingRequest(session_key="s", prompt_tokens=160, max_tokens=160, mean_turn_s=2.0)
    decision = decide(request, one("full", free_blocks=5), one("empty", prompt_token_s=0.0012))
    assert decision.chosen == "empty"
    assert decision.scores["full"].headroom_s == pytest.approx(2.0 * 15 / 20)


def test_a_replica_whose_pool_is_too_small_is_left_out_if_another_fits() -> None:
    request = RoutingRequest(session_key="s", prompt_tokens=1000, home="small")
    small, large = one("small", kv_blocks=10), one("large", turns=100)
    assert decide(request, small, large).chosen == "large"
    assert decide(request, small).chosen == "small"


def test_an_unhealthy_or_failed_replica_is_left() -> None:
    request = RoutingRequest(session_key="s", home="sick", excluded=frozenset({"failed"}))
    decision = decide(request, one("sick", is_healthy=0), one("failed"), one("good", turns=50))
    assert decision.ranking == ("good",)
    assert "cannot take it" in decision.reason
    assert not decision.is_for_this_turn_only


def test_a_failed_replica_is_not_tried_again_for_a_sick_one_s_sake() -> None:
    request = RoutingRequest(session_key="s", excluded=frozenset({"failed"}))
    assert decide(request, one("sick", is_healthy=0), one("failed")).chosen == "sick"


def test_a_draining_replica_gets_no_new_turn_but_keeps_its_sessions() -> None:
    draining = one("draining", is_draining=1)
    assert decide(RoutingRequest(session_key="s"), draining, one("busy", turns=50)).chosen == "busy"
    lent = decide(RoutingRequest(session_key="s", home="draining"), draining, one("busy", turns=50))
    assert lent.chosen == "busy"
    assert lent.is_for_this_turn_only
    alone = decide(RoutingRequest(session_key="s", home="draining"), draining)
    assert alone.chosen == "draining"
    assert not alone.is_for_this_turn_only


def test_stale_telemetry_comes_after_fresh_but_does_not_move_a_session() -> None:
    stale, fresh = one("stale", at_s=-100.0), one("fresh", turns=50)
    assert decide(RoutingRequest(session_key="s"), stale, fresh).ranking == ("fresh",)
    assert decide(RoutingRequest(session_key="s", home="stale"), stale, fresh).chosen == "stale"


def test_without_telemetry_the_hash_decides_and_a_home_is_kept() -> None:
    replicas = [blind(f"r{i}") for i in range(4)]
    decision = decide(RoutingRequest(session_key="t/u/s"), *replicas)
    assert list(decision.ranking) == hash_order("t/u/s", [replica.replica_id for replica in replicas])
    home = decision.ranking[-1]
    assert decide(RoutingRequest(session_key="t/u/s", home=home), *replicas).chosen == home


def test_equal_replicas_share_new_sessions() -> None:
    fleet = fleet_of(one("a"), one("b"), one("c"))
    chosen = Counter(route(RoutingRequest(session_key=f"t/u/{i}"), fleet, NOW_S).chosen for i in range(600))
    assert min(chosen.values()) > 150


def test_a_home_outside_the_shortlist_is_still_compared() -> None:
    others = [one(f"r{i}") for i in range(20)]
    decision = decide(RoutingRequest(session_key="s", home="home"), one("home", turns=30, row_s=0.0001), *others)
    assert "home" in decision.scores
    assert len(decision.scores) == RoutingWeights().num_scored + 1


def test_hashing_spreads_and_moves_only_the_sessions_of_a_lost_replica() -> None:
    ids = [f"app#Replica#{i:04x}" for i in range(5)]
    sessions = [f"tenant/user/{i}" for i in range(2000)]
    before = {s: hash_order(s, ids)[0] for s in sessions}
    assert min(Counter(before.values()).values()) > 300
    after = {s: hash_order(s, ids[:-1])[0] for s in sessions}
    assert {before[s] for s in sessions if before[s] != after[s]} == {ids[-1]}


def test_hashing_is_the_same_in_every_process() -> None:
    names = [f"r{number}" for number in range(20)]
    code = f"from wisp_core.routing.hashing import hash_order; print(*hash_order('t/u/s', {names}))"
    for seed in ("1", "2"):
        other = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        )
        assert other.stdout.split() == hash_order("t/u/s", names)


replicas = st.builds(
    lambda replica_id, known, healthy, draining, cap, turns, free, seed: One(
        replica_id,
        figures(cap=cap, turns=turns, free_blocks=free, is_healthy=healthy, is_draining=draining) if known else None,
        np.random.default_rng(seed).random((NUM_LAYERS, NUM_EXPERTS), dtype=np.float32) if known else None,
    ),
    st.sampled_from(["a", "b", "c", "d", "e"]),
    st.booleans(),
    st.sampled_from([0.0, 1.0]),
    st.sampled_from([0.0, 1.0]),
    st.integers(1, NUM_EXPERTS),
    st.integers(0, 50),
    st.integers(0, 100),
    st.integers(0, 5),
)
requests = st.builds(
    RoutingRequest,
    session_key=st.text(max_size=20),
    prompt_tokens=st.integers(0, 4000),
    max_tokens=st.integers(0, 4000),
    prefix_tokens=st.integers(0, 8000),
    home=st.none() | st.sampled_from(["a", "b", "c", "x"]),
    excluded=st.frozensets(st.sampled_from(["a", "b", "c", "d", "e"])),
    uses=st.none() | st.just(uses(0, 3, 5)),
)


@given(requests, st.lists(replicas, min_size=1, max_size=5, unique_by=lambda replica: replica.replica_id))
def test_every_decision_names_replicas_once_and_depends_on_the_fleet_only(
    request: RoutingRequest, found: list[One]
) -> None:
    decision = decide(request, *found)
    names = {replica.replica_id for replica in found}
    assert set(decision.ranking) <= names
    assert len(set(decision.ranking)) == len(decision.ranking)
    assert decide(request, *reversed(found)).chosen == decision.chosen
    assert decision.reason
    assert all(score.total_s >= 0 for score in decision.scores.values())
    if decision.chosen in request.excluded:
        assert names <= request.excluded
