"""Counts which key (a session, say) used which experts, on the device and once per step, behind its launches.

Every plan keeps the ids of its step's first rows; one kernel then adds those of all layers to the counts of the rows'
keys. The sums come to the host without holding up a step: a drain starts a copy, and a later one hands it over.
"""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from wisp_core.pager.device.state import MAX_ROUTED, ROUTED_MISS, DeviceState

NO_KEY = -1
"""Of a row that is not counted."""

_ROUTED_MISS = tl.constexpr(ROUTED_MISS)
_MAX_ROUTED = tl.constexpr(MAX_ROUTED)
_NUM_STAGING = 8  # more than the steps that can be in flight, so that none is overwritten before it is read


@triton.jit(do_not_specialize=["num_layers", "num_experts"])
def _count_kernel(
    routed_ptr,  # int16 [num_layers, MAX_ROUTED]
    keys_ptr,  # int32 [rows]
    counts_ptr,  # int32 [keys, num_layers, num_experts]
    hits_ptr,  # int32 [keys]
    num_layers,
    num_experts,
    top_k: tl.constexpr,
    ids_at_once: tl.constexpr,
):
    """One program per layer and row."""
    layer, row = tl.program_id(0), tl.program_id(1)
    key = tl.load(keys_ptr + row)
    at = tl.arange(0, ids_at_once)
    routed = tl.load(routed_ptr + layer * _MAX_ROUTED + row * top_k + at, mask=at < top_k, other=-1).to(tl.int32)
    is_owned = at * 0 + key >= 0
    is_real = is_owned & (routed >= 0)
    expert = routed & (_ROUTED_MISS - 1)
    is_hit = is_real & (routed < _ROUTED_MISS)
    tl.atomic_add(counts_ptr + (key.to(tl.int64) * num_layers + layer) * num_experts + expert, 1, mask=is_real)
    tl.atomic_add(hits_ptr + key + at * 0, tl.sum(is_hit.to(tl.int32)), mask=is_owned & (at == 0))


@dataclass(frozen=True, slots=True)
class KeyUses:
    """What one key used since its number was given out."""

    counts: npt.NDArray[np.int32]  # [layers, E]
    hits: int


class DeviceUses:
    """Counts by key. Keys have numbers that are given out anew after each drain."""

    def __init__(self, state: DeviceState, top_k: int, max_keys: int) -> None:
        """Count at most ``max_keys`` keys between two drains; what others use is lost."""
        device = state.routed.device
        self._state, self._top_k = state, top_k
        self.max_rows = MAX_ROUTED // top_k
        shape = (max_keys, state.num_layers, state.num_experts)
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self._hits = torch.zeros(max_keys, dtype=torch.int32, device=device)
        self._is_cuda = device.type == "cuda"
        self._host_counts = torch.empty(shape, dtype=torch.int32, pin_memory=self._is_cuda)
        self._host_hits = torch.empty(max_keys, dtype=torch.int32, pin_memory=self._is_cuda)
        self._staging = [
            torch.empty(self.max_rows, dtype=torch.int32, pin_memory=self._is_cuda) for _ in range(_NUM_STAGING)
        ]
        self._next_staging = 0
        self._numbers: dict[str, int] = {}
        self._copying: tuple[list[str], torch.cuda.Event | None] | None = None

    def count(self, keys: Sequence[str | None]) -> None:
        """Count the last step, in stream order: ``keys`` of its first rows, None for one that is not counted."""
        keys = keys[: self.max_rows]
        numbers = [NO_KEY if key is None else self._number(key) for key in keys]
        if all(number == NO_KEY for number in numbers):
            return
        staging = self._staging[self._next_staging]
        self._next_staging = (self._next_staging + 1) % _NUM_STAGING
        staging.numpy()[: len(keys)] = numbers
        _count_kernel[(self._state.num_layers, len(keys))](
            self._state.routed,
            staging[: len(keys)].to(self._counts.device, non_blocking=True),
            self._counts,
            self._hits,
            self._state.num_layers,
            self._state.num_experts,
            top_k=self._top_k,
            ids_at_once=triton.next_power_of_2(self._top_k),
            num_warps=1,
        )

    def drain(self) -> dict[str, KeyUses]:
        """Uses by key, up to some drain before; waits for nothing unless the device is idle."""
        found = self._collect()
        if self._copying is None and self._numbers:
            self._start()
            # Not on top of what was found: a key may be in both, and what is started now comes with the next drain.
            if not found and (not self._is_cuda or torch.cuda.current_stream().query()):
                found = self._collect()
        return found

    def reset(self) -> None:
        """Forget everything, in stream order."""
        self._counts.zero_()
        self._hits.zero_()
        self._numbers, self._copying = {}, None

    def _number(self, key: str) -> int:
        number = self._numbers.setdefault(key, len(self._numbers))
        if number >= len(self._hits):
            del self._numbers[key]
            return NO_KEY
        return number

    def _start(self) -> None:
        """Copy and zero in one go, between two steps."""
        num_keys = len(self._numbers)
        self._host_counts[:num_keys].copy_(self._counts[:num_keys], non_blocking=True)
        self._host_hits[:num_keys].copy_(self._hits[:num_keys], non_blocking=True)
        self._counts[:num_keys].zero_()
        self._hits[:num_keys].zero_()
        event = None
        if self._is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._copying = (list(self._numbers), event)
        self._numbers = {}

    def _collect(self) -> dict[str, KeyUses]:
        if self._copying is None or (self._copying[1] is not None and not self._copying[1].query()):
            return {}
        keys, self._copying = self._copying[0], None
        counts, hits = self._host_counts.numpy(), self._host_hits.tolist()
        return {key: KeyUses(counts[number].copy(), hits[number]) for number, key in enumerate(keys)}
