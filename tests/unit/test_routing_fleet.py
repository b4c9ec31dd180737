"""The fleet that routing reads: what it takes from snapshots, and how it keeps up between them."""

from __future__ import annotations

import math
import statistics
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_snapshots import make_layout
from routing_fleets import NOW_S, NUM_EXPERTS, NUM_LAYERS, fleet_of, one, topic

from wisp_core.contracts import CostFit, KvDemand, PagerCounts, ReplicaSnapshot, Split
from wisp_core.routing.fleet import Fleet
from wisp_core.routing.route import route
from wisp_core.routing.union import least_kept, union_misses, union_misses_above, union_misses_by_cap
from wisp_core.routing.views import ReplicaFigures, RoutingRequest, RoutingWeights, Uses, figures_of
from wisp_core.working_set.predictor import sampled_layers


def snapshot(**changes: object) -> ReplicaSnapshot:
    values: dict[str, object] = {
        "replica_id": "a",
        "incarnation": "i",
        "model": "m",
        "layout": make_layout(num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, expert_bytes=2048),
        "split": Split(cap=4, kv_blocks=50),
        "budget_bytes": 1 << 20,
        "at_s": 1000.0,
        "decode": PagerCounts(steps=10, tokens=20, seconds=2.0, link_seconds=1.2),
        "prefill": PagerCounts(steps=4, tokens=100, seconds=3.0, link_seconds=1.0),
        "prefill_steps_per_s": 0.2,
        "window_s": 5.0,
        "kv": KvDemand(running_turns=2, waiting_turns=1, used_blocks=20, mean_turns=1.5, cached_blocks=7),
        **changes,
    }
    return ReplicaSnapshot(**values)  # type: ignore[arg-type]


def seen(**changes: object) -> ReplicaFigures:
    return figures_of(snapshot(**changes), RoutingWeights())


def test_figures_carry_what_the_snapshot_says() -> None:
    found = seen()
    assert (found.free_blocks, found.cached_blocks, found.turns, found.waiting_turns) == (30, 7, 3, 1)
    assert found.copy_s == 2048 / RoutingWeights().default_link_bytes_per_s
    assert (found.pass_s, found.pass_tokens, found.prompt_token_s) == (0.25, 25.0, 0.02)
    layout = snapshot().layout
    assert (found.max_pass_tokens, found.use_share) == (layout.max_pass_tokens, layout.top_k / layout.num_experts)
    assert found.prefill_share == pytest.approx(0.2 * 0.75)


def test_a_step_s_compute_is_split_while_no_fit_is_known() -> None:
    found = seen()
    rows = 2.0
    assert found.fixed_s == pytest.approx(RoutingWeights().fixed_rows * found.row_s)
    assert found.fixed_s + rows * found.row_s == pytest.approx(0.08)
    fit = CostFit(step_s=0.01, token_s=0.002, pass_s=0.05, prompt_token_s=0.001, num_samples=9)
    found = seen(fit=fit)
    assert (found.fixed_s, found.row_s, found.pass_s, found.prompt_token_s) == (0.01, 0.002, 0.25 + 0.05, 0.001)


def test_what_a_replica_has_not_measured_is_taken_from_the_others() -> None:
    fresh = seen(decode=PagerCounts(), prefill=PagerCounts(), kv=KvDemand())
    assert math.isnan(fresh.row_s)
    alone = Fleet()
    alone.update("new", fresh)
    default_s = RoutingWeights().default_row_s
    assert alone.load.token_s[0] == pytest.approx((RoutingWeights().fixed_rows + 1) * default_s)
    both = Fleet()
    both.update("old", seen(kv=KvDemand()))
    both.update("new", fresh)
    assert both.load.prompt_token_s.tolist() == [0.02, 0.02]


def test_own_turns_count_before_a_snapshot_shows_them_and_until_they_end() -> None:
    fleet = Fleet()
    fleet.update("a", seen(), own_turns=7)
    assert fleet.column("turns").tolist() == [7]
    fleet.add_turns("a", 1)
    fleet.add_turns("a", -3)
    assert fleet.column("turns").tolist() == [5]
    fleet.add_turns("gone", 1)


def test_a_load_changed_turn_by_turn_equals_one_derived_anew() -> None:
    fleet = fleet_of(one("a", turns=3, row_s=0.01), one("b", turns=1, row_s=0.02))
    _ = fleet.load
    fleet.add_turns("b", 2)
    fleet.note_placed("a", 1)
    again = fleet_of(one("a", turns=3, row_s=0.01), one("b", turns=3, row_s=0.02))
    again.note_placed("a", 1)
    for name in ("turns", "token_s", "use_s", "queue"):
        assert getattr(fleet.load, name) == pytest.approx(getattr(again.load, name))


def test_placed_sessions_are_forgotten_as_the_mean_takes_them_up() -> None:
    fleet = Fleet()
    fleet.update("a", seen(at_s=0.0, window_s=5.0))
    fleet.note_placed("a", 2)
    fleet.update("a", seen(at_s=5.0, window_s=5.0))
    assert fleet.column("placed")[0] == pytest.approx(2 / math.e)


def test_replicas_come_and_go() -> None:
    fleet = fleet_of(*(one(f"r{i}", topic(i % NUM_EXPERTS), turns=i) for i in range(20)))
    fleet.keep({f"r{i}" for i in range(5, 25)})
    assert sorted(fleet.ids) == sorted(f"r{i}" for i in range(5, 25))
    for at, replica_id in enumerate(fleet.ids):
        number = int(replica_id[1:])
        assert fleet.position[replica_id] == at
        assert fleet.column("turns")[at] == (number if number < 20 else 0)
        assert fleet.rates[at, 0, number % NUM_EXPERTS] == (0.5 if number < 20 else 0)
        assert fleet.column("is_known")[at] == (number < 20)


def test_a_new_cap_changes_what_is_kept() -> None:
    rates = np.tile(np.linspace(0.8, 0.1, NUM_EXPERTS, dtype=np.float32), (NUM_LAYERS, 1))
    fleet = fleet_of(one("a", rates, cap=4))
    # Who takes the slot of the least used of the four, 0.5 uses per token, makes these copies.
    least = 1 - np.exp(-0.5)
    outside = fleet.outside[:, 0].reshape(NUM_LAYERS, NUM_EXPERTS)
    assert outside == pytest.approx(np.array([[0, 0, 0, 0, least, least, least, least]] * NUM_LAYERS))
    before = float(fleet.column("copies")[0])
    fleet.update("a", one("a", cap=6).figures)  # type: ignore[arg-type]
    assert np.count_nonzero(fleet.outside[:, 0]) == 2 * NUM_LAYERS
    assert 0 < fleet.column("copies")[0] < before


def test_a_model_of_another_shape_replaces_the_old_one() -> None:
    fleet = fleet_of(one("a", topic(0)), one("b", topic(1)))
    fleet.set_rates("b", np.ones((3, 4), dtype=np.float32))
    assert fleet.rates.shape == (2, 3, 4)
    assert not fleet.rates[0].any()


def test_layers_are_sampled_evenly_and_stand_for_all() -> None:
    assert sampled_layers(48, 12).tolist() == sorted(set(sampled_layers(48, 12).tolist()))
    assert (sampled_layers(48, 12)[0], sampled_layers(48, 12)[-1], len(sampled_layers(4, 12))) == (0, 47, 4)
    rates = np.full((48, 128), 1 / 16, dtype=np.float32)
    found = Uses.of(rates)
    positions, weights = found.sketch
    assert len(positions) <= 64
    assert weights.sum() == pytest.approx(rates.sum(), rel=1e-5)


uses_of_some = st.integers(0, 10_000).map(
    lambda seed: np.random.default_rng(seed).gamma(0.3, 1.0, (3, NUM_LAYERS, NUM_EXPERTS)).astype(np.float32)
)


@given(uses_of_some, st.integers(1, NUM_EXPERTS))
def test_a_union_misses_what_is_not_among_the_most_used(uses: np.ndarray, cap: int) -> None:
    needs = 1 - np.exp(-uses.astype(np.float64))
    expected = np.sort(needs, axis=-1)[..., : NUM_EXPERTS - cap].sum(axis=(1, 2))
    caps = np.full(3, cap)
    kept = np.stack([least_kept(rates, cap) for rates in uses])
    assert union_misses(uses.copy(), caps) == pytest.approx(expected, abs=1e-5)
    assert union_misses_above(uses.copy(), caps, kept) == pytest.approx(expected, abs=1e-4)
    assert [union_misses_by_cap(one)[cap] for one in uses] == pytest.approx(expected, abs=1e-4)


def test_a_decision_among_a_thousand_replicas_takes_about_a_millisecond_at_most() -> None:
    """The target is 200 µs, see `wisp bench routing`; the bound leaves room for a busy machine."""
    rng = np.random.default_rng(0)
    shape = (48, 128)
    pool = [(rng.random(shape, dtype=np.float32) ** 4) * np.float32(0.3) for _ in range(16)]
    fleet = fleet_of(*(one(f"r{i}", pool[i % 16], cap=32, turns=i % 7) for i in range(1000)))
    working_set = Uses.of(pool[3])
    durations_s = []
    for number in range(200):
        began_s = time.thread_time()
        route(RoutingRequest(session_key=f"s{number}", max_tokens=100, uses=working_set), fleet, NOW_S)
        durations_s.append(time.thread_time() - began_s)
    assert statistics.median(durations_s) < 0.0015
