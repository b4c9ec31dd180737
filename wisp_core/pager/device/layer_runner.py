"""Runs one layer's experts on a GPU: chooses the way by what kind of forward it is and how many rows it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from wisp_core.pager.device.block_rows import HostRows, first_host_row
from wisp_core.pager.device.blocks import MAX_BLOCK_IDS, Blocks
from wisp_core.pager.device.device_pager import DevicePager
from wisp_core.pager.device.fused_apply import FusedExperts
from wisp_core.pager.device.staging import W2, W13, Group
from wisp_core.pager.device.state import Path
from wisp_core.pager.interface import ForwardInfo

MAX_ROWS_IN_PLACE = 128
"""Prefills of at most so many rows read missing experts in place: most experts then fill one block of a product, so
they cross the link about once, and only those that are needed do. With more rows, staging is faster at every cap."""


class LayerRunner:
    """One layer: its RoutedExperts, whose weights are slots, and its place in the pager."""

    def __init__(self, pager: DevicePager, index: int, layer: Any) -> None:
        self._pager, self._index, self._layer = pager, index, layer
        self._host: HostRows | None = None

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        describe: Callable[[], ForwardInfo | None],
    ) -> torch.Tensor:
        """Outputs [rows, H] of rows ``x``, routed to ``topk_ids`` [rows, top_k]."""
        pager = self._pager
        if self._index == 0:
            pager.begin_forward(describe)
        experts = FusedExperts(self._layer, x, topk_weights, topk_ids)
        # A captured graph serves whatever comes later, so its way may depend on the number of rows only.
        if not pager.is_prefill or torch.cuda.is_current_stream_capturing():
            return self._decode(experts, topk_ids)
        slot_ids = pager.plan(self._index, topk_ids, Path.STREAMED)
        if len(x) <= MAX_ROWS_IN_PLACE:
            return experts.run(slot_ids, self._host_rows())
        return experts.run_in_groups(slot_ids, self._groups())

    def _decode(self, experts: FusedExperts, topk_ids: torch.Tensor) -> torch.Tensor:
        num_rows = len(topk_ids)
        host = self._host_rows() if self._pager.can_overflow(num_rows) else None
        if num_rows > experts.rows_per_block or topk_ids.numel() > MAX_BLOCK_IDS:
            return experts.run(self._pager.plan(self._index, topk_ids, Path.DECODE), host)
        # One row needs no expert twice, and never more than there are slots.
        blocks = Blocks.empty(topk_ids, experts.rows_per_block, host) if num_rows > 1 else None
        return experts.run_plan(self._pager.plan_products(self._index, topk_ids, blocks))

    def _groups(self) -> list[Group]:
        staging, weights = self._pager.staging, self._layer
        if self._index == 0:
            staging.begin(self._pager.is_resident())
        in_slots = Group(staging.slot_map, lambda: weights.w13_weight, lambda: weights.w2_weight, lambda: None)
        return [in_slots, *staging.groups(self._index)]

    def _host_rows(self) -> HostRows:
        if self._host is None:
            store = self._pager.stores[self._index]
            self._host = HostRows(
                first_host_row(store.tensor(W13), self._layer.w13_weight.data),
                first_host_row(store.tensor(W2), self._layer.w2_weight.data),
            )
        return self._host
