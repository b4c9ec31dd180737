"""Prefetch: the kernel against its reference, and real slots: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from test_device_pager import DEVICE, NUM_EXPERTS, NUM_LAYERS, Paged, routing

from wisp_core.pager.device.cap_kernel import set_cap
from wisp_core.pager.device.plan_kernel import plan_step
from wisp_core.pager.device.prefetch_kernel import FETCHED, PENDING, SUMS_WIDTH, USED, WASTED, WEIGHT, guess
from wisp_core.pager.device.prefetch_reference import PrefetchingTable
from wisp_core.pager.device.state import DeviceState, FetchPath, Header, Lists

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)


def zipf_rows(rng: np.random.Generator, rows: int, num_experts: int, top_k: int) -> np.ndarray:
    """Routing with favourites, so that history says something."""
    keys = (1.0 / np.arange(1, num_experts + 1)) / rng.exponential(size=(rows, num_experts))
    return np.argsort(-keys, axis=1)[:, :top_k].astype(np.int32)


@pytest.mark.parametrize(("num_experts", "top_k", "rows"), [(32, 4, 1), (40, 1, 3), (128, 8, 4), (5, 2, 1)])
@pytest.mark.parametrize("most", [1, 4])
def test_the_kernel_equals_the_reference_step_by_step(num_experts: int, top_k: int, rows: int, most: int) -> None:
    rng = np.random.default_rng([num_experts, rows, most])
    cap = int(rng.integers(top_k, num_experts + 1))
    state, table = DeviceState(2, num_experts, cap, DEVICE), PrefetchingTable(num_experts, cap)
    layer, copies = state.layer(1), DeviceState(1, num_experts, cap, DEVICE).layer(0)
    history = torch.zeros(2, state.width, dtype=torch.int32, device=DEVICE)
    sums = torch.zeros(SUMS_WIDTH, dtype=torch.int64, device=DEVICE)
    for step in range(24):
        if step % 9 == 8:
            cap = int(rng.integers(top_k, num_experts + 1))
            set_cap(state, cap)
            table.set_cap(cap)
        guess(layer, copies, history, sums, most)
        expected = table.prefetch(most)
        count = int(copies.header[Header.NUM_COPIES])
        found = zip(*(copies.lists[row, :count].tolist() for row in (Lists.SOURCE, Lists.TARGET)), strict=True)
        assert list(found) == expected
        assert history[WEIGHT, :num_experts].tolist() == table.weight.tolist()
        assert set(torch.nonzero(history[PENDING]).flatten().tolist()) == table.pending
        counts = table.prefetched
        assert [int(sums[entry]) for entry in (FETCHED, USED, WASTED)] == [counts.fetched, counts.used, counts.wasted]
        assert counts.fetched == counts.used + counts.wasted + len(table.pending)
        ids = zipf_rows(rng, rows, num_experts, top_k)
        path = FetchPath.STREAMED if step % 7 == 6 else FetchPath.DECODE
        slot_ids = torch.empty(ids.shape, dtype=torch.int32, device=DEVICE)
        plan_step(layer, torch.from_numpy(ids).to(DEVICE), slot_ids, state.num_valid_rows, path=path)
        plan = table.plan(ids) if path is FetchPath.DECODE else table.look_up(ids)
        if path is FetchPath.STREAMED:
            continue
        assert slot_ids.tolist() == plan.slot_ids.tolist()
        read = layer.read()
        read.check_integrity()
        assert (read.stack, read.slot_of) == (table.stack, table.slot_of)


def step_by_contents(paged: Paged, ids: np.ndarray) -> None:
    """One decode step; every slot id leads to the bytes of the expert that was routed to."""
    paged.pager.begin_step(len(ids[0]), is_prefill=False)
    for layer in range(NUM_LAYERS):
        slot_ids = paged.pager.plan(layer, torch.from_numpy(ids[layer]).to(DEVICE), FetchPath.DECODE).cpu()
        for expert, slot_id in zip(ids[layer].reshape(-1).tolist(), slot_ids.view(-1).tolist(), strict=True):
            if slot_id >= NUM_EXPERTS:
                assert slot_id == NUM_EXPERTS + expert
                continue
            for name, host in paged.hosts[layer].items():
                assert torch.equal(paged.slots[layer][name][slot_id].cpu(), host[expert])
    paged.pager.end_step()


@pytest.mark.parametrize("cap", [5, 9])
def test_guesses_change_nothing_but_where_experts_lie(cap: int) -> None:
    paged = Paged(cap=cap, prefetch=3)
    rng = np.random.default_rng(cap)
    for step in range(10):
        ids = np.stack([zipf_rows(rng, 1 + step % 2, NUM_EXPERTS, 4) for _ in range(NUM_LAYERS)])
        step_by_contents(paged, ids)
    paged.pager.check_integrity()
    counts = paged.pager.prefetched
    assert counts.fetched >= counts.used + counts.wasted
    assert counts.fetched > 0


def test_without_the_setting_nothing_is_guessed() -> None:
    paged = Paged(cap=5)
    for seed in range(2):
        paged.step(routing(1, seed))
    assert paged.pager.prefetched.fetched == 0
