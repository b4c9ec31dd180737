"""The simulator: times that can be computed by hand, and what must hold whatever the work."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_engines import ROUTING, flat_curves, make_engine, make_trace, make_turn, replayed_engine

from loadtests.traces import generate, open_sessions, workflow
from policies.damping import Damped, Damping
from policies.mv_wsa import MarginalValue
from policies.static_split import StaticSplit
from wisp_core.allocation.cost_model import CostModel, missing_evidence
from wisp_core.contracts import Decision, ReplicaSnapshot, Split
from wisp_core.simulator.routers import HashRouter, PowerOfTwoRouter, ScoredRouter, StickyLeastTurnsRouter
from wisp_core.simulator.simulation import SimulationSettings, simulate

SPLIT = Split(cap=4, kv_blocks=103)


def test_a_turn_alone_takes_its_passes_and_its_steps() -> None:
    trace = make_trace(make_turn(prompt_tokens=250, output_tokens=5))
    result = simulate(trace, make_engine(turn_s=0.5), split=SPLIT)
    # Three passes of 100, 100 and 50 tokens, then one step for each token after the first.
    assert result.ttft_s[0] == pytest.approx(3 * 1.0 + 2.5 + 0.5)
    assert result.latency_s[0] == pytest.approx(result.ttft_s[0] + 4)


def test_turns_that_come_together_share_passes_and_steps() -> None:
    trace = make_trace(*(make_turn(client, prompt_tokens=40, output_tokens=6) for client in range(2)))
    result = simulate(trace, make_engine(row_s=0.5), split=SPLIT)
    assert result.first_token_s.tolist() == pytest.approx([1.8, 1.8])
    assert result.ended_s.tolist() == pytest.approx([1.8 + 5 * 2.0] * 2)


def test_a_turn_that_comes_during_a_step_waits_for_its_end_and_stalls_the_others_by_its_pass() -> None:
    trace = make_trace(make_turn(0, output_tokens=11), make_turn(1, at_s=3.25, prompt_tokens=90, output_tokens=2))
    result = simulate(trace, make_engine(), split=SPLIT)
    assert result.first_token_s.tolist() == pytest.approx([2.0, 4.0 + 1.9])
    # The pass gives the running turn a token; without it the turn would have ended at 12.0.
    assert result.ended_s.tolist() == pytest.approx([12.9, 6.9])


def test_misses_cost_the_link_and_fall_with_the_cap() -> None:
    engine = make_engine(curves=flat_curves(8.0), link_bytes_per_s=2 * 4096.0, step_s=0.0)
    trace = make_trace(make_turn(output_tokens=2))
    for cap in (2, 4, 8):
        result = simulate(trace, engine, split=Split(cap=cap, kv_blocks=103))
        # Each miss copies two pages, one second each; a pass needs nearly all of 2 layers of 8 experts.
        assert result.ended_s[0] - result.first_token_s[0] == pytest.approx(8 * (1 - cap / 8), abs=1e-9)
        assert result.first_token_s[0] == pytest.approx(2.0 + 2 * (8 - cap), rel=1e-6)


def test_a_session_finds_its_prefix_unless_others_have_taken_the_blocks() -> None:
    first = make_turn(0, prompt_tokens=160, output_tokens=16)
    again = make_turn(0, prompt_tokens=208, prefix_tokens=176, output_tokens=2, at_s=100.0)
    other = make_turn(1, prompt_tokens=480, output_tokens=32, at_s=50.0)
    alone = simulate(make_trace(first, again), make_engine(), split=SPLIT)
    assert alone.first_token_s[1] - 100 == pytest.approx(1 + 0.32)
    crowded = simulate(make_trace(first, again, other), make_engine(), split=Split(cap=4, kv_blocks=36))
    # 32 of 36 blocks went to the other: of the prefix's 11 blocks the first 4 are left.
    assert crowded.first_token_s[1] - 100 == pytest.approx(2 + 0.01 * (208 - 4 * 16))


def test_turns_wait_in_order_for_blocks() -> None:
    turns = [make_turn(client, at_s=0.1 * client, prompt_tokens=240, output_tokens=16) for client in range(3)]
    result = simulate(make_trace(*turns), make_engine(), split=Split(cap=4, kv_blocks=33))
    assert result.first_token_s[2] > min(result.ended_s[0], result.ended_s[1])
    assert np.all(np.diff(result.first_token_s) > 0)


def test_a_client_waits_for_its_own_turn_and_thinks() -> None:
    result = simulate(make_trace(make_turn(0), make_turn(0, think_s=7.0)), make_engine(turn_s=0.25), split=SPLIT)
    assert result.arrived_s[1] == pytest.approx(result.ended_s[0] + 0.25 + 7.0)


def test_phases_with_barriers_follow_each_other() -> None:
    turns = [make_turn(0), make_turn(1, output_tokens=31), make_turn(2, phase=1, at_s=2.0), make_turn(3, phase=2)]
    result = simulate(make_trace(*turns, phases=("a", "b", "c"), has_barriers=True), make_engine(), split=SPLIT)
    assert result.arrived_s[2] == pytest.approx(max(result.ended_s[:2]) + 2.0)
    assert result.arrived_s[3] == pytest.approx(result.ended_s[2])


def test_a_turn_longer_than_the_model_is_refused_and_its_client_goes_on() -> None:
    trace = make_trace(make_turn(0, prompt_tokens=600), make_turn(0))
    summary = simulate(trace, make_engine(), split=SPLIT).summary()
    assert (summary["turns"], summary["refused"]) == (1, 1)


class Script:
    """Asks for one split after the other."""

    def __init__(self, *splits: Split) -> None:
        self.splits = splits
        self.seen: list[ReplicaSnapshot] = []

    def initial_state(self) -> int:
        return 0

    def decide(self, snapshot: ReplicaSnapshot, state: int) -> tuple[Decision, int]:
        self.seen.append(snapshot)
        return Decision(split=self.splits[min(state, len(self.splits) - 1)], reason="script"), state + 1


def test_a_resize_costs_its_pause_and_filling_the_new_slots() -> None:
    engine = make_engine(resize_s=0.5, resize_s_per_byte=1 / (4 * 2 * 2 * 4096), link_bytes_per_s=4 * 4096.0)
    engine = dataclasses.replace(engine, curves=flat_curves(0.0), pass_misses_by_cap=(0.0,) * 9)
    trace, settings_ = make_trace(make_turn(output_tokens=21)), SimulationSettings(epoch_s=5.0)
    still = simulate(trace, engine, split=Split(cap=4, kv_blocks=39))
    moved = simulate(
        trace, engine, split=Split(cap=4, kv_blocks=39), policy=Script(Split(cap=8, kv_blocks=35)), settings=settings_
    )
    # Four slots more: half a second, one second for their bytes, and 2 layers of 4 experts at half a second each.
    assert moved.ended_s[0] - still.ended_s[0] == pytest.approx(0.5 + 1.0 + 4.0)
    assert [(r.before.cap, r.after.cap, r.bytes_moved) for r in moved.resizes] == [(4, 8, 4 * 2 * 2 * 4096)]


def test_a_resize_within_a_step_counts_no_token_twice() -> None:
    # The second turn fits only after the resize, which comes while the first one's last step runs, from 18 to 19 s.
    turns = [make_turn(client, at_s=0.1 * client, prompt_tokens=200, output_tokens=16) for client in range(2)]
    result = simulate(
        make_trace(*turns),
        make_engine(),
        split=Split(cap=4, kv_blocks=15),
        policy=Script(Split(cap=3, kv_blocks=119)),
        settings=SimulationSettings(epoch_s=18.5),
    )
    assert len(result.resizes) == 1
    assert result.ended_s[0] == pytest.approx(19.0)
    totals = result.totals[0]
    assert totals.decode_tokens + totals.decode_tokens_in_passes == pytest.approx(2 * 15)


def test_a_resize_within_another_s_pause_waits_for_its_end() -> None:
    splits = [Split(cap=3, kv_blocks=119), Split(cap=4, kv_blocks=103)] * 4
    result = simulate(
        make_trace(make_turn(output_tokens=31)),
        make_engine(resize_s=2.0),
        split=SPLIT,
        policy=Script(*splits),
        settings=SimulationSettings(epoch_s=1.0),
    )
    assert len(result.resizes) == len(splits)
    # Its pass and its steps, and every pause in full.
    assert result.ended_s[0] == pytest.approx(2.0 + 30.0 + 2.0 * len(splits))


def test_a_shrink_below_what_runs_is_deferred() -> None:
    trace = make_trace(make_turn(prompt_tokens=480, output_tokens=30))
    result = simulate(
        trace,
        make_engine(),
        split=SPLIT,
        policy=Script(Split(cap=5, kv_blocks=20)),
        settings=SimulationSettings(epoch_s=5.0),
    )
    assert result.num_deferred > 0
    assert result.splits[0] == SPLIT


def test_a_resize_goes_as_far_as_running_turns_leave_room() -> None:
    # Two turns hold 32 blocks each: beside them there is room for 6 slots.
    turns = [make_turn(client, prompt_tokens=480, output_tokens=30) for client in range(2)]
    result = simulate(
        make_trace(*turns),
        make_engine(),
        split=SPLIT,
        policy=Script(Split(cap=8, kv_blocks=39)),
        settings=SimulationSettings(epoch_s=15.0),
    )
    assert [(one.before, one.after) for one in result.resizes][:1] == [(SPLIT, Split(cap=6, kv_blocks=71))]


def test_turns_that_outgrow_the_pool_take_no_slots_from_a_split_that_is_held() -> None:
    # Eight turns of 26 blocks that are admitted by half of that: they will need twice the pool.
    turns = [make_turn(client, prompt_tokens=16, output_tokens=400) for client in range(8)]
    policy = Damped(policy=StaticSplit(cap=SPLIT.cap))
    result = simulate(make_trace(*turns), make_engine(), split=SPLIT, policy=policy)
    assert result.resizes == ()


def test_a_snapshot_says_what_happened() -> None:
    engine, script = replayed_engine(), Script(SPLIT)
    turns = [
        make_turn(c, topic=c, think_s=1.0, prompt_tokens=60 + 20 * i, prefix_tokens=20 * i)
        for c in range(3)
        for i in range(8)
    ]
    simulate(
        make_trace(*turns), engine, split=SPLIT, policy=script, settings=SimulationSettings(epoch_s=10.0, window_s=1e9)
    )
    last = script.seen[-1]
    assert missing_evidence(last) is None
    assert last.decode_misses_by_cap == tuple(sorted(last.decode_misses_by_cap, reverse=True))
    assert last.decode.tokens / last.decode.steps == pytest.approx(
        last.decode_tokens_per_s / last.decode_steps_per_s, rel=0.05
    )
    assert last.kv.reuse
    assert sum(one.share for one in last.kv.demand) == pytest.approx(1.0)
    model = CostModel.from_snapshot(last)
    assert model.cost(SPLIT) == pytest.approx(last.busy_s_per_s, rel=0.1)


def test_reports_can_be_wrong_by_a_known_factor() -> None:
    def first_report(**errors: float) -> ReplicaSnapshot:
        script = Script(SPLIT)
        simulate(
            make_trace(make_turn(output_tokens=60)),
            replayed_engine(),
            split=SPLIT,
            policy=script,
            settings=SimulationSettings(epoch_s=20.0, **errors),
        )
        return script.seen[-1]

    true, wrong = first_report(), first_report(link_report=1.2, curve_report=0.8)
    assert wrong.link_bytes_per_s == pytest.approx(1.2 * true.link_bytes_per_s)
    assert wrong.decode_misses_by_cap == pytest.approx([0.8 * misses for misses in true.decode_misses_by_cap])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 400), st.integers(1, 60), st.floats(0, 30), st.integers(0, 3)),
        min_size=1,
        max_size=40,
    ),
    st.lists(st.integers(2, 8), min_size=1, max_size=6),
)
def test_whatever_comes_every_turn_ends_once_and_every_token_is_counted(turns: list[Any], caps: list[int]) -> None:
    engine = replayed_engine()
    trace = make_trace(
        *(
            make_turn(
                client,
                prompt_tokens=prompt,
                output_tokens=output,
                think_s=think,
                topic=topic,
                prefix_tokens=prompt // 2,
            )
            for client, prompt, output, think, topic in turns
        )
    )
    script = Script(*(engine.largest_split(cap) for cap in caps))
    result = simulate(trace, engine, policy=script, settings=SimulationSettings(epoch_s=3.0))
    fits = trace.turns["prompt_tokens"] + trace.turns["output_tokens"] <= 512
    assert np.array_equal(np.isfinite(result.ended_s), fits)
    assert np.all(result.first_token_s[fits] > result.arrived_s[fits])
    assert np.all(result.ended_s[fits] >= result.first_token_s[fits])
    totals = result.totals[0]
    outputs = trace.turns["output_tokens"][fits]
    assert totals.decode_tokens + totals.decode_tokens_in_passes == pytest.approx(float((outputs - 1).sum()), abs=1e-3)
    prompts = trace.turns["prompt_tokens"][fits]
    assert totals.pass_tokens + totals.hit_tokens == prompts.sum()
    assert totals.busy_s <= result.makespan_s * (1 + 1e-9) + 1e-6
    for snapshot in script.seen:
        assert snapshot.kv.used_blocks + snapshot.kv.cached_blocks <= snapshot.split.kv_blocks


def test_equal_arguments_give_equal_results() -> None:
    trace = generate(workflow("mixed_tenants", 200, max_context_tokens=512), seed=4)
    first, again = (simulate(trace, replayed_engine(), policy=MarginalValue()) for _ in range(2))
    assert np.array_equal(first.ended_s, again.ended_s)


def test_the_product_s_policies_run_as_they_are() -> None:
    trace, engine = generate(workflow("tool_bursts", 400, max_context_tokens=512), seed=0), replayed_engine()
    costs = {cap: simulate(trace, engine, split=engine.largest_split(cap)).mean_turn_s for cap in range(2, 9)}
    static = simulate(trace, engine, policy=StaticSplit(cap=7))
    assert static.splits[0].cap == 7
    damped = Damped(policy=MarginalValue(), damping=Damping(confirmations=1, dead_zone_fraction=0.0))
    moved = simulate(trace, engine, policy=damped, settings=SimulationSettings(epoch_s=20.0, window_s=600.0))
    assert moved.mean_turn_s < max(costs.values())
    assert moved.resizes


@pytest.mark.parametrize("router", [HashRouter(), PowerOfTwoRouter(1), StickyLeastTurnsRouter(), ScoredRouter()])
def test_routers_spread_sessions_over_replicas(router: Any) -> None:
    trace = open_sessions(workflow("tool_bursts", 1500, max_context_tokens=512), sessions_per_s=0.02, seed=0)
    result = simulate(trace, replayed_engine(), num_replicas=4, router=router, routing=ROUTING)
    turns = np.bincount(result.replica_of, minlength=4)
    assert turns.sum() == len(trace)
    assert turns.min() > len(trace) / 16
    homes = {(int(s), int(r)) for s, r in zip(trace.turns["session"], result.replica_of, strict=True)}
    is_sticky = not isinstance(router, PowerOfTwoRouter | ScoredRouter)
    assert (len(homes) == trace.num_sessions) == is_sticky or isinstance(router, ScoredRouter)


def test_more_replicas_need_a_router() -> None:
    with pytest.raises(ValueError, match="router"):
        simulate(make_trace(make_turn()), make_engine(), num_replicas=2)


def test_engines_start_at_half_of_the_budget() -> None:
    engine = make_engine()
    split = engine.half_split()
    assert engine.layout.experts_bytes_by_cap[split.cap] <= engine.budget_bytes / 2
    assert engine.layout.experts_bytes_by_cap[split.cap + 1] > engine.budget_bytes / 2
