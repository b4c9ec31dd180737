"""The device pager against its reference, with real slots and resizes: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from wisp_core.engine.reports import PagerReport
from wisp_core.errors import ConfigurationError, UnsupportedModelError
from wisp_core.memory.memfd import MemfdBacking
from wisp_core.pager.device.block_rows import HostRows, block_rows, first_host_row
from wisp_core.pager.device.device_pager import DevicePager
from wisp_core.pager.device.reference import LayerTable
from wisp_core.pager.device.state import FetchPath
from wisp_core.pager.device.step_clock import StepClock
from wisp_core.pager.interface import ForwardInfo
from wisp_core.pager.resident_experts import ResidentExperts
from wisp_core.settings import WispSettings

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 16, 4
SHAPES = {"w13_weight": (48, 40), "w2_weight": (40, 24)}  # rows that are no whole pages


def aligned_host_tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bfloat16 weights on a page, page-locked on a GPU."""
    if IS_INTERPRETED:
        region = MemfdBacking().reserve(f"host-{seed}", math.prod(shape) * 2)
        region.back([(0, region.num_bytes)])
        weights = region.tensor()[: math.prod(shape) * 2].view(torch.bfloat16).view(shape)
    else:
        weights = HOST_MEMORY.empty(shape, torch.bfloat16)
    return weights.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))


if not IS_INTERPRETED and torch.cuda.is_available():
    from wisp_core.memory.cuda_vmm import CudaBacking
    from wisp_core.pager.pinned_memory import PinnedMemory

    HOST_MEMORY = PinnedMemory(1 << 30)


class Paged:
    """A pager with loaded layers next to their host tensors and the reference."""

    def __init__(self, cap: int, **settings: int) -> None:
        backing = MemfdBacking() if IS_INTERPRETED else CudaBacking(DEVICE)
        self.pager = DevicePager(
            WispSettings(cap=cap, **settings),
            NUM_EXPERTS,
            TOP_K,
            device=DEVICE,
            backing=backing,  # type: ignore[arg-type]
        )
        for _ in range(NUM_LAYERS):
            self.pager.add_layer()
        self.hosts = [
            {
                name: aligned_host_tensor((NUM_EXPERTS, *shape), seed=10 * layer + at)
                for at, (name, shape) in enumerate(SHAPES.items())
            }
            for layer in range(NUM_LAYERS)
        ]
        self.slots = [self.pager.page_layer(layer, host) for layer, host in enumerate(self.hosts)]
        self.tables = [LayerTable(NUM_EXPERTS, cap) for _ in range(NUM_LAYERS)]

    def step(self, ids: np.ndarray, *, path: FetchPath = FetchPath.DECODE, num_valid: int | None = None) -> None:
        """One forward; what each routed id is served from holds the right expert."""
        self.pager.begin_step(len(ids[0]) if num_valid is None else num_valid, is_prefill=path is FetchPath.STREAMED)
        for layer, table in enumerate(self.tables):
            slot_ids = self.pager.plan(layer, torch.from_numpy(ids[layer]).to(DEVICE), path)
            plan = table.plan if path is FetchPath.DECODE else table.look_up
            assert slot_ids.tolist() == plan(ids[layer], num_valid).slot_ids.tolist()
            self.check_contents(layer, table)
        self.pager.end_step()
        if not IS_INTERPRETED:
            torch.cuda.synchronize()  # while the device works, counts are those of an earlier report

    def check_contents(self, layer: int, table: LayerTable) -> None:
        experts, where = list(table.slot_of), list(table.slot_of.values())
        for name, host in self.hosts[layer].items():
            assert torch.equal(self.slots[layer][name][where].cpu(), host[experts])


def routing(rows: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((NUM_LAYERS, rows, NUM_EXPERTS)) ** 3, axis=-1)[..., :TOP_K].astype(np.int32)


def test_steps_counts_and_curve_equal_the_reference() -> None:
    paged = Paged(cap=6)
    for seed in range(20):
        paged.step(routing(1 + seed % 3, seed))
    paged.pager.check_integrity()
    assert paged.pager.resident() == tuple(tuple(sorted(table.slot_of)) for table in paged.tables)
    counts = paged.pager.counts_decode
    assert (counts.steps, counts.tokens) == (20, sum(1 + seed % 3 for seed in range(20)))
    assert counts.misses == sum(table.decode.misses for table in paged.tables) > 0
    assert counts.hits == sum(table.decode.hits for table in paged.tables)
    assert counts.missed_bytes == counts.misses * paged.pager.expert_bytes
    expected = sum(table.misses_by_cap() for table in paged.tables) / 20
    assert paged.pager.decode_misses_by_cap() == pytest.approx(expected.tolist())
    union = paged.pager.decode_union_by_batch()  # of one row and of two, where a mean step has more than one
    assert union[:2] == (0.0, TOP_K)
    assert TOP_K < union[2] < 2 * TOP_K


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter has no stream to wait for")
def test_neither_a_step_nor_a_report_waits_for_the_device() -> None:
    paged = Paged(cap=6)
    paged.step(routing(2, 0))  # compiles and allocates what the first one does
    PagerReport.of(paged.pager)
    ids = [torch.from_numpy(of_layer).to(DEVICE) for of_layer in routing(2, 1)]
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # cycles, about half a second
    paged.pager.begin_step(2, is_prefill=False)
    for layer, of_layer in enumerate(ids):
        paged.pager.plan(layer, of_layer, FetchPath.DECODE)
    paged.pager.end_step()
    PagerReport.of(paged.pager)
    assert not torch.cuda.current_stream().query(), "the device still works"


def test_the_host_fetches_what_the_device_plans_where_that_cannot_reach_host_memory() -> None:
    paged = Paged(cap=6)
    for seed in range(8):
        rows = 1 + seed % 4  # 16 ids at most: more experts than slots in some steps
        paged.pager.begin_step(rows, is_prefill=False)
        for layer, table in enumerate(paged.tables):
            ids = routing(rows, seed)[layer]
            slot_ids = paged.pager.fetch_by_host(layer, torch.from_numpy(ids).to(DEVICE))
            assert slot_ids.tolist() == table.plan(ids).slot_ids.tolist()
            paged.check_contents(layer, table)
    paged.pager.check_integrity()
    assert paged.pager.counts_decode.misses == sum(table.decode.misses for table in paged.tables) > 0


def test_a_prefill_leaves_the_working_set_alone() -> None:
    paged = Paged(cap=6)
    for seed in range(5):
        paged.step(routing(2, seed))
    before = paged.pager.resident()
    paged.step(routing(30, 99), path=FetchPath.STREAMED)
    assert paged.pager.resident() == before
    assert paged.pager.counts_prefill.steps == 1
    assert paged.pager.counts_decode.steps == 5
    assert paged.pager.counts_prefill.misses == sum(table.streamed.misses for table in paged.tables)
    misses = paged.pager.prefill_misses_by_cap()
    assert len(misses) == NUM_EXPERTS + 1
    assert misses[0] == pytest.approx(paged.pager.counts_prefill.distinct)
    assert misses[-1] == 0


def test_padding_and_dummy_steps_use_no_expert() -> None:
    paged = Paged(cap=6)
    ids = routing(4, 1)
    ids[:, 1:] = 1_000_000  # what stands in the padding of a captured batch
    paged.step(ids, num_valid=1)
    assert paged.pager.counts_decode.tokens == 1
    paged.step(routing(4, 2), num_valid=0)
    assert all(len(experts) == TOP_K for experts in paged.pager.resident())


def test_resizes_keep_the_most_recent_experts_and_their_bytes() -> None:
    paged = Paged(cap=8, min_cap=5)
    bytes_by_cap = paged.pager.experts_bytes_by_cap()
    for seed, cap in enumerate((5, 16, 7, 6, 12, 5)):
        paged.step(routing(3, seed))
        paged.pager.set_cap(cap)
        for layer, table in enumerate(paged.tables):
            table.set_cap(cap)
            paged.check_contents(layer, table)
        assert paged.pager.resident_bytes() == bytes_by_cap[cap]
        paged.pager.check_integrity()
        paged.step(routing(3, 50 + seed))
    for cap in (4, 17):
        with pytest.raises(ConfigurationError, match=f"cap {cap} is outside 5"):
            paged.pager.set_cap(cap)


def test_statistics_restart_and_residency_stays() -> None:
    paged = Paged(cap=6)
    paged.step(routing(2, 0))
    before = paged.pager.resident()
    paged.pager.reset_statistics()
    assert paged.pager.counts_decode.steps == 0
    assert paged.pager.decode_misses_by_cap() == ()
    assert paged.pager.resident() == before


def test_what_the_worker_does_not_tell_is_described_by_the_forward() -> None:
    pager = Paged(cap=6).pager
    pager.begin_forward(lambda: ForwardInfo(is_prefill=True, num_tokens=9))
    assert pager.is_prefill
    pager.begin_forward(lambda: None)
    assert not pager.is_prefill
    pager.begin_step(3, is_prefill=True)
    pager.begin_forward(lambda: ForwardInfo(is_prefill=False, num_tokens=9))
    assert pager.is_prefill, "the worker's word counts"


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a GPU")
def test_where_all_experts_fit_the_device_s_time_counts_not_the_launches() -> None:
    experts = ResidentExperts(Paged(cap=6).pager, StepClock())
    experts.begin_step(5, is_prefill=True)
    torch.cuda._sleep(50_000_000)  # cycles: some 30 ms
    experts.end_step()
    torch.cuda.synchronize()
    assert experts.counts_prefill.seconds > 0.01
    assert experts.counts_decode.seconds == 0


def test_rows_of_slots_and_of_the_host_are_read_from_one_address() -> None:
    """What a matrix kernel does with a row number gives the expert's bytes, wherever they are."""
    paged = Paged(cap=5)
    ids = routing(6, 3)
    paged.step(ids)
    slots, host = paged.slots[0], paged.hosts[0]
    first = {name: first_host_row(host[name], slots[name]) for name in SHAPES}
    slot_ids = torch.from_numpy(paged.tables[0].look_up(ids[0]).slot_ids.astype(np.int32)).to(DEVICE).view(-1)
    rows = dict(zip(SHAPES, block_rows(slot_ids, NUM_EXPERTS, HostRows(*first.values())), strict=True))
    for name in SHAPES:
        row_bytes = slots[name].stride(0) * slots[name].element_size()
        for expert, slot_id, row in zip(ids[0].reshape(-1), slot_ids.tolist(), rows[name].tolist(), strict=True):
            address = slots[name].data_ptr() + row * row_bytes
            in_slot = slots[name].data_ptr() + slot_id * row_bytes
            elsewhere = host[name].data_ptr() + int(expert) * row_bytes
            assert address == (in_slot if slot_id < NUM_EXPERTS else elsewhere)
    assert any(slot_id >= NUM_EXPERTS for slot_id in slot_ids.tolist()), "nothing overflowed"


@pytest.mark.parametrize("distance", [33, 16], ids=["no whole row", "overlapping"])
def test_a_host_tensor_out_of_reach_is_refused(distance: int) -> None:
    memory = torch.zeros(100, dtype=torch.float32)
    with pytest.raises(UnsupportedModelError, match="one kernel cannot read both"):
        first_host_row(memory[distance : distance + 32].view(4, 8), memory[:32].view(4, 8))
