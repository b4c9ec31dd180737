"""The plan kernels against the reference, step by step: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pytest
import torch

pytest.importorskip("triton")

from wisp_core.pager.device.block_rows import HostRows
from wisp_core.pager.device.blocks import Blocks
from wisp_core.pager.device.cap_kernel import set_cap
from wisp_core.pager.device.plan_kernel import plan_step
from wisp_core.pager.device.reference import LayerTable
from wisp_core.pager.device.state import READY, DeviceState, FetchPath, Header, LayerState

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)

Ids = npt.NDArray[np.int64]
MODELS = [(32, 4), (40, 1), (64, 6), (128, 8), (160, 6), (256, 8), (384, 8), (512, 8), (5, 2)]  # (num_experts, top_k)


def assert_equal(layer: LayerState, table: LayerTable) -> None:
    read = layer.read()
    read.check_integrity()
    assert read.stack == table.stack
    assert read.slot_of == table.slot_of
    assert (read.cap, read.num_seen) == (table.cap, table.num_seen)
    assert (read.decode, read.streamed) == (table.decode, table.streamed)
    assert (read.distances == table.distances).all()


class Pair:
    """A kernel's layer and the reference's, given the same steps; the layer's neighbours must stay as they are."""

    def __init__(self, num_experts: int, cap: int) -> None:
        self.state = DeviceState(3, num_experts, cap, DEVICE)
        self.layer = self.state.layer(1)
        self.table = LayerTable(num_experts, cap)

    def step(
        self, ids: Ids, dtype: torch.dtype, num_valid_rows: int | None = None, path: FetchPath = FetchPath.DECODE
    ) -> None:
        rows = 2**31 - 1 if num_valid_rows is None else num_valid_rows
        self.state.num_valid_rows.fill_(rows)
        topk_ids = torch.from_numpy(ids).to(DEVICE, dtype).contiguous()
        slot_ids = torch.full_like(topk_ids, 12345)
        plan_step(self.layer, topk_ids, slot_ids, self.state.num_valid_rows, path=path)
        act = self.table.plan if path is FetchPath.DECODE else self.table.look_up
        expected = act(ids, num_valid_rows)
        assert slot_ids.tolist() == expected.slot_ids.tolist()
        assert self.layer.read_list() == expected.misses
        assert int(self.layer.header[Header.NUM_COPIES]) == expected.num_copies
        assert_equal(self.layer, self.table)

    def set_cap(self, cap: int) -> None:
        moves = self.table.set_cap(cap)
        set_cap(self.state, cap)
        assert self.layer.read_list() == moves
        assert_equal(self.layer, self.table)

    def assert_neighbours_untouched(self) -> None:
        for index in (0, 2):
            assert_equal(self.state.layer(index), LayerTable(self.table.num_experts, self.table.cap))


def random_rows(rng: np.random.Generator, rows: int, num_experts: int, top_k: int) -> Ids:
    return np.argsort(rng.random((rows, num_experts)), axis=1)[:, :top_k]


@pytest.mark.parametrize(("num_experts", "top_k"), MODELS)
@pytest.mark.parametrize("rows", [1, 5, 64])
def test_random_routing_with_padding_and_changing_caps(num_experts: int, top_k: int, rows: int) -> None:
    rng = np.random.default_rng([num_experts, top_k, rows])
    pair = Pair(num_experts, cap=int(rng.integers(top_k, num_experts + 1)))
    dtype = [torch.int32, torch.int64][rows % 2]
    for step in range(12):
        if step % 3 == 2:
            pair.set_cap(int(rng.integers(top_k, num_experts + 1)))
        ids = random_rows(rng, rows, num_experts, top_k)
        num_valid_rows = int(rng.integers(0, rows + 1)) if rng.random() < 0.5 else None
        if num_valid_rows is not None:
            ids[num_valid_rows:] = rng.integers(-(2**31), 2**31, (rows - num_valid_rows, top_k))
        path = FetchPath.STREAMED if rng.random() < 0.2 else FetchPath.DECODE
        pair.step(ids, dtype, num_valid_rows, path)
    pair.assert_neighbours_untouched()


def adversarial(name: str, step: int, rows: int, num_experts: int, top_k: int) -> Ids:
    """Routing that LRU, a duplicate or a full table could get wrong."""
    offsets = np.arange(rows)[:, None] * top_k + np.arange(top_k)
    if name == "all rows alike":
        return np.tile(np.arange(top_k) + step, (rows, 1)) % num_experts
    if name == "all distinct":
        return (offsets + step) % num_experts
    if name == "cyclic scan":
        return (offsets + step * rows * top_k) % num_experts
    if name == "last experts first":
        return (num_experts - 1 - offsets - step // 2) % num_experts
    assert name == "one id everywhere"
    return np.full((rows, top_k), (step * 7) % num_experts)


@pytest.mark.parametrize(
    "name", ["all rows alike", "all distinct", "cyclic scan", "last experts first", "one id everywhere"]
)
@pytest.mark.parametrize(("num_experts", "top_k", "rows"), [(32, 4, 8), (128, 8, 16), (512, 8, 64)])
@pytest.mark.parametrize("cap", ["top_k", "half", "all"])
def test_adversarial_routing(name: str, num_experts: int, top_k: int, rows: int, cap: str) -> None:
    pair = Pair(num_experts, {"top_k": top_k, "half": num_experts // 2, "all": num_experts}[cap])
    for step in range(6):
        pair.step(adversarial(name, step, rows, num_experts, top_k), torch.int32)


def test_a_large_batch_is_read_in_several_parts() -> None:
    rng = np.random.default_rng(0)
    pair = Pair(num_experts=128, cap=16)
    for num_valid_rows in (None, 1500, 1):
        pair.step(random_rows(rng, 1601, 128, 8), torch.int32, num_valid_rows, FetchPath.STREAMED)
        pair.step(random_rows(rng, 1601, 128, 8), torch.int32, num_valid_rows)


@pytest.mark.parametrize("garbage", [-1, 128, -(2**31), 2**31 - 1])
def test_garbage_ids_neither_match_empty_slots_nor_count(garbage: int) -> None:
    pair = Pair(num_experts=128, cap=8)
    ids = np.full((4, 8), garbage)
    pair.step(ids, torch.int32)  # as real rows, while every slot is empty
    ids[0] = np.arange(8)
    pair.step(ids, torch.int32, num_valid_rows=1)
    pair.step(ids, torch.int64, num_valid_rows=0)
    assert pair.table.decode.misses == 8


def test_every_cap_change_between_full_tables() -> None:
    rng = np.random.default_rng(1)
    pair = Pair(num_experts=32, cap=32)
    for cap in [31, 4, 5, 32, 16, 17, 16, 4, 32]:
        for _ in range(4):
            pair.step(random_rows(rng, 2, 32, 4), torch.int32)
        pair.set_cap(cap)


def test_unaligned_views_of_ids() -> None:
    """A router may hand out a slice whose address is a multiple of 4 bytes only."""
    rng = np.random.default_rng(2)
    pair = Pair(num_experts=64, cap=20)
    ids = random_rows(rng, 3, 64, 6)
    buffer = torch.zeros(2, 3 * 6 + 1, dtype=torch.int32, device=DEVICE)
    topk_ids, slot_ids = (row[1:].view(3, 6) for row in buffer)
    topk_ids.copy_(torch.from_numpy(ids))
    plan_step(pair.layer, topk_ids, slot_ids, pair.state.num_valid_rows)
    assert slot_ids.tolist() == pair.table.plan(ids).slot_ids.tolist()
    assert_equal(pair.layer, pair.table)


@pytest.mark.parametrize(("num_experts", "top_k", "rows"), [(16, 2, 2), (40, 3, 5), (128, 8, 4), (128, 8, 16)])
@pytest.mark.parametrize("num_padding", [0, 1])
def test_blocks_hold_each_routed_row_once_beside_its_expert(
    num_experts: int, top_k: int, rows: int, num_padding: int
) -> None:
    rng = np.random.default_rng([num_experts, rows])
    host = HostRows(first_w13=100_000, first_w2=-70_000)
    pair = Pair(num_experts, cap=top_k)
    num_elsewhere = 0
    for _ in range(5):
        ids = random_rows(rng, rows, num_experts, top_k)
        num_valid = rows - num_padding
        ids[num_valid:] = rng.integers(-(2**31), 2**31, (num_padding, top_k))
        pair.state.num_valid_rows.fill_(num_valid)
        topk_ids = torch.from_numpy(ids).to(DEVICE, torch.int32)
        blocks = Blocks.empty(topk_ids, 16, host)
        for tensor in (blocks.row_ids, blocks.w13_rows, blocks.w2_rows, blocks.num_padded):
            tensor.fill_(12345)
        slot_ids = torch.empty_like(topk_ids)
        plan_step(pair.layer, topk_ids, slot_ids, pair.state.num_valid_rows, blocks=blocks)
        pair.table.plan(ids, num_valid)
        flat_slots = slot_ids.view(-1).tolist()
        num_blocks, rest = divmod(int(blocks.num_padded), 16)
        assert rest == 0
        seen: list[int] = []
        for block, in_block in enumerate(blocks.row_ids.view(-1, 16).tolist()):
            entries = [entry for entry in in_block if entry != ids.size]
            assert in_block[: len(entries)] == entries, "padding comes last"
            assert bool(entries) == (block < num_blocks)
            for entry in entries:
                expert, slot = int(ids.reshape(-1)[entry]), flat_slots[entry]
                is_elsewhere = slot >= num_experts
                num_elsewhere += is_elsewhere
                assert int(blocks.w13_rows[block]) == (host.first_w13 + expert if is_elsewhere else slot)
                assert int(blocks.w2_rows[block]) == (host.first_w2 + expert if is_elsewhere else slot)
            seen += entries
        assert sorted(seen) == list(range(num_valid * top_k))
        assert num_blocks == len(set(ids[:num_valid].reshape(-1).tolist()))
    assert bool(num_elsewhere) == (rows - num_padding > 1), "more experts than slots are needed"


@pytest.mark.parametrize(("rows", "has_blocks"), [(1, False), (3, True), (4, True)])
@pytest.mark.parametrize("num_padding", [0, 1])
def test_a_marking_plan_gives_the_same_where_nothing_is_missing(rows: int, has_blocks: bool, num_padding: int) -> None:
    """Then the slots are stored before the plan is made."""
    rng = np.random.default_rng([rows, num_padding])
    pair = Pair(num_experts=128, cap=64)
    num_valid, pool = rows - num_padding, rng.permutation(128)[:60]
    pair.state.num_valid_rows.fill_(num_valid)
    num_steps_that_miss = 0
    for _ in range(40):
        ids = pool[random_rows(rng, rows, len(pool), 8)]
        ids[num_valid:] = rng.integers(-(2**31), 2**31, (num_padding, 8))
        topk_ids = torch.from_numpy(ids).to(DEVICE, torch.int32)
        blocks = Blocks.empty(topk_ids, 16, HostRows(200, 200)) if has_blocks else None
        slot_ids = torch.full_like(topk_ids, 12345)
        pair.layer.ready.zero_()
        plan_step(pair.layer, topk_ids, slot_ids, pair.state.num_valid_rows, blocks=blocks, is_marking=True)
        expected = pair.table.plan(ids, num_valid)
        num_steps_that_miss += bool(expected.misses)
        assert int(pair.layer.ready[0]) == READY
        assert slot_ids.tolist() == expected.slot_ids.tolist()
        assert pair.layer.read_list() == expected.misses
        assert_equal(pair.layer, pair.table)
        if blocks is not None:
            slots_of_rows = rows_in_blocks(blocks, ids.size)
            assert slots_of_rows == dict(enumerate(slot_ids[:num_valid].reshape(-1).tolist()))
    assert num_valid == 0 or 0 < num_steps_that_miss < 40


def rows_in_blocks(blocks: Blocks, num_ids: int) -> dict[int, int]:
    """By routed id that is in a block: the row of that block's expert; none may be in two."""
    found: dict[int, int] = {}
    for block in range(int(blocks.num_padded) // blocks.rows_per_block):
        assert int(blocks.w13_rows[block]) == int(blocks.w2_rows[block])
        for entry in blocks.row_ids.view(-1, blocks.rows_per_block)[block].tolist():
            assert entry not in found
            if entry != num_ids:
                found[entry] = int(blocks.w13_rows[block])
    return found


def test_the_mark_is_made_once_a_step_and_only_on_request() -> None:
    rng = np.random.default_rng(3)
    pair = Pair(num_experts=32, cap=8)
    for is_marking in (False, True):
        pair.layer.ready.zero_()
        topk_ids = torch.from_numpy(random_rows(rng, 2, 32, 4)).to(DEVICE, torch.int32)
        plan_step(pair.layer, topk_ids, torch.empty_like(topk_ids), pair.state.num_valid_rows, is_marking=is_marking)
        assert int(pair.layer.ready[0]) == (READY if is_marking else 0)


def test_statistics_restart_without_forgetting_residents() -> None:
    pair = Pair(num_experts=32, cap=8)
    ids = np.arange(4)[None]
    pair.step(ids, torch.int32)
    pair.state.reset_statistics()
    read = pair.layer.read()
    assert read.decode.steps == 0
    assert not read.distances.any()
    assert read.slot_of == pair.table.slot_of
