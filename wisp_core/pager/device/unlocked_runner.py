"""Runs one layer's experts where the device cannot read host memory, since CUDA did not lock it: the host copies.

A decode step takes its misses into slots as ever, but the host reads the plan, one wait for the device per layer, and
makes the copies. What finds no slot, and what a prefill misses, goes through the staging buffers, only what is needed.
Nothing of this fits a CUDA graph. It is exact and slow, for machines that cannot lock enough memory.
"""

from __future__ import annotations

import numpy as np
import torch

from wisp_core.pager.device.fused_apply import FusedExperts
from wisp_core.pager.device.runner import Runner
from wisp_core.pager.device.staging import Group, experts_in_no_slot
from wisp_core.pager.device.state import FetchPath


class UnlockedRunner(Runner):
    """The host copies, after a wait for the device."""

    def _run(self, experts: FusedExperts, topk_ids: torch.Tensor) -> torch.Tensor:
        assert not torch.cuda.is_current_stream_capturing(), "graphs are off where host memory is not locked"
        if self._pager.is_prefill:
            slot_ids = self._pager.plan(self._index, topk_ids, FetchPath.STREAMED)
        else:
            slot_ids = self._pager.fetch_by_host(self._index, topk_ids)
        return experts.run_in_groups(slot_ids, self._groups(slot_ids))

    def _groups(self, slot_ids: torch.Tensor) -> list[Group]:
        pager, staging = self._pager, self._pager.staging
        missing = experts_in_no_slot(slot_ids, pager.num_experts)
        if not missing:
            return [self._in_slots()]
        # To the staging, only what this layer needs now is missing.
        is_there = np.ones((pager.num_layers, pager.num_experts), dtype=np.bool_)
        is_there[self._index, missing] = False
        staging.begin(is_there)
        return [self._in_slots(), *staging.groups(self._index)]
