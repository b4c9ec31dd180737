"""The gather kernel alone, and plan plus gather in one CUDA graph: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from wisp_core.pager.device.cap_kernel import set_cap
from wisp_core.pager.device.gather_kernel import Gather
from wisp_core.pager.device.plan_kernel import plan_step
from wisp_core.pager.device.reference import LayerTable
from wisp_core.pager.device.state import READY, DeviceState, Header, LayerState, Lists

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)


def page_locked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if IS_INTERPRETED else tensor.pin_memory()


def random_bytes(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def host_experts(num_experts: int) -> list[torch.Tensor]:
    """Parameters of every kind: whole vectors, a part of a chunk, 4-byte scales, an odd number of bytes."""
    shapes = [(96, 64), (40, 24), (1,), (7,)]
    dtypes = [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.uint8]
    experts = []
    for seed, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        raw = random_bytes(num_experts, *shape[:-1], shape[-1] * dtype.itemsize, seed=seed)
        experts.append(page_locked(raw).view(dtype))
    return experts


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(tensor.shape[0], -1).view(torch.uint8)


def poisoned_like(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Slots full of a pattern that no copy should leave behind."""
    return [torch.full_like(t.view(torch.uint8), 0xA5, device=DEVICE).view(t.dtype) for t in tensors]


def write_list(layer: LayerState, pairs: list[tuple[int, int]]) -> None:
    layer.header[Header.NUM_COPIES] = len(pairs)
    for index, (source, target) in enumerate(pairs):
        layer.lists[Lists.SOURCE, index] = source
        layer.lists[Lists.TARGET, index] = target


@pytest.mark.parametrize("num_copies", [0, 1, 5, 16])
@pytest.mark.parametrize("num_programs", [1, 3, 32])
def test_listed_rows_are_copied_and_no_other_byte_changes(num_copies: int, num_programs: int) -> None:
    experts = host_experts(16)
    slots = poisoned_like(experts)
    gather = Gather(experts, slots, DEVICE, chunk_bytes=2048, num_programs=num_programs)
    layer = DeviceState(1, 16, 16, DEVICE).layer(0)
    rng = np.random.default_rng(num_copies)
    pairs = list(zip(rng.permutation(16)[:num_copies].tolist(), rng.permutation(16).tolist(), strict=False))
    write_list(layer, pairs)
    gather.run(layer)
    assert gather.row_bytes == sum(as_bytes(t).shape[1] for t in experts)
    for source, target in zip(experts, slots, strict=True):
        expected = torch.full_like(as_bytes(target), 0xA5)
        for expert, slot in pairs:
            expected[slot] = as_bytes(source)[expert]
        assert torch.equal(as_bytes(target), expected)


def test_rows_with_gaps_between_them() -> None:
    """Slots and hosts may pad their rows differently."""
    host = page_locked(random_bytes(8, 96, seed=1))
    wide = torch.zeros(8, 128, dtype=torch.uint8, device=DEVICE)
    layer = DeviceState(1, 8, 8, DEVICE).layer(0)
    write_list(layer, [(2, 7), (7, 0)])
    Gather([host[:, :80]], [wide[:, 16:96]], DEVICE, chunk_bytes=32).run(layer)
    expected = torch.zeros(8, 128, dtype=torch.uint8)
    expected[7, 16:96], expected[0, 16:96] = host[2, :80], host[7, :80]
    assert torch.equal(wide.cpu(), expected)


def test_rows_that_cannot_be_copied_are_refused() -> None:
    square = torch.zeros(4, 8, 8, device=DEVICE)
    with pytest.raises(ValueError, match="contiguous"):
        Gather([square.transpose(1, 2)], [square], DEVICE)
    with pytest.raises(ValueError, match="a source row has 256 bytes, its target row 128"):
        Gather([square], [square[:, :4]], DEVICE)


def test_what_one_kernel_copies_must_have_one_unit() -> None:
    words, single = torch.zeros(4, 64, device=DEVICE), torch.zeros(4, 7, dtype=torch.uint8, device=DEVICE)
    gathers = [Gather(tensors, tensors, DEVICE) for tensors in ([words], [single], [words, single], [])]
    assert gathers[0].is_like(gathers[2])
    assert not gathers[0].is_like(gathers[1])
    assert all(gather.is_like(gathers[3]) for gather in gathers)
    assert [gather.is_led for gather in gathers] == [True, True, False, True]


class PagedLayers:
    """Slots of some layers next to their host experts and the reference; a step is checked to the byte."""

    def __init__(self, num_layers: int, num_experts: int, cap: int) -> None:
        self.state = DeviceState(num_layers, num_experts, cap, DEVICE)
        self.layers = [self.state.layer(index) for index in range(num_layers)]
        self.tables = [LayerTable(num_experts, cap) for _ in range(num_layers)]
        self.experts = [host_experts(num_experts) for _ in range(num_layers)]
        self.slots = [poisoned_like(experts) for experts in self.experts]
        self.gathers = [Gather(e, s, DEVICE, chunk_bytes=4096) for e, s in zip(self.experts, self.slots, strict=True)]
        self.moves = [Gather(s, s, DEVICE, chunk_bytes=4096, num_programs=64) for s in self.slots]

    def launch(self, topk_ids: torch.Tensor, slot_ids: torch.Tensor) -> None:
        """What one forward captures; ids are [num_layers, rows, top_k]."""
        for index, layer in enumerate(self.layers):
            plan_step(layer, topk_ids[index], slot_ids[index], self.state.num_valid_rows, gather=self.gathers[index])

    def set_cap(self, cap: int) -> None:
        set_cap(self.state, cap)
        for index, table in enumerate(self.tables):
            self.moves[index].run(self.layers[index])
            table.set_cap(cap)
            for slots in self.slots[index]:  # what a resize does to the pages above the cap
                slots.view(torch.uint8)[cap:] = 0xA5

    def check(self, topk_ids: torch.Tensor, slot_ids: torch.Tensor, num_valid_rows: int) -> None:
        for index, table in enumerate(self.tables):
            expected = table.plan(topk_ids[index].cpu().numpy(), num_valid_rows)
            assert slot_ids[index].tolist() == expected.slot_ids.tolist()
            read = self.layers[index].read()
            assert (read.stack, read.slot_of) == (table.stack, table.slot_of)
            for host, slots in zip(self.experts[index], self.slots[index], strict=True):
                experts, where = list(table.slot_of), list(table.slot_of.values())
                assert torch.equal(as_bytes(slots)[where], as_bytes(host)[experts])
                assert (as_bytes(slots)[len(where) :] == 0xA5).all(), "a byte above the residents was written"


def routed(rng: np.random.Generator, num_layers: int, rows: int, num_experts: int, top_k: int) -> torch.Tensor:
    order = np.argsort(rng.random((num_layers, rows, num_experts)) ** 3, axis=-1)
    return torch.from_numpy(order[..., :top_k].astype(np.int32)).to(DEVICE)


def test_slots_follow_the_reference_through_steps_and_cap_changes() -> None:
    rng = np.random.default_rng(0)
    paged = PagedLayers(num_layers=2, num_experts=16, cap=6)
    for step in range(10):
        if step % 3 == 2:
            paged.set_cap(int(rng.integers(3, 17)))
        topk_ids = routed(rng, 2, 3, 16, 3)
        slot_ids = torch.full_like(topk_ids, -7)
        paged.launch(topk_ids, slot_ids)
        paged.check(topk_ids, slot_ids, num_valid_rows=3)


@pytest.mark.parametrize("num_programs", [1, 2, 16])
def test_a_plan_that_copies_in_two_parts_marks_the_first_once_all_programs_are_done(num_programs: int) -> None:
    """At every number of copies: none, fewer chunks than programs, more."""
    experts = host_experts(16)[:2]
    slots = poisoned_like(experts)
    first, second = (
        Gather([e], [s], DEVICE, chunk_bytes=4096, num_programs=num_programs)
        for e, s in zip(experts, slots, strict=True)
    )
    state = DeviceState(1, 16, 16, DEVICE)
    layer, table = state.layer(0), LayerTable(16, 16)
    for ids in ([[0]], [[0]], [[1, 2]], [[0, 3, 4, 5, 6, 7, 8, 9, 10, 11]]):
        topk_ids = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
        layer.ready.zero_()
        plan_step(
            layer,
            topk_ids,
            torch.empty_like(topk_ids),
            state.num_valid_rows,
            gather=first,
            gather_after=second,
            is_marking=True,
        )
        assert int(layer.ready[0]) == READY
        table.plan(topk_ids.cpu().numpy())
        for host, slot in zip(experts, slots, strict=True):
            expected = torch.full_like(as_bytes(slot), 0xA5)
            for expert, at in table.slot_of.items():
                expected[at] = as_bytes(host)[expert]
            assert torch.equal(as_bytes(slot), expected)


@pytest.mark.skipif(IS_INTERPRETED, reason="needs CUDA graphs")
@pytest.mark.parametrize("rows", [1, 4])
def test_one_captured_graph_serves_every_input_padding_and_cap(rows: int) -> None:
    rng = np.random.default_rng(rows)
    num_layers, num_experts, top_k = 3, 64, 6
    paged = PagedLayers(num_layers, num_experts, cap=10)
    topk_ids = routed(rng, num_layers, rows, num_experts, top_k)
    slot_ids = torch.zeros_like(topk_ids)
    paged.launch(topk_ids, slot_ids)  # compiles, and is a step like any other
    paged.check(topk_ids, slot_ids, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged.launch(topk_ids, slot_ids)
    for step in range(40):
        if step % 5 == 4:
            paged.set_cap(int(rng.integers(top_k, num_experts + 1)))
        num_valid_rows = int(rng.integers(1, rows + 1))
        topk_ids.copy_(routed(rng, num_layers, rows, num_experts, top_k))
        topk_ids[:, num_valid_rows:] = int(rng.integers(-(2**31), 2**31))
        paged.state.num_valid_rows.fill_(num_valid_rows)
        graph.replay()
        paged.check(topk_ids, slot_ids, num_valid_rows)
