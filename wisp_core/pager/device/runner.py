"""What every way of running a layer's experts on a GPU has in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from wisp_core.pager.device.device_pager import DevicePager
from wisp_core.pager.device.fused_apply import FusedExperts
from wisp_core.pager.device.staging import Group
from wisp_core.pager.interface import ForwardInfo


class Runner(ABC):
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
        if self._index == 0:
            self._pager.begin_forward(describe)
        return self._run(FusedExperts(self._layer, x, topk_weights, topk_ids), topk_ids)

    @abstractmethod
    def _run(self, experts: FusedExperts, topk_ids: torch.Tensor) -> torch.Tensor:
        """Plan, fetch and compute."""

    def _in_slots(self) -> Group:
        """The experts that lie in slots."""
        weights = self._layer
        slot_map = self._pager.staging.slot_map
        return Group(slot_map, lambda: weights.w13_weight, lambda: weights.w2_weight, lambda: None)
