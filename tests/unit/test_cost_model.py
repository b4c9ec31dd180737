from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_snapshots import make_snapshot

from wisp_core.allocation.cost_model import CostModel, missing_evidence, model_error, union_size
from wisp_core.allocation.reuse_forecast import forecast
from wisp_core.contracts import CostFit, DemandBin, KvDemand, PagerCounts, ReplicaSnapshot, ReuseBin, Split

COPY_S = 8192 / 1e6  # one expert over the link


def test_at_the_current_split_the_cost_is_what_was_observed() -> None:
    snapshot = make_snapshot()
    terms = CostModel.from_snapshot(snapshot).terms(snapshot.split)
    assert terms.decode_link_s == pytest.approx(10 * 4 * COPY_S)
    assert terms.decode_compute_s == pytest.approx(10 * (2.0 - 1.0) / 100)
    assert terms.prefill_link_s == pytest.approx(1 * 16 * COPY_S)
    assert terms.prefill_compute_s == pytest.approx(100 * (2.0 - 1.0) / 1000)
    assert terms.total_s == pytest.approx(56 * COPY_S + 0.2)


def test_decode_misses_follow_the_curve() -> None:
    model = CostModel.from_snapshot(make_snapshot())
    saved = model.cost(Split(cap=4, kv_blocks=40)) - model.cost(Split(cap=5, kv_blocks=40))
    assert saved == pytest.approx(10 * 1 * COPY_S + 1 * 4 * COPY_S)


def test_lost_reuse_is_prefilled_again() -> None:
    reuse = (
        ReuseBin(blocks=20, turns_per_s=1, tokens_per_s=50),
        ReuseBin(blocks=60, turns_per_s=1, tokens_per_s=200),
    )
    snapshot = make_snapshot(kv=KvDemand(reuse=reuse), split=Split(cap=4, kv_blocks=63))
    model = CostModel.from_snapshot(snapshot)
    per_token_s = 16 / 100 * COPY_S + 1.0 / 1000
    kept = model.cost(Split(cap=4, kv_blocks=60))
    assert kept == model.cost(snapshot.split)
    assert model.cost(Split(cap=4, kv_blocks=59)) - kept == pytest.approx(200 * per_token_s)
    assert model.cost(Split(cap=4, kv_blocks=19)) - kept == pytest.approx(250 * per_token_s)


def test_reuse_lost_now_is_already_in_what_is_prefilled() -> None:
    reuse = (ReuseBin(blocks=60, turns_per_s=1, tokens_per_s=80),)
    small = make_snapshot(kv=KvDemand(reuse=reuse), split=Split(cap=4, kv_blocks=31))
    model = CostModel.from_snapshot(small)
    assert model.terms(small.split).prefill_compute_s == pytest.approx(100 * 1e-3)
    assert model.terms(Split(cap=4, kv_blocks=63)).prefill_compute_s == pytest.approx(20 * 1e-3)


def test_demand_for_prompts_holds_whatever_was_prefilled_in_the_window() -> None:
    reuse = (ReuseBin(blocks=60, turns_per_s=1, tokens_per_s=80),)
    grown = make_snapshot(  # the window still shows prefills from before the pool grew to 63 blocks
        kv=KvDemand(prompt_tokens_per_s=100, reuse=reuse),
        split=Split(cap=4, kv_blocks=63),
        prefill_tokens_per_s=100.0,
    )
    model = CostModel.from_snapshot(grown)
    assert model.terms(grown.split).prefill_compute_s == pytest.approx(20 * 1e-3)
    assert model.terms(Split(cap=4, kv_blocks=59)).prefill_compute_s == pytest.approx(100 * 1e-3)


def test_half_the_demanded_blocks_halve_the_batch_and_double_the_steps() -> None:
    snapshot = make_snapshot(kv=KvDemand(mean_turns=2, demand_blocks=80))
    model = CostModel.from_snapshot(snapshot)
    full, half = model.terms(Split(cap=4, kv_blocks=80)), model.terms(Split(cap=4, kv_blocks=40))
    assert half.decode_compute_s == pytest.approx(2 * full.decode_compute_s)
    # 600 distinct in 100 steps of 2 layers and 2 tokens: 3 experts where one token has 2. Both fit 4 slots, so that
    # each lookup misses as often as now: two thirds of the misses, twice as often.
    assert half.decode_link_s == pytest.approx(20 * (8 - 4) * 2 / 3 * COPY_S)


def test_a_larger_batch_outgrows_the_cap() -> None:
    cliff = (8.0, 8.0, 8.0, 6.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # what one step needs now just fits 4 slots
    snapshot = make_snapshot(
        kv=KvDemand(mean_turns=2, demand_blocks=80),
        split=Split(cap=4, kv_blocks=40),
        decode_misses_by_cap=cliff,
    )
    model = CostModel.from_snapshot(snapshot)
    now, doubled = model.terms(snapshot.split), model.terms(Split(cap=4, kv_blocks=80))
    assert now.decode_link_s == 0.0
    # u = 1.5: the curve at 4 / 1.5 = 2.67 slots is 8 - 2 · 0.67, a half more of it, half as often.
    assert doubled.decode_link_s == pytest.approx(5 * 1.5 * (8 - 2 * 2 / 3) * COPY_S)
    assert model.terms(Split(cap=6, kv_blocks=80)).decode_link_s == 0.0


def test_more_kv_than_demanded_changes_nothing() -> None:
    model = CostModel.from_snapshot(make_snapshot(kv=KvDemand(mean_turns=2, demand_blocks=80)))
    assert model.cost(Split(cap=4, kv_blocks=80)) == model.cost(Split(cap=4, kv_blocks=127))


def test_turns_beyond_the_engines_limit_do_not_wait_for_kv() -> None:
    crowded = make_snapshot(kv=KvDemand(mean_turns=16, demand_blocks=160))  # only 8 can run: 80 blocks
    model = CostModel.from_snapshot(crowded)
    assert model.cost(Split(cap=4, kv_blocks=80)) == model.cost(Split(cap=4, kv_blocks=127))
    short, enough = (model.terms(Split(cap=4, kv_blocks=blocks)) for blocks in (79, 80))
    assert short.decode_compute_s > enough.decode_compute_s


def test_without_a_prefill_in_the_window_a_lost_prefix_costs_one_pass_a_turn() -> None:
    reuse = (ReuseBin(blocks=60, turns_per_s=3, tokens_per_s=300),)
    snapshot = make_snapshot(
        kv=KvDemand(reuse=reuse),
        prefill=PagerCounts(),
        prefill_steps_per_s=0.0,
        prefill_tokens_per_s=0.0,
        prefill_misses_by_cap=(),
    )
    model = CostModel.from_snapshot(snapshot)
    assert model.terms(Split(cap=4, kv_blocks=59)).prefill_link_s == pytest.approx(3 * 2 * (8 - 4) * COPY_S)
    assert model.terms(Split(cap=4, kv_blocks=60)).prefill_link_s == 0.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"decode_steps_per_s": 0.0}, "no turn"),
        ({"link_bytes_per_s": 0.0}, "link speed"),
    ],
)
def test_missing_evidence_is_named(changes: dict[str, object], text: str) -> None:
    assert text in (missing_evidence(make_snapshot(**changes)) or "")


def test_a_busy_replica_lacks_nothing() -> None:
    assert missing_evidence(make_snapshot()) is None


@pytest.mark.parametrize("curve", [(), (1.0, 0.0)])
def test_before_a_decode_step_was_seen_routing_is_taken_to_have_no_preference(curve: tuple[float, ...]) -> None:
    # 8 turns of top-2 of 8 experts need 7.2 of them; the first prompts are computed, and no step has only decoded.
    kv = KvDemand(running_turns=8, output_tokens_per_s=40.0, turns_per_s=1.0)
    model = CostModel.from_snapshot(
        make_snapshot(decode_misses_by_cap=curve, decode_steps_per_s=0.0, decode=PagerCounts(), kv=kv)
    )
    assert model.batch == 8
    assert [model.decode_misses(cap, 8.0) for cap in (0, 4, 8)] == pytest.approx([14.4, 7.2, 0.0], abs=0.01)


@given(
    demand=st.integers(0, 300),
    now=st.integers(1, 127),
    blocks=st.tuples(st.integers(1, 127), st.integers(1, 127)),
    reuse=st.lists(st.tuples(st.integers(0, 200), st.floats(0, 1e4)), max_size=5),
    distinct=st.integers(0, 2000),
)
def test_prefills_and_steps_never_grow_with_kv(
    demand: int, now: int, blocks: tuple[int, int], reuse: list[tuple[int, float]], distinct: int
) -> None:
    bins = tuple(ReuseBin(blocks=b, turns_per_s=1, tokens_per_s=t) for b, t in sorted(reuse))
    snapshot = make_snapshot(
        split=Split(cap=4, kv_blocks=now),
        kv=KvDemand(mean_turns=2, demand_blocks=demand, reuse=bins),
        decode=PagerCounts(steps=100, tokens=400, distinct=distinct, seconds=2.0, link_seconds=1.0),
    )
    model = CostModel.from_snapshot(snapshot)
    less, more = (model.terms(Split(cap=3, kv_blocks=b)) for b in sorted(blocks))
    assert more.prefill_link_s <= less.prefill_link_s
    assert more.prefill_compute_s <= less.prefill_compute_s
    assert more.decode_compute_s <= less.decode_compute_s


@given(st.lists(st.floats(0, 100), min_size=9, max_size=9), st.integers(1, 127), st.integers(0, 127))
def test_a_flat_or_falling_curve_never_makes_a_larger_cap_cost_more(falls: list[float], now: int, blocks: int) -> None:
    curve = tuple(sum(falls[cap:]) for cap in range(9))
    snapshot = make_snapshot(
        decode_misses_by_cap=curve,
        split=Split(cap=4, kv_blocks=now),
        kv=KvDemand(mean_turns=2, demand_blocks=100),
    )
    model = CostModel.from_snapshot(snapshot)
    costs = [model.cost(Split(cap=cap, kv_blocks=blocks)) for cap in range(9)]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(costs))


def passes(**kv: Any) -> ReplicaSnapshot:
    """Prompts of 400 tokens, 4 passes each, one a second, of which a long reuse saves 300 tokens and 3 passes."""
    reuse = (ReuseBin(blocks=60, turns_per_s=1, tokens_per_s=300, passes_per_s=3),)
    fields = {"prompt_tokens_per_s": 400, "prompt_passes_per_s": 4, "reuse": reuse, "demand_blocks": 16} | kv
    return make_snapshot(
        kv=KvDemand(**fields),
        split=Split(cap=4, kv_blocks=63),
        fit=CostFit(step_s=0.01, token_s=0.002, pass_s=0.05, prompt_token_s=0.001, num_samples=9),
    )


def test_a_lost_prefix_costs_the_passes_that_it_saved_and_the_tokens_arithmetic() -> None:
    model = CostModel.from_snapshot(passes())
    kept, lost = (model.terms(Split(cap=4, kv_blocks=blocks)) for blocks in (60, 59))
    assert lost.prefill_link_s - kept.prefill_link_s == pytest.approx(3 * 16 * COPY_S)
    assert lost.prefill_compute_s - kept.prefill_compute_s == pytest.approx(3 * 0.05 + 300 * 0.001)


def test_a_short_lost_prefix_costs_no_pass() -> None:
    short = (ReuseBin(blocks=60, turns_per_s=1, tokens_per_s=80, passes_per_s=0),)
    model = CostModel.from_snapshot(passes(prompt_tokens_per_s=100, prompt_passes_per_s=1, reuse=short))
    kept, lost = (model.terms(Split(cap=4, kv_blocks=blocks)) for blocks in (60, 59))
    assert lost.prefill_link_s == kept.prefill_link_s
    assert lost.prefill_compute_s - kept.prefill_compute_s == pytest.approx(80 * 0.001)


def test_what_a_host_tier_brings_back_costs_the_cheaper_of_fetching_and_computing() -> None:
    layout = passes().layout
    lost_s = 3 * (0.05 + 16 * COPY_S) + 300 * 0.001
    for bytes_per_s, expected_s in ((1e5, 300 * layout.block_bytes / layout.block_tokens / 1e5), (1.0, lost_s)):
        model = CostModel.from_snapshot(passes(fetch_bytes_per_s=bytes_per_s))
        kept, lost = (model.cost(Split(cap=4, kv_blocks=blocks)) for blocks in (60, 59))
        assert lost - kept == pytest.approx(expected_s)


def test_what_a_host_tier_has_not_kept_is_computed() -> None:
    lost_s = 3 * (0.05 + 16 * COPY_S) + 300 * 0.001
    for host_blocks, is_fetched in ((60, True), (59, False)):  # the reuse is 60 blocks away
        model = CostModel.from_snapshot(passes(fetch_bytes_per_s=1e9, host_blocks=host_blocks))
        kept, lost = (model.cost(Split(cap=4, kv_blocks=blocks)) for blocks in (60, 59))
        assert lost - kept == (pytest.approx(0, abs=1e-3) if is_fetched else pytest.approx(lost_s))


def test_growth_spreads_what_would_just_fit() -> None:
    snapshot = passes()
    model = CostModel.from_snapshot(snapshot, growth_fraction=0.5)
    none, half, whole = (model.terms(Split(cap=4, kv_blocks=blocks)).prefill_compute_s for blocks in (60, 75, 90))
    assert none - whole == pytest.approx(3 * 0.05 + 300 * 0.001)
    assert half - whole == pytest.approx((none - whole) / 2)


def test_turns_decode_in_the_steps_that_prefill_too() -> None:
    quiet = passes().model_copy(update={"prefill_steps_per_s": 0.0})
    asked = quiet.kv.model_copy(update={"output_tokens_per_s": 20.0})
    model = CostModel.from_snapshot(quiet.model_copy(update={"kv": asked}))
    kept, lost = (model.terms(Split(cap=4, kv_blocks=blocks)) for blocks in (60, 59))  # 1 and 4 passes a second
    assert kept.decode_link_s == pytest.approx((20 / 2 - 1) * 4 * COPY_S)
    assert lost.decode_link_s == pytest.approx((20 / 2 - 4) * 4 * COPY_S)


def test_turns_of_a_phase_that_has_just_begun_are_expected_back_like_those_before() -> None:
    demand = (DemandBin(blocks=50, share=0.5), DemandBin(blocks=80, share=0.5))
    begun = KvDemand(prompt_tokens_per_s=1000, prompt_passes_per_s=11, turns_per_s=1, demand=demand, return_share=0.8)
    bins = forecast(make_snapshot(kv=begun))
    assert [b.blocks for b in bins] == [50, 80]
    assert sum(b.tokens_per_s for b in bins) == pytest.approx(800)
    assert sum(b.passes_per_s for b in bins) == pytest.approx(8), "a turn needs one pass anyhow"
    seen = (ReuseBin(blocks=9, turns_per_s=1, tokens_per_s=300),)
    later = forecast(make_snapshot(kv=begun.model_copy(update={"reuse": seen})))
    assert later[0] == seen[0]
    assert sum(b.tokens_per_s for b in later) == pytest.approx(800), "what is measured already is not expected twice"
    assert forecast(make_snapshot(kv=begun.model_copy(update={"return_share": None, "reuse": seen}))) == seen


def test_demand_over_time_limits_the_batch_only_while_it_is_there() -> None:
    demand = (DemandBin(blocks=20, share=0.75), DemandBin(blocks=80, share=0.25))
    model = CostModel.from_snapshot(make_snapshot(kv=KvDemand(mean_turns=2, demand=demand, demand_blocks=80)))
    full, half = model.terms(Split(cap=4, kv_blocks=80)), model.terms(Split(cap=4, kv_blocks=40))
    assert half.decode_compute_s == pytest.approx(full.decode_compute_s / (0.75 + 0.25 * 0.5))


def test_preempted_tokens_are_computed_again_until_kv_holds_the_demand() -> None:
    snapshot = make_snapshot(
        kv=KvDemand(mean_turns=2, demand_blocks=80, preempted_tokens_per_s=50),
        split=Split(cap=4, kv_blocks=60),
        fit=CostFit(prompt_token_s=0.001, num_samples=9),
    )
    model = CostModel.from_snapshot(snapshot)
    tokens = {b: model.terms(Split(cap=4, kv_blocks=b)).prefill_compute_s / 0.001 for b in (40, 60, 80, 127)}
    assert [tokens[b] - tokens[127] for b in (40, 60, 80)] == pytest.approx([100, 50, 0])


def test_a_move_costs_the_copies_that_fill_new_slots_and_the_prefixes_that_fill_new_blocks() -> None:
    changes = {"split": Split(cap=4, kv_blocks=55), "prefill_steps_per_s": 4.0}
    model = CostModel.from_snapshot(passes().model_copy(update=changes))
    assert model.move(Split(cap=4, kv_blocks=55)).total_s == 0.0
    assert model.move(Split(cap=7, kv_blocks=20)).experts_s == pytest.approx(3 * 2 * COPY_S / 2)
    lost_s = 3 * (0.05 + 4 * (8 - 2) * COPY_S) + 300 * 0.001
    kv_s = model.move(Split(cap=2, kv_blocks=63)).kv_s
    assert kv_s == pytest.approx(8 * 16 * lost_s / 300 / 2)
    assert model.move(Split(cap=2, kv_blocks=59)).total_s == 0.0, "no prefix waits for these blocks"


def test_the_placed_sessions_scale_the_curve_that_was_seen() -> None:
    seen = make_snapshot()
    placed = seen.model_copy(update={"placed_miss_ratio_by_cap": (1.0,) * 4 + (2.0,) * 5})
    once, twice = (CostModel.from_snapshot(s).terms(s.split).decode_link_s for s in (seen, placed))
    assert twice == pytest.approx(2 * once)
    unseen = placed.model_copy(update={"decode_misses_by_cap": ()})
    at_first = unseen.model_copy(update={"placed_miss_ratio_by_cap": ()})
    assert CostModel.from_snapshot(unseen) == CostModel.from_snapshot(at_first), "there is nothing to scale"


def test_a_step_has_one_token_at_least_however_small_the_pool() -> None:
    fit = CostFit(step_s=0.01, num_samples=9)
    kv = KvDemand(mean_turns=2, demand_blocks=1000, output_tokens_per_s=12.0)
    model = CostModel.from_snapshot(make_snapshot(fit=fit, kv=kv))
    few = model.terms(Split(cap=4, kv_blocks=10)).decode_compute_s
    assert few == pytest.approx(0.01 * (12 - model.prompt_passes_per_s))


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 4.0), (1.5, 5.0), (2, 6.0), (4, 8.0), (16, 13.1), (64, 21.0), (1024, 32.0)]
)
def test_a_union_is_read_between_batches_and_grows_on_as_it_did(rows: float, expected: float) -> None:
    sizes = (0.0, 4.0, 6.0, 7.2, 8.0, 8.6, 9.2, 9.7, 10.24)  # from 4 to 8 rows times 1.28
    assert union_size(sizes, rows, most=32) == pytest.approx(expected, rel=0.03)


def test_the_error_compares_predicted_and_measured_engine_time_of_what_ran() -> None:
    snapshot = make_snapshot(fit=CostFit(step_s=0.01, token_s=0.002, pass_s=0.1, prompt_token_s=0.001, num_samples=1))
    model = CostModel.from_snapshot(snapshot)
    assert model_error(model, snapshot) is None
    ran_s = 10 * (0.01 + 2 * 0.002 + 4 * model.copy_s) + (0.1 + 16 * model.copy_s) + 100 * 0.001
    measured = snapshot.model_copy(update={"busy_s_per_s": 2 * ran_s})
    assert model_error(model, measured) == pytest.approx(0.5)
    # More is asked for than the engine can do.
    asked = measured.kv.model_copy(update={"prompt_tokens_per_s": 1e6, "prompt_passes_per_s": 1e4, "turns_per_s": 10})
    overloaded = measured.model_copy(update={"kv": asked})
    assert model_error(CostModel.from_snapshot(overloaded), overloaded) == pytest.approx(0.5)
    placed = measured.model_copy(update={"placed_miss_ratio_by_cap": (2.0,) * 9})
    assert model_error(CostModel.from_snapshot(placed), placed) == pytest.approx(0.5), "others ran than will"
