"""Runs one layer's experts where the device cannot read host memory, since CUDA did not lock it: the host copies.

A decode step takes its misses into slots as ever, but the host reads the plan, one wait for the device per layer, and
makes the copies. What finds no slot, and what a prefill misses, goes through the staging buffers, only what is needed.
Nothing of this fits a CUDA graph. It is exact and slow, for machines that cannot lock enough memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from wisp_core.pager.device.device_pager import DevicePager
from wisp_core.pager.device.fused_apply import FusedExperts
from wisp_core.pager.device.staging import Group, experts_in_no_slot
from wisp_core.pager.device.state import Path
from wisp_core.pager.interface import ForwardInfo


class UnlockedRunner:
    """One layer: its RoutedExperts, whose weights are slots, and its place in the pager."""

    def __init__(self, pager: DevicePager, index: int, layer: Any) -> None:
        self._pager, self._index, self._layer = pager, index, layer

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        describe: Callable[[], ForwardInfo | None],
    ) -> torch.Tensor:
        """Outputs [rows, H] of rows ``x``, routed to ``topk_ids`` [rows, top_k]."""
        pager = self._pager
        assert not torch.cuda.is_current_stream_capturing(), "graphs are off where host memory is not locked"
        if self._index == 0:
            pager.begin_forward(describe)
        if pager.is_prefill:
            slot_ids = pager.plan(self._index, topk_ids, Path.STREAMED)
        else:
            slot_ids = pager.fetch_by_host(self._index, topk_ids)
        return FusedExperts(self._layer, x, topk_weights, topk_ids).run_in_groups(slot_ids, self._groups(slot_ids))

    def _groups(self, slot_ids: torch.Tensor) -> list[Group]:
        pager, staging, weights = self._pager, self._pager.staging, self._layer
        in_slots = Group(staging.slot_map, lambda: weights.w13_weight, lambda: weights.w2_weight, lambda: None)
        experts = experts_in_no_slot(slot_ids, pager.num_experts)
        if not experts:
            return [in_slots]
        # To the staging, only what this layer needs now is missing.
        is_there = np.ones((pager.num_layers, pager.num_experts), dtype=np.bool_)
        is_there[self._index, experts] = False
        staging.begin(is_there)
        return [in_slots, *staging.groups(self._index)]
