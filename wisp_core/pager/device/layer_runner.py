"""Runs one layer's experts where the device reads host memory: how follows from the kind of forward and its rows."""

from __future__ import annotations

from typing import Any

import torch

from wisp_core.pager.device.block_rows import HostRows, first_host_row
from wisp_core.pager.device.blocks import MAX_BLOCK_IDS, Blocks
from wisp_core.pager.device.device_pager import DevicePager
from wisp_core.pager.device.fused_apply import FusedExperts
from wisp_core.pager.device.runner import Runner
from wisp_core.pager.device.staging import W2, W13, Group
from wisp_core.pager.device.state import FetchPath

MAX_ROWS_IN_PLACE = 128
"""Prefills of at most so many rows read missing experts in place: most experts then fill one block of a product, so
they cross the link about once, and only those that are needed do. With a quarter of the experts in slots a prompt of
128 tokens took 784 ms in place and one of 300 took 902, when a staged pass takes 810 (`prefill-h200.json`)."""


class LayerRunner(Runner):
    """Launches only, so that a CUDA graph may capture a decode step."""

    def __init__(self, pager: DevicePager, index: int, layer: Any) -> None:
        super().__init__(pager, index, layer)
        self._host: HostRows | None = None

    def _run(self, experts: FusedExperts, topk_ids: torch.Tensor) -> torch.Tensor:
        # A captured graph serves whatever comes later, so its way may depend on the number of rows only.
        if not self._pager.is_prefill or torch.cuda.is_current_stream_capturing():
            return self._decode(experts, topk_ids)
        slot_ids = self._pager.plan(self._index, topk_ids, FetchPath.STREAMED)
        if len(topk_ids) <= MAX_ROWS_IN_PLACE:
            return experts.run(slot_ids, self._host_rows())
        return experts.run_in_groups(slot_ids, self._groups())

    def _decode(self, experts: FusedExperts, topk_ids: torch.Tensor) -> torch.Tensor:
        num_rows = len(topk_ids)
        host = self._host_rows() if self._pager.can_overflow(num_rows) else None
        if num_rows > experts.rows_per_block or topk_ids.numel() > MAX_BLOCK_IDS:
            return experts.run(self._pager.plan(self._index, topk_ids, FetchPath.DECODE), host)
        # One row needs no expert twice, and never more than there are slots.
        blocks = Blocks.empty(topk_ids, experts.rows_per_block, host) if num_rows > 1 else None
        return experts.run_plan(self._pager.plan_products(self._index, topk_ids, blocks))

    def _groups(self) -> list[Group]:
        staging = self._pager.staging
        if self._index == 0:
            staging.begin(self._pager.is_resident())
        return [self._in_slots(), *staging.groups(self._index)]

    def _host_rows(self) -> HostRows:
        if self._host is None:
            store = self._pager.stores[self._index]
            self._host = HostRows(
                first_host_row(store.tensor(W13), self._layer.w13_weight.data),
                first_host_row(store.tensor(W2), self._layer.w2_weight.data),
            )
        return self._host
