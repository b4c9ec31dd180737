"""Device tensors of the pager: tables, lists and sums of every layer, at addresses that a graph may capture."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch

from wisp_core.errors import ConfigurationError
from wisp_core.pager.device.reference import NO_SLOT, LayerTable, StepCounts

MAX_EXPERTS = 512
"""The plan kernel holds one layer's table in the registers of one program."""

HEADER_WIDTH = 8
COUNTS_WIDTH = 8
MAX_ROUTED = 1024
"""Routed ids of a step that are kept for whoever counts who uses what: those of its first rows."""

ROUTED_MISS = 1024
"""Added to a kept id whose expert was in no slot."""

READY = 1 << 20
"""`LayerState.ready` once what the first product reads has come; below it, the number of programs that are done."""

_READY_WIDTH = 16  # one cache line per layer
_MIN_WIDTH = 16  # keeps the rows of every layer aligned alike, so that one compiled kernel serves them all


class Header(IntEnum):
    """Entries of `LayerState.header`."""

    CAP = 0
    NUM_RESIDENT = 1
    NUM_SEEN = 2
    NUM_MISSES = 3  # of the last step: entries of the lists; or moves of the last cap change
    NUM_COPIES = 4  # the first of them that have a target slot
    NUM_NEEDED = 5  # experts of the last decode step: the first of the stack


class Table(IntEnum):
    """Rows of `LayerState.table`."""

    POSITION = 0  # by expert: place in the recency stack
    STACK = 1  # by place: expert
    SLOT = 2  # by expert: slot, or NO_SLOT


class Lists(IntEnum):
    """Rows of `LayerState.lists`."""

    SOURCE = 0  # experts that the last step missed; or slots to move from
    TARGET = 1  # their slots, NO_SLOT for overflow; or slots to move to
    FREED = 2  # scratch of one step: slots that it frees


class FetchPath(IntEnum):
    """Rows of `LayerState.counts`: how a step gets its missing experts."""

    DECODE = 0  # into slots
    STREAMED = 1  # past the slots, which keep the decode steps' working set


@dataclass(frozen=True, slots=True)
class LayerState:
    """Views of one layer's part of `DeviceState`. Rows are ``width`` long: experts up to a power of two."""

    num_experts: int
    header: torch.Tensor  # int32 [HEADER_WIDTH], see Header
    table: torch.Tensor  # int32 [len(Table), width]
    lists: torch.Tensor  # int32 [len(Lists), width]
    arrivals: torch.Tensor  # int32 [width]: programs of the running plan that have read the table; else 0
    ready: torch.Tensor  # int32 [1 and more]: READY from when a step's first fetches are there until its products ran
    distances: torch.Tensor  # int64 [width + 2]: uses by stack position, first uses at num_experts
    counts: torch.Tensor  # int64 [len(FetchPath), COUNTS_WIDTH]: the fields of StepCounts in order
    routed: torch.Tensor  # int16 [MAX_ROUTED]: ids of the last step in order, + ROUTED_MISS if missing, -1 if padding

    def read(self) -> LayerTable:
        """A copy on the host, as the reference's type. Synchronizes: for tests and integrity checks."""
        header = self.header.tolist()
        position, stack, slots = self.table[:, : self.num_experts].tolist()
        assert all(stack[place] == expert for expert, place in enumerate(position))
        decode, streamed = (StepCounts(*row[: len(StepCounts.__slots__)]) for row in self.counts.tolist())
        table = LayerTable(self.num_experts, header[Header.CAP])
        table.stack = stack
        table.slot_of = {expert: slot for expert, slot in enumerate(slots) if slot != NO_SLOT}
        table.num_seen = header[Header.NUM_SEEN]
        table.distances = self.distances[: self.num_experts + 1].cpu().numpy().copy()
        table.decode, table.streamed = decode, streamed
        return table

    def read_list(self) -> list[tuple[int, int]]:
        """The last step's misses, or the last cap change's moves, as pairs. Synchronizes."""
        num_misses = int(self.header[Header.NUM_MISSES].item())
        sources, targets = self.lists[: Lists.FREED, :num_misses].tolist()
        return list(zip(sources, targets, strict=True))


class DeviceState:
    """State of all layers; every tensor keeps its address for life.

    Attributes:
        num_valid_rows: int32 [1], rows of the running step that are real tokens. Write it before each step whose
            batch may be padded; it starts out as "all".
    """

    def __init__(self, num_layers: int, num_experts: int, cap: int, device: torch.device | str) -> None:
        """Start with ``cap`` empty slots in each layer. Raises ConfigurationError for sizes out of range."""
        if not 0 < num_experts <= MAX_EXPERTS:
            raise ConfigurationError(f"the device pager serves 1..{MAX_EXPERTS} experts per layer, not {num_experts}")
        if not 0 < cap <= num_experts:
            raise ConfigurationError(f"cap must be in 1..{num_experts} (the number of experts), got {cap}")
        self.num_layers = num_layers
        self.num_experts = num_experts
        self.width = max(_MIN_WIDTH, 1 << (num_experts - 1).bit_length())
        self.header = torch.zeros(num_layers, HEADER_WIDTH, dtype=torch.int32, device=device)
        self.header[:, Header.CAP] = cap
        # Columns beyond the experts stand for themselves, behind everyone, and are never needed.
        self.table = torch.arange(self.width, dtype=torch.int32, device=device).repeat(num_layers, len(Table), 1)
        self.table[:, Table.SLOT] = NO_SLOT
        self.lists = torch.zeros(num_layers, len(Lists), self.width, dtype=torch.int32, device=device)
        self.arrivals = torch.zeros(num_layers, self.width, dtype=torch.int32, device=device)
        self.ready = torch.zeros(num_layers, _READY_WIDTH, dtype=torch.int32, device=device)
        self.distances = torch.zeros(num_layers, self.width + 2, dtype=torch.int64, device=device)
        self.counts = torch.zeros(num_layers, len(FetchPath), COUNTS_WIDTH, dtype=torch.int64, device=device)
        self.routed = torch.full((num_layers, MAX_ROUTED), -1, dtype=torch.int16, device=device)
        self.new_cap = torch.full((1,), cap, dtype=torch.int32, device=device)
        self.num_valid_rows = torch.full((1,), np.iinfo(np.int32).max, dtype=torch.int32, device=device)

    def layer(self, index: int) -> LayerState:
        """Views of one layer."""
        return LayerState(
            self.num_experts,
            self.header[index],
            self.table[index],
            self.lists[index],
            self.arrivals[index],
            self.ready[index],
            self.distances[index],
            self.counts[index],
            self.routed[index],
        )

    def reset_statistics(self) -> None:
        """Zero counts and distances, in stream order; residency and its order stay."""
        self.distances.zero_()
        self.counts.zero_()
