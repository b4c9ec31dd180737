"""Parts of the GPU path that need no GPU: recent curves, runs of copies, slots in reach of the host, preflight."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from wisp_core.errors import ConfigurationError
from wisp_core.memory.memfd import MemfdBacking
from wisp_core.pager.device.reference import StepCounts
from wisp_core.pager.device.staging import _runs, experts_in_no_slot
from wisp_core.pager.device.state import DeviceState, FetchPath
from wisp_core.pager.device.statistics import RecentSteps, Sums
from wisp_core.pager.device.step_clock import StepClock
from wisp_core.pager.device.uses import DeviceUses
from wisp_core.pager.host_store import HostStore
from wisp_core.pager.layer_slots import LayerSlots
from wisp_core.pager.pinned_memory import EmptyInPinnedMemory, PinnedMemory


def sums(steps: int, distances: list[int], prefills: int = 0, distinct: int = 0, rows: int = 0, union: int = 0) -> Sums:
    """Of two layers, each with these."""
    counts = np.zeros((2, len(FetchPath), len(StepCounts.__slots__)), np.int64)
    counts[:, FetchPath.DECODE, :2] = steps, rows
    counts[:, FetchPath.DECODE, StepCounts.__slots__.index("distinct")] = union
    counts[:, FetchPath.STREAMED, 0] = prefills
    counts[:, FetchPath.STREAMED, StepCounts.__slots__.index("distinct")] = distinct
    return Sums(counts, np.array([distances, distances]))


def test_recent_steps_are_exact_at_first_and_age_by_time() -> None:
    recent = RecentSteps(2, memory_s=10.0)
    assert (recent.decode_misses_by_cap(), recent.prefill_distinct()) == ((), 0.0)
    recent.update(sums(10, [20, 10, 10], 4, 8), 0.0)
    assert (recent.decode_misses_by_cap(), recent.prefill_distinct()) == ((8.0, 4.0, 2.0), 4.0)
    recent.update(sums(10, [20, 10, 10], 4, 8), 5.0)
    assert recent.decode_misses_by_cap() == pytest.approx((8.0, 4.0, 2.0)), "no step, no change"
    recent.update(sums(20, [20, 10, 30], 8, 12), 10.0)
    old = math.exp(-1)
    assert recent.decode_misses_by_cap()[0] == pytest.approx((old * 80 + 40) / (old * 10 + 10))
    assert recent.prefill_distinct() == pytest.approx((old * 16 + 8) / (old * 4 + 4))


def test_the_union_of_recent_steps_forgets_those_of_long_ago() -> None:
    recent = RecentSteps(2, memory_s=10.0)
    assert recent.decode_union_by_batch(num_layers=2, top_k=4) == ()
    recent.update(sums(100, [0, 0, 0], rows=400, union=1600), 0.0)  # four rows, sixteen experts: nothing in common
    assert recent.decode_union_by_batch(num_layers=2, top_k=4) == pytest.approx((0, 4, 8, 12, 16))
    recent.update(sums(200, [0, 0, 0], rows=800, union=2400), 100.0)  # now eight: growth with the root of the batch
    assert recent.decode_union_by_batch(num_layers=2, top_k=4)[1:] == pytest.approx(
        [4 * b**0.5 for b in (1, 2, 3, 4)], rel=1e-3
    )


def test_single_rows_tell_nothing_of_a_union() -> None:
    recent = RecentSteps(2, memory_s=10.0)
    recent.update(sums(10, [0, 0, 0], rows=10, union=40), 0.0)
    assert recent.decode_union_by_batch(num_layers=2, top_k=4) == ()


def test_recent_steps_start_anew_after_a_reset() -> None:
    recent = RecentSteps(2, memory_s=10.0)
    recent.update(sums(10, [20, 10, 10]), 0.0)
    recent.update(sums(2, [0, 0, 2]), 1.0)
    assert recent.decode_misses_by_cap() == (2.0, 2.0, 2.0)


def test_experts_that_a_plan_found_no_slot_for_are_named_once() -> None:
    assert experts_in_no_slot(torch.tensor([[3, 8 + 5], [8 + 0, 8 + 5]], dtype=torch.int32), num_experts=8) == [0, 5]
    assert experts_in_no_slot(torch.tensor([[3, 7]], dtype=torch.int32), num_experts=8) == []


def test_neighbouring_experts_are_one_copy() -> None:
    assert _runs([]) == []
    assert _runs([3]) == [(0, 3, 4)]
    assert _runs([1, 2, 3, 7, 9, 10]) == [(0, 1, 4), (3, 7, 8), (4, 9, 11)]


@pytest.mark.parametrize("row", [(64,), (3, 1024), (5, 1000), (1024, 4)])
def test_slots_lie_whole_rows_away_from_the_host(row: tuple[int, ...]) -> None:
    backing, num_experts = MemfdBacking(), 6
    tensors = {}
    for name, shape in {"w13_weight": (num_experts, *row), "w2_weight": (num_experts, 2, *row)}.items():
        region = backing.reserve("host", 2 * math.prod(shape))
        tensors[name] = region.tensor()[: 2 * math.prod(shape)].view(torch.bfloat16).view(shape)
    slots = LayerSlots("slots", HostStore(tensors), backing, is_host_in_reach=True)
    slots.back(0, num_experts)
    assert slots.region.resident_bytes() == slots.bytes_at(num_experts)
    for name, host in tensors.items():
        row_bytes = host.stride(0) * host.element_size()
        assert (host.data_ptr() - slots.tensors[name].data_ptr()) % row_bytes == 0
        slots.tensors[name].fill_(1)  # every slot is backed, wherever it lies
    slots.release(num_experts, 2)
    assert slots.region.resident_bytes() == slots.bytes_at(2)


def test_too_little_host_memory_is_refused_with_the_numbers() -> None:
    memory = PinnedMemory(budget_bytes=1000)
    with (
        pytest.raises(ConfigurationError, match=r"takes 1024 bytes, but 1000 of additional_config.wisp.host_memory"),
        EmptyInPinnedMemory(memory),
    ):
        torch.empty(8, 16, 4, dtype=torch.bfloat16)


class Device:
    """Stands for a stream and its events: idle or not, copied or not, as the test says."""

    is_idle = False

    def record(self) -> None:
        return

    def query(self) -> bool:
        return self.is_idle


def test_uses_that_come_while_others_are_copied_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", lambda: device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device)
    state = SimpleNamespace(routed=torch.zeros(1, 1024, dtype=torch.int16), num_layers=1, num_experts=4)
    uses = DeviceUses(cast("DeviceState", state), top_k=2, max_keys=8)
    uses._is_cuda = True

    def use(count: int) -> None:
        uses._hits[uses._number("session")] += count

    use(100)
    assert uses.drain() == {}, "the copy has only begun"
    use(7)
    device.is_idle = True
    found = [{key: of_key.hits for key, of_key in uses.drain().items()} for _ in range(3)]
    assert found == [{"session": 100}, {"session": 7}, {}]


def test_the_seconds_up_to_a_point_of_the_stream_are_those_of_what_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times, device = iter([1.0, 3.0, 10.0, 14.0]), Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_ms = 1e3 * next(times)

        def record(self) -> None:
            return

        def query(self) -> bool:
            return device.is_idle

        def synchronize(self) -> None:
            assert device.is_idle

        def elapsed_time(self, other: Event) -> float:
            return other.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock()
    clock.start(is_prefill=False)
    clock.stop()
    read = clock.mark()
    clock.start(is_prefill=False)
    clock.stop()
    assert clock.seconds(is_prefill=False) == 0, "neither has ended"
    device.is_idle = True
    assert clock.seconds(is_prefill=False) == 6
    assert [read(), read()] == [{False: 2.0, True: 0.0}] * 2


def test_other_tensors_are_made_as_ever() -> None:
    with EmptyInPinnedMemory(PinnedMemory(budget_bytes=0)):
        assert torch.ones(2).tolist() == [1, 1]
