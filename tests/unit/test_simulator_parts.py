"""Parts of the simulator against plain references: expert curves, the prefix cache."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_engines import make_engine

from wisp_core.contracts import Split
from wisp_core.simulator.cluster import Cluster
from wisp_core.simulator.expert_curves import RoutingModel, replay_curves
from wisp_core.simulator.prefix_cache import PrefixCache
from wisp_core.simulator.replica import Job, Replica
from wisp_core.simulator.topic_curves import TopicCurves
from wisp_core.working_set.miss_curve import misses_by_cap
from wisp_core.working_set.signature import HALF_LIFE_TOKENS

MODEL = RoutingModel(layers=4, experts=32, top_k=4)


def test_curves_fall_with_the_cap_and_grow_with_batch_and_topics() -> None:
    curves = replay_curves(MODEL, max_batch=16)
    for batch in (1, 3, 16):
        one = np.array(curves.by_cap(batch, 1))
        many = np.array(curves.by_cap(batch, min(batch, 8)))
        assert np.all(np.diff(one) <= 1e-9)
        assert one[32] == 0
        assert many[8:24].sum() >= one[8:24].sum()
    assert curves.by_cap(4, 1)[12] < curves.by_cap(8, 1)[12]
    assert curves.distinct_experts(1, 1) == 4 * 4
    assert 4 * 4 < curves.distinct_experts(4, 4) < 4 * 16


def test_topics_do_not_matter_where_everybody_routes_alike() -> None:
    curves = replay_curves(RoutingModel(layers=4, experts=32, top_k=4, own_share=0.0), max_batch=8)
    one, eight = np.array(curves.by_cap(8, 1)), np.array(curves.by_cap(8, 8))
    assert np.abs(one - eight)[4:28].max() < 0.1 * one[4]


def test_a_topic_that_comes_back_finds_less_the_more_others_have_run() -> None:
    curves = replay_curves(MODEL, max_batch=2)
    assert curves.comeback_misses(0, 8) == 0
    assert 0 < curves.comeback_misses(1, 16) <= curves.comeback_misses(8, 16)
    assert curves.comeback_misses(8, 32) == 0


def test_a_prompt_misses_less_than_the_share_of_experts_without_a_slot() -> None:
    curves = replay_curves(MODEL, max_batch=2)
    for tokens in (1, 8, 48, 5000):
        missed = [curves.missed_by_prompt(tokens, cap, MODEL.top_k) for cap in range(33)]
        assert np.all(np.diff(missed) <= 0)
        assert missed[32] == 0
        assert missed[16] <= missed[0] / 2, "what lies in the slots is what prompts need too"
    assert curves.missed_by_prompt(1, 0, MODEL.top_k) == MODEL.top_k
    assert curves.missed_by_prompt(5000, 0, MODEL.top_k) == pytest.approx(32, abs=0.5)


def test_the_two_rules_of_overflow_agree_where_a_step_fits() -> None:
    in_place, by_row = (
        np.array(
            replay_curves(RoutingModel(layers=2, experts=32, top_k=4, is_read_in_place=rule), max_batch=4).by_cap(4, 4)
        )
        for rule in (True, False)
    )
    assert np.allclose(in_place[16:], by_row[16:])
    assert np.all(by_row >= in_place - 1e-9)


def test_a_batch_of_one_costs_what_exact_stack_distances_say() -> None:
    rng = np.random.default_rng(0)
    last_use = rng.permutation(32).astype(np.int64)
    rows = rng.permutation(32)[:4][None]
    expected = misses_by_cap(last_use, rows)
    order = np.argsort(-last_use)
    assert expected.tolist() == [int(sum(list(order).index(e) >= cap for e in rows[0])) for cap in range(33)]


def test_use_rates_are_chances_that_sum_to_top_k() -> None:
    rates = MODEL.use_rates(3)
    assert rates.shape == (3, 4, 32)
    assert rates.max() <= 1
    assert np.allclose(rates.sum(axis=-1), 4, atol=0.02)


class BlockLru:
    """A KV pool block by block: the plain reference."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.running = capacity, 0
        self.cached: OrderedDict[tuple[int, int], None] = OrderedDict()

    def admit(self, session: int, blocks: int) -> int:
        own = 0
        while (session, own) in self.cached:
            own += 1
        for key in [key for key in self.cached if key[0] == session]:
            del self.cached[key]
        self.running += blocks
        self.evict()
        return own

    def finish(self, session: int, blocks: int) -> None:
        self.running -= blocks
        for key in [key for key in self.cached if key[0] == session]:
            del self.cached[key]
        for block in reversed(range(blocks)):  # the last block is the first to go
            self.cached[session, block] = None
        self.evict()

    def evict(self) -> None:
        while self.running + len(self.cached) > self.capacity:
            self.cached.popitem(last=False)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12), st.booleans(), st.integers(8, 40)), max_size=60))
def test_whole_sessions_are_evicted_as_single_blocks_would_be(actions: list[tuple[int, int, bool, int]]) -> None:
    cache, reference, running = PrefixCache(30), BlockLru(30), list[tuple[int, int]]()
    for session, blocks, is_arrival, capacity in actions:
        if is_arrival and cache.can_admit(blocks) and session not in [s for s, _ in running]:
            assert cache.admit(session, blocks) == reference.admit(session, blocks)
            running.append((session, blocks))
        elif running and not is_arrival:
            ended = running.pop(0)
            cache.finish(ended[0], ended[1], ended[1])
            reference.finish(*ended)
        elif cache.resize(capacity):
            reference.capacity = capacity
            reference.evict()
        assert (cache.running_blocks, cache.cached_blocks) == (reference.running, len(reference.cached))


def test_no_prefix_is_found_that_was_not_there() -> None:
    cache = PrefixCache(10)
    assert cache.admit(1, 3) == 0
    cache.finish(1, 3, 4)
    assert (cache.running_blocks, cache.cached_blocks) == (0, 4), "it has grown while it ran"
    assert cache.admit(1, 6) == 4
    with pytest.raises(StopIteration):
        cache.admit(2, 5)  # the caller asks can_admit first


def test_routers_see_an_idle_replica_become_idle() -> None:
    replicas = [idle_replica() for _ in range(2)]
    cluster = Cluster(replicas, routing=None, num_topics=1, refresh_s=0.25)
    cluster.fleet()
    job, wake_s = Job(0, 0, 0, 64, 0, 10, 5, 5), 0.0
    cluster.begin_turn(0)
    wakes = replicas[0].arrive(job, 0.0)
    while wakes is not None:
        wake_s, wakes = wakes, replicas[0].wake(wakes)
    cluster.end_turn(0, wake_s)
    for now_s in (wake_s + 0.3, wake_s + 30.0):
        cluster.now_s = now_s
        seen = cluster.fleet().column("mean_turns").tolist()
        assert seen == pytest.approx([replica.recent_turns(now_s) for replica in replicas], rel=1e-4)
    replicas[1].resize(Split(cap=3, kv_blocks=103), now_s)
    cluster.note_resized(1)
    cluster.now_s += 0.3
    assert cluster.fleet().column("cap").tolist() == [4, 3]


def test_routers_see_what_a_replica_has_decoded_lately_not_who_is_there() -> None:
    replica, rates = idle_replica(), np.array([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=np.float32)
    cluster = Cluster([replica], routing=TopicCurves(rates), num_topics=2, refresh_s=0.25)
    tokens = round(HALF_LIFE_TOKENS) + 1  # of which a prefill gives the first
    wakes: float | None = 0.0
    for topic, expected in ((0, [1.0, 0.0]), (1, [1 / 3, 2 / 3])):
        before = cluster.fleet().rates.copy()
        cluster.begin_turn(0)
        assert wakes is not None
        wakes = replica.arrive(Job(topic, topic, topic, 64, 0, tokens, 5, 5), wakes)
        cluster.now_s += 1.0
        assert cluster.fleet().rates.tolist() == before.tolist(), "it has decoded nothing yet"
        while wakes is not None:
            cluster.now_s, wakes = wakes + 1.0, replica.wake(wakes)
            cluster.begin_turn(0)  # something happened
            shares = cluster.fleet().rates.reshape(-1)
        wakes = cluster.now_s
        assert shares == pytest.approx(expected, rel=0.01)


def idle_replica() -> Replica:
    return Replica(
        make_engine(),
        Split(cap=4, kv_blocks=103),
        on_first_token=lambda turn, now_s: None,
        on_end=lambda turn, now_s: None,
        measures_reuse=False,
        window_s=10.0,
    )
