"""Counts of who uses which experts, against plain Python: on a GPU, or under Triton's interpreter."""

from __future__ import annotations

import os
from collections import defaultdict

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from wisp_core.pager.device.plan_kernel import plan_step
from wisp_core.pager.device.reference import LayerTable
from wisp_core.pager.device.state import MAX_ROUTED, DeviceState, FetchPath
from wisp_core.pager.device.uses import DeviceUses

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
pytestmark = pytest.mark.skipif(
    not IS_INTERPRETED and not torch.cuda.is_available(), reason="needs a GPU or TRITON_INTERPRET=1"
)

NUM_LAYERS, NUM_EXPERTS, TOP_K, CAP = 2, 24, 3, 10


class Counted:
    """A plan per layer and step, and what a host would have counted."""

    def __init__(self, max_keys: int = 8) -> None:
        self.state = DeviceState(NUM_LAYERS, NUM_EXPERTS, CAP, DEVICE)
        self.tables = [LayerTable(NUM_EXPERTS, CAP) for _ in range(NUM_LAYERS)]
        self.uses = DeviceUses(self.state, TOP_K, max_keys)
        self.counts: dict[str, np.ndarray] = defaultdict(lambda: np.zeros((NUM_LAYERS, NUM_EXPERTS), np.int64))
        self.hits: dict[str, int] = defaultdict(int)
        self.rng = np.random.default_rng(0)

    def step(self, keys: list[str | None], rows: int, path: FetchPath = FetchPath.DECODE) -> None:
        for layer, table in enumerate(self.tables):
            ids = np.argsort(self.rng.random((rows, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int64)
            resident = set(table.slot_of)
            (table.plan if path is FetchPath.DECODE else table.look_up)(ids)
            topk_ids = torch.from_numpy(ids).to(DEVICE)
            slot_ids = torch.empty_like(topk_ids)
            plan_step(self.state.layer(layer), topk_ids, slot_ids, self.state.num_valid_rows, path=path)
            for key, row in zip(keys, ids.tolist(), strict=False):
                if key is not None:
                    self.counts[key][layer, row] += 1
                    self.hits[key] += len(resident.intersection(row))
        self.uses.count(keys)

    def check(self) -> None:
        found = self.drain()
        assert found.keys() == self.counts.keys()
        for key, uses in found.items():
            assert (uses.counts == self.counts[key]).all()
            assert uses.hits == self.hits[key]
        self.counts.clear()
        self.hits.clear()

    def drain(self) -> dict:
        found = self.uses.drain()
        if not IS_INTERPRETED:
            torch.cuda.synchronize()  # a copy that the first call has only started is over for the second
            found |= self.uses.drain()
        return found


def test_counts_and_hits_by_key_over_drains() -> None:
    counted = Counted()
    for _ in range(3):
        for step in range(6):
            counted.step(["a", "b", "a", None][: 1 + step % 4], rows=4)
        counted.step(["c"], rows=30, path=FetchPath.STREAMED)  # a decode row that rides along with a prefill
        counted.check()
    assert counted.drain() == {}


def test_padding_is_not_counted() -> None:
    counted = Counted()
    counted.state.num_valid_rows.fill_(1)
    ids = torch.arange(2 * TOP_K, device=DEVICE).view(2, TOP_K)
    for layer in range(NUM_LAYERS):
        plan_step(counted.state.layer(layer), ids, torch.empty_like(ids), counted.state.num_valid_rows)
    counted.uses.count(["a", "b"])
    found = counted.drain()
    assert found["a"].counts.sum() == NUM_LAYERS * TOP_K
    assert found["b"].counts.sum() == 0


def test_more_keys_and_rows_than_there_is_room_for_are_left_out() -> None:
    counted = Counted(max_keys=2)
    counted.step(["a", "b", "c"], rows=3)
    assert counted.drain().keys() == {"a", "b"}
    counted.step(["c"], rows=1)
    assert counted.drain().keys() == {"c"}, "numbers are given out anew"
    counted.step(["c"], rows=1)
    counted.uses.reset()
    counted.uses.count([None] * 5000)
    assert counted.uses.max_rows == MAX_ROUTED // TOP_K
    assert counted.drain() == {}
