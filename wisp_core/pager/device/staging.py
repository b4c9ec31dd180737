"""Streams experts that are in no slot through a few buffers, a group at a time, while the device computes others.

A forward of many rows needs nearly every expert of every layer once. Which ones are in slots does not change while it
runs, so all its copies are known when it starts: they are made by the copy engine, one after another and ahead of the
computation, also across layers, so that the link never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from wisp_core.errors import ConfigurationError
from wisp_core.pager.host_store import HostStore

NUM_BUFFERS = 3
"""One is read, one is filled, one covers the time in between."""

ELSEWHERE = -1
"""Entry of an expert map for an expert of another group."""

_LINK_COPIES = 4  # the first is slower

W13, W2 = "w13_weight", "w2_weight"


@dataclass(frozen=True, slots=True)
class Group:
    """Experts that lie together: in the slots, or in one staging buffer at a time."""

    expert_map: torch.Tensor  # int32 [2 E] by slot id: row of the tensors below, or ELSEWHERE
    w13: Callable[[], torch.Tensor]  # [rows, 2 I, H]; called just before its product, which then waits for the copy
    w2: Callable[[], torch.Tensor]  # [rows, H, I], likewise
    done: Callable[[], None]  # called after each product


@dataclass(frozen=True, slots=True)
class _Transfer:
    layer: int
    parameter: str
    experts: list[int]


class Staging:
    """Buffers, and the copies of the running forward. Everything is called in the order of the forward."""

    def __init__(self, stores: Sequence[HostStore], num_bytes: int, device: torch.device) -> None:
        """Allocate ``num_bytes``. Raises ConfigurationError when that is less than `NUM_BUFFERS` experts."""
        self._stores = stores
        self._device = device
        self._num_experts = stores[0].num_experts
        largest_bytes = max(shape.expert_bytes for shape in stores[0].shapes.values())
        self.group_size = min(num_bytes // NUM_BUFFERS // largest_bytes, self._num_experts)
        if self.group_size == 0:
            raise ConfigurationError(
                f"additional_config.wisp.staging_bytes is {num_bytes}: {NUM_BUFFERS} buffers for one expert of "
                f"{largest_bytes} bytes each need {NUM_BUFFERS * largest_bytes}"
            )
        size = (NUM_BUFFERS, self.group_size * largest_bytes)
        self._buffers = torch.empty(size, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self._ready = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        self._free = [torch.cuda.Event() for _ in range(NUM_BUFFERS)]
        self._transfers: list[_Transfer] = []
        self._num_issued = 0
        self._num_taken = 0
        slots = torch.arange(2 * self._num_experts, dtype=torch.int32, device=device)
        self.slot_map = slots.masked_fill(slots >= self._num_experts, ELSEWHERE)  # of the group in the slots
        self._maps = self.slot_map.new_empty(0)
        self._first_map: list[int] = []

    @property
    def num_bytes(self) -> int:
        """Device memory that the buffers take."""
        return int(self._buffers.nbytes)

    def measure_link(self) -> float:
        """Bytes per second of the fastest of a few page-locked copies as large as all buffers. Waits for the device."""
        host = self._stores[0].tensor(W13).view(torch.uint8).view(-1)
        target = self._buffers.view(-1)[: host.numel()]
        source = host[: target.numel()]
        seconds = []
        for _ in range(_LINK_COPIES):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            stop.record()
            stop.synchronize()
            seconds.append(start.elapsed_time(stop) / 1e3)
        return float(source.numel() / min(seconds))

    def begin(self, is_resident: npt.NDArray[np.bool_]) -> int:
        """Plan the copies of one forward.

        Args:
            is_resident: [layers, E], valid until the forward's last layer.

        Returns:
            How many experts of a layer it copies, summed over layers.
        """
        missing = [np.flatnonzero(~of_layer).tolist() for of_layer in is_resident]
        chunks = [[m[i : i + self.group_size] for i in range(0, len(m), self.group_size)] for m in missing]
        self._transfers = [
            _Transfer(layer, parameter, experts)
            for layer, of_layer in enumerate(chunks)
            for parameter in (W13, W2)
            for experts in of_layer
        ]
        self._first_map = np.cumsum([0, *map(len, chunks)]).tolist()
        self._send_maps([experts for of_layer in chunks for experts in of_layer])
        self._num_issued = self._num_taken = 0
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # buffers of the forward before
        return sum(map(len, missing))

    def groups(self, layer: int) -> list[Group]:
        """The groups of one layer's experts that are in no slot."""
        maps = self._maps[self._first_map[layer] : self._first_map[layer + 1]]
        return [Group(expert_map, self._take, self._take, self._done) for expert_map in maps]

    def _send_maps(self, groups: list[list[int]]) -> None:
        maps = torch.full((len(groups), 2 * self._num_experts), ELSEWHERE, dtype=torch.int32, pin_memory=bool(groups))
        for row, experts in zip(maps.numpy(), groups, strict=True):
            row[self._num_experts + np.array(experts)] = np.arange(len(experts))
        self._maps = maps.to(self._device, non_blocking=True)

    def _take(self) -> torch.Tensor:
        """The next transfer's experts, in the order of `begin`; what is computed next waits for them."""
        # The buffer of a transfer is free once the one NUM_BUFFERS before it is done, which is so up to here.
        last = min(self._num_taken + NUM_BUFFERS, len(self._transfers))
        for index in range(self._num_issued, last):
            self._issue(index)
        self._num_issued = max(self._num_issued, last)
        buffer = self._num_taken % NUM_BUFFERS
        torch.cuda.current_stream(self._device).wait_event(self._ready[buffer])
        return self._view(self._num_taken)

    def _done(self) -> None:
        self._free[self._num_taken % NUM_BUFFERS].record(torch.cuda.current_stream(self._device))
        self._num_taken += 1

    def _issue(self, index: int) -> None:
        transfer = self._transfers[index]
        buffer = index % NUM_BUFFERS
        if index >= NUM_BUFFERS:
            self._stream.wait_event(self._free[buffer])
        host, target = self._stores[transfer.layer].tensor(transfer.parameter), self._view(index)
        with torch.cuda.stream(self._stream):
            for first, start, stop in _runs(transfer.experts):
                target[first : first + stop - start].copy_(host[start:stop], non_blocking=True)
            self._ready[buffer].record(self._stream)

    def _view(self, index: int) -> torch.Tensor:
        transfer = self._transfers[index]
        host = self._stores[transfer.layer].tensor(transfer.parameter)
        flat = self._buffers[index % NUM_BUFFERS].view(host.dtype)
        return flat[: self.group_size * host[0].numel()].view(self.group_size, *host.shape[1:])


def experts_in_no_slot(slot_ids: torch.Tensor, num_experts: int) -> list[int]:
    """Experts that a plan has marked as ``num_experts + expert``, ascending. Waits for the device."""
    marked = np.unique(slot_ids.cpu().numpy())
    experts: list[int] = (marked[marked >= num_experts] - num_experts).tolist()
    return experts


def _runs(experts: list[int]) -> list[tuple[int, int, int]]:
    """``(position, first expert, last expert + 1)`` of each run of consecutive experts."""
    runs: list[tuple[int, int, int]] = []
    for position, expert in enumerate(experts):
        if runs and runs[-1][2] == expert:
            runs[-1] = (runs[-1][0], runs[-1][1], expert + 1)
        else:
            runs.append((position, expert, expert + 1))
    return runs
