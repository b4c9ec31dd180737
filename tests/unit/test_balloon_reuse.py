"""Stack distances of prefix blocks."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wisp_core.contracts import ReuseBin
from wisp_core.demand.reuse import PrefixReuse, StackDistances
from wisp_core.demand.turn_window import TurnWindow


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), max_size=600), st.sampled_from([3, 6, None]))
def test_distances_are_the_weight_above_in_the_lru_stack(uses: list[tuple[int, int]], max_weight: int | None) -> None:
    stack: list[tuple[int, int]] = []
    distances = StackDistances(max_weight)
    for key, weight in uses:
        known = [other for other, _ in stack]
        above = sum(w for _, w in stack[: known.index(key)]) if key in known else None
        assert distances.since(key) == above
        distances.touch(key, weight)
        stack = [(key, weight), *((other, w) for other, w in stack if other != key)]
        while max_weight is not None and sum(w for _, w in stack) > max_weight:
            stack.pop()
        assert len(distances) == len(stack)


class Meter:
    """Adds up what reuse saves over 10 seconds."""

    def __init__(self, max_blocks: int = 1024) -> None:
        self.reuse = PrefixReuse(max_blocks=max_blocks, block_tokens=16, pass_tokens=64)
        self.saved = np.zeros((len(self.reuse.edges), 3))
        self._turns = itertools.count()

    def admit(self, hashes: list[tuple[str, int]], **limits: int) -> str:
        """A turn that goes on until `end`; returns its name.

        Its prompt is whole blocks and nothing else runs, unless ``limits`` say more.
        """
        turn = f"turn {next(self._turns)}"
        self.saved += self.reuse.admit(turn, hashes, **(whole(hashes) | limits))
        return turn

    def run(self, hashes: list[tuple[str, int]], **limits: int) -> None:
        """A turn that ends at once."""
        self.reuse.end(self.admit(hashes, **limits), hashes)

    def bins(self) -> tuple[ReuseBin, ...]:
        return self.reuse.bins(self.saved / 10)


def blocks(name: str, count: int) -> list[tuple[str, int]]:
    return [(name, i) for i in range(count)]


def whole(hashes: list[tuple[str, int]]) -> dict[str, int]:
    return {"num_reusable": len(hashes), "prompt_tokens": 16 * len(hashes), "used_blocks": 0}


def test_of_a_long_prompt_a_few_keys_tell_what_its_blocks_would() -> None:
    meter = Meter(max_blocks=20_000)
    prompt, num_others = blocks("a", 8_000), 3_000
    meter.run(prompt)
    meter.run(blocks("b", num_others))
    assert len(meter.reuse._let_go) < 2_000
    meter.run([*prompt[:5_003], *blocks("c", 400)])
    bins = meter.bins()
    assert sum(b.tokens_per_s for b in bins) * 10 == 5_000 * 16, "whole groups of 8 blocks behind the first 256"
    assert [b.blocks for b in bins if b.turns_per_s] == pytest.approx([num_others + 5_000], rel=0.1)


def test_a_first_turn_reuses_nothing() -> None:
    meter = Meter()
    meter.run(blocks("a", 5))
    assert meter.bins() == ()


def test_a_turn_again_at_once_needs_its_own_blocks() -> None:
    meter = Meter()
    meter.run(blocks("a", 4))
    meter.run(blocks("a", 4))
    bins = meter.bins()
    assert [b.blocks for b in bins] == [1, 2, 3, 4]
    assert [b.tokens_per_s for b in bins] == pytest.approx([1.6] * 4)
    assert [b.turns_per_s for b in bins] == pytest.approx([0, 0, 0, 0.1])


def test_other_work_in_between_adds_to_the_distance() -> None:
    meter = Meter()
    meter.run(blocks("a", 4))
    meter.run(blocks("b", 100))
    meter.run(blocks("a", 4))
    (only,) = meter.bins()
    assert 104 <= only.blocks <= 104 * 1.2
    assert only.tokens_per_s * 10 == pytest.approx(64)


def test_all_that_running_turns_hold_adds_to_the_distance() -> None:
    meter = Meter()
    held = meter.admit(blocks("long", 100))
    meter.run(blocks("a", 4), used_blocks=108)  # and what it has written
    meter.run(blocks("a", 4), used_blocks=112)
    assert min(b.blocks for b in meter.bins()) >= 113
    meter.reuse.end(held, blocks("long", 112))
    meter.run(blocks("a", 4))
    assert max(b.blocks for b in meter.bins()) <= 116 * 1.1, "once, not twice"


def test_a_running_turn_that_began_since_counts_once() -> None:
    meter = Meter()
    meter.run(blocks("a", 4))
    meter.admit(blocks("other", 50))
    meter.run(blocks("a", 4), used_blocks=52)
    assert max(b.blocks for b in meter.bins()) <= 56 * 1.2


def test_a_block_that_a_running_turn_holds_is_there_and_counts_as_held_only() -> None:
    meter = Meter()
    first = meter.admit(blocks("shared", 4))
    second = meter.admit(blocks("shared", 4), used_blocks=4)
    assert [(b.blocks, b.tokens_per_s * 10) for b in meter.bins()] == [(4, 64)]
    meter.reuse.end(first, blocks("shared", 4))
    assert len(meter.reuse._let_go) == 0, "the other one holds it"
    meter.reuse.end(second, blocks("shared", 4))
    assert len(meter.reuse._let_go) == 4
    assert not meter.reuse._held


def test_a_prefix_needs_every_block_before_it() -> None:
    meter = Meter()
    chain = blocks("a", 3)
    meter.run(chain)
    meter.reuse.end("b", blocks("b", 50))
    meter.reuse.end("its rest", chain[1:])  # the head is far away, so the rest helps no sooner
    meter.run(chain)
    (only,) = meter.bins()
    assert only.blocks >= 53


def test_a_chain_ends_at_the_first_unknown_block() -> None:
    meter = Meter()
    meter.run(blocks("a", 2))
    meter.run([*blocks("a", 2), ("new", 0), *blocks("a", 1)])
    assert sum(b.tokens_per_s for b in meter.bins()) * 10 == pytest.approx(32)


def test_the_last_token_is_computed_anyhow() -> None:
    meter = Meter()
    meter.run(blocks("a", 2))
    meter.run(blocks("a", 2), num_reusable=1)
    assert sum(b.tokens_per_s for b in meter.bins()) * 10 == pytest.approx(16)


def test_a_turn_needs_one_pass_anyhow() -> None:
    meter = Meter()
    meter.run(blocks("a", 3))
    meter.run(blocks("a", 3), num_reusable=3, prompt_tokens=60)  # 12 tokens remain: one pass, as without
    assert [b.passes_per_s for b in meter.bins()] == [0, 0, 0]


def test_a_long_prefix_saves_the_passes_that_its_length_takes() -> None:
    meter = Meter()
    meter.run(blocks("a", 16))
    meter.run(blocks("a", 16), prompt_tokens=260)  # 5 passes of 64 without a cache, 1 with all of it
    bins = meter.bins()
    assert sum(b.passes_per_s for b in bins) * 10 == pytest.approx(4)
    assert all(b.passes_per_s >= 0 for b in bins)


def test_memory_is_bounded() -> None:
    meter = Meter(max_blocks=8)
    meter.run(blocks("a", 8))
    meter.run(blocks("b", 8))
    meter.run(blocks("a", 8))
    assert meter.bins() == ()


def test_a_turn_counts_in_full_while_it_is_there_and_fades_when_it_has_ended() -> None:
    window = TurnWindow(1, memory_s=10.0)
    window.begin("a", np.array([100.0]), 0.0)
    during = window.rates(30.0, 1e9)
    assert during == pytest.approx(100 / (10 + 30))
    window.end("a", 30.0)
    assert window.rates(30.0, 1e9) == pytest.approx(during)
    assert window.rates(31.0, 1e9) == pytest.approx(during * math.exp(-0.1), rel=0.05)
    assert 0 < window.rates(40.0, 1e9)[0] < during[0] / math.e
    window.end("never began", 40.0)


def test_a_turn_that_waits_counts_and_is_known_better_once_it_is_admitted() -> None:
    window = TurnWindow(2, memory_s=10.0)
    window.begin("a", np.array([1.0, 0.0]), 0.0)
    waiting = window.rates(10.0, 1e9)
    window.revise("a", np.array([1.0, 300.0]))
    admitted = window.rates(10.0, 1e9)
    assert (waiting[0], admitted[0]) == pytest.approx((1 / 20, 1 / 20)), "its time began when it came"
    assert (waiting[1], admitted[1]) == pytest.approx((0.0, 300 / 20))
    window.revise("b", np.array([1.0, 300.0]))
    assert window.rates(10.0, 1e9) == pytest.approx(admitted)
    window.forget("a")
    window.end("a", 10.0)
    assert window.rates(10.0, 1e9) == pytest.approx([0.0, 0.0]), "it has gone before it was admitted"


def test_turns_that_stay_away_fade_sooner_than_those_that_come_seldom() -> None:
    window = TurnWindow(2, memory_s=10.0)
    for second in range(60):
        for kind, every_s in (("often", 1), ("seldom", 10)):
            if second % every_s == 0:
                window.begin((kind, second), np.array([1.0, 0.0] if kind == "often" else [0.0, 1.0]), second, kind)
                window.end((kind, second), second)
    often, seldom = window.rates(59.0, 60.0)
    assert (often, seldom) == (pytest.approx(1.0, rel=0.1), pytest.approx(0.1, rel=0.8))
    later_often, later_seldom = window.rates(67.0, 68.0)
    assert later_often < 0.05 * often, "eight of them have not come"
    assert later_seldom / seldom > 4 * later_often / often, "and one of these"
    window.begin("again", np.array([1.0, 0.0]), 67.0, "often")
    assert window.rates(67.0, 68.0)[0] > 0.4 * often, "they do"


def test_what_is_learnt_of_a_turn_while_it_runs_or_at_its_end_counts() -> None:
    window = TurnWindow(2, memory_s=10.0)
    window.begin("a", np.array([1.0, 12.0]), 0.0)
    window.learn("a", 1, 90.0)
    assert window.rates(10.0, 1e9)[1] == pytest.approx(90 / 20)
    window.learn("a", 1, 60.0)
    window.end("a", 10.0)
    window.learn("a", 1, 1000.0)
    assert window.rates(10.0, 1e9) == pytest.approx([1 / 20, 60 / 20])


def test_what_reuse_would_save_is_told_without_a_use() -> None:
    reuse = PrefixReuse(max_blocks=64, block_tokens=16, pass_tokens=64)
    prompt = blocks("a", 4)
    reuse.admit("a", prompt, **whole(prompt))
    reuse.end("a", prompt)
    reuse.end("b", blocks("b", 8))
    told = reuse.saved(prompt, **whole(prompt))
    assert told[:, 1].sum() == 4 * 16
    assert (reuse.saved(prompt, **whole(prompt)) == told).all()
    assert (reuse.admit("c", prompt, **whole(prompt)) == told).all()
    assert (reuse.saved(prompt, **whole(prompt)) != told).any(), "now it is held"


def test_steady_turns_have_their_rate_however_long_they_last() -> None:
    for duration_s in (1, 5, 60):
        window = TurnWindow(2, memory_s=10.0)
        for second in range(400):
            window.begin(second, np.array([1.0, 50.0]), float(second))
            window.end(second - duration_s, float(second))
        assert window.rates(399.0, 399.0) == pytest.approx([1.0, 50.0], rel=0.1), duration_s
