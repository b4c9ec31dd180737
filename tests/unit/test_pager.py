"""The pager on a small torch model of a routed layer: results, counters, resizing, failures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pytest
import torch

from wisp_core.errors import ConfigurationError, IntegrityError, UnsupportedModelError
from wisp_core.memory.memfd import MemfdBacking, MemfdRegion
from wisp_core.memory.region import ByteRange
from wisp_core.pager import pager as pager_module
from wisp_core.pager.link import Link
from wisp_core.pager.pager import ForwardInfo, Pager
from wisp_core.pager.registry import current_pager, set_current_pager
from wisp_core.pager.time_share import TimeShare
from wisp_core.settings import WispSettings

E, K, L, HIDDEN = 8, 2, 3, 520  # one expert is 1040 + 40 bytes: slots and pages do not line up


def weights(layer: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return {
        "w13_weight": torch.randn(E, HIDDEN, generator=generator).to(torch.bfloat16),
        "w2_bias": torch.randn(E, 10, generator=generator),
    }


class Model:
    """L layers; a row's output is the concatenation of its experts' weights, so a wrong slot shows in every byte."""

    def __init__(self, cap: int, backing: MemfdBacking | None = None, **settings: object) -> None:
        parsed = WispSettings.model_validate({"cap": cap, **settings})
        self.pager = Pager(parsed, E, K, backing or MemfdBacking())
        for _ in range(L):
            self.pager.add_layer()
        self.slots = [self.pager.page_layer(layer, weights(layer)) for layer in range(L)]

    def forward(self, ids: np.ndarray, info: ForwardInfo | None) -> None:
        """Run all layers on ``ids`` [rows, K] and check every output byte."""
        topk = torch.from_numpy(ids.astype(np.int32))
        for layer in range(L):
            slots = self.slots[layer]

            def apply(rows: slice, slot_ids: torch.Tensor, slots: dict[str, torch.Tensor] = slots) -> torch.Tensor:
                assert slot_ids.dtype == topk.dtype
                return torch.stack([slots["w13_weight"][i].float().sum(1) for i in slot_ids.long()])

            host = self.pager.host_tensors(layer)

            def in_place(host: Mapping[str, torch.Tensor] = host) -> torch.Tensor:
                return torch.stack([host["w13_weight"][i].float().sum(1) for i in topk.long()])

            output = self.pager.run_layer(layer, topk, apply, lambda: info, in_place)
            expected = torch.stack([weights(layer)["w13_weight"][i].float().sum(1) for i in topk.long()])
            assert torch.equal(output, expected)
            for expert in self.pager.resident()[layer]:
                slot = int(self.pager._layer(layer).table.slot_of[expert])
                assert torch.equal(slots["w2_bias"][slot], weights(layer)["w2_bias"][expert])


def routing(rows: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.stack([rng.choice(E, K, replace=False) for _ in range(rows)])


DECODE = ForwardInfo(is_prefill=False, num_tokens=3)


@pytest.mark.parametrize("cap", [K, K + 1, E // 2, E])
def test_outputs_equal_the_full_weights_at_every_cap(cap: int) -> None:
    model = Model(cap)
    for step in range(6):
        model.forward(routing(20, step), ForwardInfo(is_prefill=True, num_tokens=20))
        model.forward(routing(3, step), DECODE)
    model.pager.check_integrity()
    assert model.pager.resident_bytes() == model.pager.experts_bytes_by_cap()[cap]
    assert [len(experts) for experts in model.pager.resident()] == [cap] * L


def test_resizing_both_ways_keeps_results_and_moves_pages() -> None:
    model = Model(E // 2)
    by_cap = model.pager.experts_bytes_by_cap()
    assert by_cap[0] == 0
    assert all(b % 4096 == 0 for b in by_cap)
    for seed, cap in enumerate([K, E, 3, 3, 5, K, E]):
        kept = [set(experts) for experts in model.pager.resident()]
        model.pager.set_cap(cap)
        assert model.pager.cap == cap
        assert model.pager.resident_bytes() == by_cap[cap]
        for before, after in zip(kept, model.pager.resident(), strict=True):
            assert set(after) <= before
            assert len(after) == min(cap, len(before))
        model.forward(routing(9, seed), ForwardInfo(is_prefill=True, num_tokens=9))
        model.pager.check_integrity()


class StingyBacking(MemfdBacking):
    """Refuses pages once ``budget_bytes`` are out, as a full machine does."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes

    def reserve(self, name: str, num_bytes: int) -> MemfdRegion:
        backing = self

        class Stingy(MemfdRegion):
            def back(self, ranges: Iterable[ByteRange], *, is_zeroed: bool = True) -> None:
                wanted = list(ranges)
                size = sum(stop - start for start, stop in wanted)
                if size > backing.budget_bytes:
                    raise MemoryError("full")
                backing.budget_bytes -= size
                super().back(wanted)

        return Stingy(name, num_bytes)


def test_growth_that_is_refused_midway_changes_nothing() -> None:
    probe = Model(3).pager.experts_bytes_by_cap()
    model = Model(3, StingyBacking(probe[3] + (probe[E] - probe[3]) // 2))
    model.forward(routing(9), None)
    resident = model.pager.resident()
    with pytest.raises(MemoryError):
        model.pager.set_cap(E)
    assert model.pager.cap == 3
    assert model.pager.resident() == resident
    assert model.pager.resident_bytes() == probe[3]
    model.pager.check_integrity()
    model.forward(routing(9, 1), None)


def test_counts_by_kind_and_curves_predict_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pager_module, "OBSERVING_FRACTION", 1e9)  # every step is observed, however short
    model = Model(4)
    seen: list[int] = []
    for step in range(5):
        model.forward(routing(3, step), DECODE)
        seen.append(model.pager.counts_decode.misses - sum(seen))
    decode = model.pager.counts_decode
    assert (decode.steps, decode.tokens) == (5, 15)
    assert model.pager.counts_prefill.steps == 0
    assert model.pager.prefill_misses_by_cap() == ()
    assert decode.misses > 0
    assert decode.missed_bytes == decode.misses * model.pager.expert_bytes == decode.misses * (2 * HIDDEN + 40)
    assert decode.hits + decode.misses >= decode.distinct
    assert 0 < decode.link_seconds <= decode.seconds
    curve = model.pager.decode_misses_by_cap()
    assert len(curve) == E + 1
    assert curve[4] == pytest.approx(np.mean(seen), rel=0.05)  # some milliseconds of a memory of 10 s
    assert model.pager.decode_union_by_batch()[1:3] == pytest.approx((2.0, 3.0), abs=1.0)


def test_a_prefill_reads_host_memory_in_place_and_leaves_the_slots_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pager_module, "OBSERVING_FRACTION", 1e9)
    model = Model(4)
    model.forward(routing(3), DECODE)
    pager = model.pager
    resident, order = pager.resident(), [table.last_use.copy() for table in pager.tables()]
    ids = routing(40, 1)
    missing = sum(len(set(ids.reshape(-1).tolist()) - set(experts)) for experts in resident)
    model.forward(ids, ForwardInfo(is_prefill=True, num_tokens=40))
    prefill = pager.counts_prefill
    assert (prefill.steps, prefill.tokens, prefill.misses) == (1, 40, missing)
    assert prefill.hits + prefill.misses == prefill.distinct
    assert pager.prefill_misses_by_cap()[4] == missing
    assert pager.resident() == resident
    for table, before in zip(pager.tables(), order, strict=True):
        assert np.array_equal(table.last_use, before)
    pager.check_integrity()


def test_an_emulated_link_charges_a_prefill_once_per_missing_expert() -> None:
    model = Model(4, emulated_link_bytes_per_s=1e7)
    model.forward(routing(40, 1), ForwardInfo(is_prefill=True, num_tokens=40))
    prefill = model.pager.counts_prefill
    assert prefill.link_seconds == pytest.approx(prefill.missed_bytes / 1e7)
    assert prefill.seconds >= prefill.link_seconds


def test_curves_cost_at_most_their_share_of_the_time() -> None:
    share = TimeShare(0.01)
    spent_s = work_s = 0.0
    for _ in range(10_000):
        if share.has_room():
            share.spend(0.0004)
            spent_s += 0.0004
        share.earn(0.005)
        work_s += 0.005
    assert 0.009 < spent_s / work_s <= 0.0101


def test_profiling_forwards_do_not_count_and_statistics_can_restart() -> None:
    model = Model(4)
    model.forward(routing(6), None)
    assert model.pager.counts_decode.steps == model.pager.counts_prefill.steps == 0
    model.forward(routing(3, 1), DECODE)
    assert model.pager.counts_decode.tokens == 3
    resident = model.pager.resident()
    model.pager.reset_statistics()
    assert model.pager.counts_decode.steps == 0
    assert model.pager.decode_misses_by_cap() == ()
    assert model.pager.resident() == resident


def test_padding_rows_are_computed_but_neither_counted_nor_observed() -> None:
    seen: list[tuple[int, int, int, bool]] = []

    class Observer:
        def observe(self, layer_index: int, topk_ids: np.ndarray, was_resident: np.ndarray, is_prefill: bool) -> None:
            seen.append((layer_index, len(topk_ids), int(was_resident.sum()), is_prefill))

    model = Model(4)
    model.pager.observer = Observer()
    model.forward(routing(5), DECODE)
    assert seen == [(layer, 3, 0, False) for layer in range(L)]
    assert model.pager.counts_decode.tokens == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cap": K - 1}, r"wisp\.cap is 1.*set it to 2\.\.8"),
        ({"cap": E + 1}, r"wisp\.cap is 9.*set it to 2\.\.8"),
        ({"cap": 4, "min_cap": 1}, r"wisp\.min_cap is 1"),
        ({}, r"needs 'cap' \(2\.\.8.*'vram_budget_bytes'"),
    ],
)
def test_bad_settings_name_themselves_and_the_fix(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Pager(WispSettings.model_validate(settings), E, K, MemfdBacking())


def test_with_a_budget_only_the_smallest_cap_is_taken() -> None:
    assert Pager(WispSettings(vram_budget_bytes=1 << 30), E, K, MemfdBacking()).cap == K
    assert Pager(WispSettings(vram_budget_bytes=1 << 30, min_cap=3), E, K, MemfdBacking()).cap == 3


@pytest.mark.parametrize("cap", [K - 1, E + 1])
def test_resize_outside_the_limits_is_refused(cap: int) -> None:
    with pytest.raises(ConfigurationError, match="outside 2"):
        Model(4).pager.set_cap(cap)


def test_layers_must_be_alike_and_are_paged_once() -> None:
    pager = Pager(WispSettings(cap=4), E, K, MemfdBacking())
    first, second = pager.add_layer(), pager.add_layer()
    pager.page_layer(first, weights(0))
    assert not pager.is_ready
    with pytest.raises(UnsupportedModelError, match="must be alike"):
        pager.page_layer(second, {"w13_weight": torch.zeros(E, 3)})
    with pytest.raises(UnsupportedModelError, match="paged already"):
        pager.page_layer(first, weights(0))
    pager.page_layer(second, weights(1))
    assert pager.is_ready


def test_integrity_notices_pages_that_the_cap_does_not_explain() -> None:
    model = Model(3)
    model.slots[1]["w13_weight"][E - 1] = 1.0
    with pytest.raises(IntegrityError, match="layer 1: cap 3 with"):
        model.pager.check_integrity()


def test_current_pager_lives_as_long_as_its_model() -> None:
    model = Model(3)
    set_current_pager(model.pager)
    assert current_pager() is model.pager
    del model
    assert current_pager() is None


class Clock:
    """A clock whose sleeps last 1 ms longer than asked, as real ones do."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds + 0.001


def test_emulated_link_charges_the_price_once_and_credits_long_sleeps() -> None:
    clock = Clock()
    link = Link(1000.0, clock=lambda: clock.now_s, sleep=clock.sleep)
    link.charge(100, copy_s=0.04)
    link.charge(100, copy_s=0.01)
    assert link.settle() == pytest.approx(0.2)
    link.charge(50, copy_s=0.0)
    link.settle()
    assert clock.slept == pytest.approx([0.15, 0.049])
    assert clock.now_s + 0.05 == pytest.approx(0.25, abs=0.0011)  # copies and sleeps together cost the price


def test_a_copy_that_took_too_long_pays_for_no_more_than_one_other() -> None:
    clock = Clock()
    link = Link(1000.0, clock=lambda: clock.now_s, sleep=clock.sleep)
    link.charge(100, copy_s=5.0)  # from pages that were not there
    assert link.settle() == 5.0
    for _ in range(10):
        link.charge(100, copy_s=0.0)
        assert link.settle() == pytest.approx(0.1)
    assert clock.now_s == pytest.approx(0.9, abs=0.0011)


def test_link_without_a_speed_measures_and_never_sleeps() -> None:
    clock = Clock()
    link = Link(None, clock=lambda: clock.now_s, sleep=clock.sleep)
    link.charge(1 << 30, copy_s=0.25)
    assert link.settle() == 0.25
    assert link.settle() == 0.0
    link.charge(1, copy_s=1.0)
    link.forgive()
    assert link.settle() == 0.0
    assert clock.slept == []


def test_forwards_take_the_time_that_the_emulated_link_asks_for() -> None:
    model = Model(2, emulated_link_bytes_per_s=2e5)
    model.forward(routing(1), ForwardInfo(is_prefill=False, num_tokens=1))
    counts = model.pager.counts_decode
    price_s = counts.missed_bytes / 2e5
    assert counts.misses == K * L
    assert counts.link_seconds == pytest.approx(price_s, rel=0.2)
    assert counts.seconds >= price_s
