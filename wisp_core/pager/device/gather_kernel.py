"""Gather: copies the experts that a plan lists, all parameters of a layer, driven by the device's own count.

A few programs read page-locked host memory through its unified address and write the slots; nothing is launched per
expert, so the same captured launch copies any number of them. The plan kernel copies what it has just listed; a kernel
of its own copies what may come later, and moves slots onto slots.

Reads by programs have a ceiling of their own: 51.3 GB/s on an H200 whose copy engine reaches 55.4. 8 programs reach it,
and neither load hints, bulk copies through shared memory, another fetch granularity of the L2 cache, huge pages nor
write-combined memory raise it (all tried).
Host rows must start on 128 bytes for that: at 64, as malloc and torch place them, it is 49.3 GB/s.
"""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import triton
import triton.language as tl

from wisp_core.pager.device.launch import chained
from wisp_core.pager.device.state import Header, LayerState, Lists

VECTOR_BYTES = 16
"""Width of one access; parameters that are not aligned to it are copied byte by byte (small scales)."""

_BYTEWISE_CHUNK_BYTES = 1 << 10
_NOTHING_TO_COPY = {"unit": tl.int32, "chunk_units": 16, "vector_units": 1, "vector_bytes": 4}


class _Column(IntEnum):
    """Columns of the parameter table, int64."""

    SOURCE = 0  # address of source row 0
    SOURCE_STRIDE = 1  # bytes between source rows
    TARGET = 2
    TARGET_STRIDE = 3
    NUM_UNITS = 4  # units (words or bytes) of one row
    FIRST_CHUNK = 5  # chunks of one expert that belong to earlier parameters


_SOURCE = tl.constexpr(int(_Column.SOURCE))
_SOURCE_STRIDE = tl.constexpr(int(_Column.SOURCE_STRIDE))
_TARGET = tl.constexpr(int(_Column.TARGET))
_TARGET_STRIDE = tl.constexpr(int(_Column.TARGET_STRIDE))
_NUM_UNITS = tl.constexpr(int(_Column.NUM_UNITS))
_FIRST_CHUNK = tl.constexpr(int(_Column.FIRST_CHUNK))
_WIDTH = tl.constexpr(len(_Column))
_NUM_COPIES = tl.constexpr(int(Header.NUM_COPIES))
_SOURCE_ROW = tl.constexpr(int(Lists.SOURCE))
_TARGET_ROW = tl.constexpr(int(Lists.TARGET))


@triton.jit
def copy_listed(
    parameters_ptr,  # int64 [num_parameters, _WIDTH]
    lists_ptr,
    num_copies,
    chunks_per_expert,
    num_parameters: tl.constexpr,
    width: tl.constexpr,
    unit: tl.constexpr,
    chunk_units: tl.constexpr,
    vector_units: tl.constexpr,
    vector_bytes: tl.constexpr,
):
    """This program's share of the first ``num_copies`` entries of the lists."""
    num_chunks = num_copies * chunks_per_expert
    for work in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        copy = work // chunks_per_expert
        chunk = work - copy * chunks_per_expert
        source_row = tl.load(lists_ptr + _SOURCE_ROW * width + copy).to(tl.int64)
        target_row = tl.load(lists_ptr + _TARGET_ROW * width + copy).to(tl.int64)
        parameter_ptr = parameters_ptr
        for later in tl.static_range(1, num_parameters):
            if chunk >= tl.load(parameters_ptr + later * _WIDTH + _FIRST_CHUNK):
                parameter_ptr = parameters_ptr + later * _WIDTH
        source = tl.load(parameter_ptr + _SOURCE) + source_row * tl.load(parameter_ptr + _SOURCE_STRIDE)
        target = tl.load(parameter_ptr + _TARGET) + target_row * tl.load(parameter_ptr + _TARGET_STRIDE)
        num_units = tl.multiple_of(tl.load(parameter_ptr + _NUM_UNITS).to(tl.int32), vector_units)
        first = (chunk - tl.load(parameter_ptr + _FIRST_CHUNK).to(tl.int32)) * chunk_units
        at = first + tl.arange(0, chunk_units)
        source_ptr = tl.multiple_of(source.to(tl.pointer_type(unit)), vector_bytes)
        target_ptr = tl.multiple_of(target.to(tl.pointer_type(unit)), vector_bytes)
        units = tl.load(source_ptr + at, mask=at < num_units, eviction_policy="evict_first")
        tl.store(target_ptr + at, units, mask=at < num_units)


@triton.jit(do_not_specialize=["chunks_per_expert"])
def _gather_kernel(
    parameters_ptr,
    header_ptr,
    lists_ptr,
    chunks_per_expert,
    num_parameters: tl.constexpr,
    width: tl.constexpr,
    unit: tl.constexpr,
    chunk_units: tl.constexpr,
    vector_units: tl.constexpr,
    vector_bytes: tl.constexpr,
    is_chained: tl.constexpr,
):
    if is_chained:
        tl.extra.cuda.gdc_wait()  # for the plan
    copy_listed(
        parameters_ptr,
        lists_ptr,
        tl.load(header_ptr + _NUM_COPIES),
        chunks_per_expert,
        num_parameters,
        width,
        unit,
        chunk_units,
        vector_units,
        vector_bytes,
    )


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters that are copied with one unit."""

    table: torch.Tensor  # int64 [num_parameters, len(_Column)], on the device
    chunks_per_expert: int
    unit: tl.dtype
    unit_bytes: int
    vector_bytes: int  # what addresses and sizes are known to be multiples of
    chunk_bytes: int

    @property
    def constants(self) -> dict[str, Any]:
        """What `copy_listed` is compiled for, besides the number of parameters."""
        return {
            "unit": self.unit,
            "chunk_units": self.chunk_bytes // self.unit_bytes,
            "vector_units": self.vector_bytes // self.unit_bytes,
            "vector_bytes": self.vector_bytes,
        }


class Gather:
    """Copies listed rows of every parameter of one layer: host experts into slots, or slots onto slots."""

    def __init__(
        self,
        sources: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        device: torch.device | str,
        *,
        chunk_bytes: int = 32 << 10,
        num_programs: int = 8,
        num_warps: int = 8,
    ) -> None:
        """Prepare copies of row ``s`` of each source onto row ``t`` of its target.

        Args:
            sources: [rows, ...], each row contiguous; host tensors must be page-locked (`cudaHostRegister` keeps their
                address, which the kernel reads).
            targets: on ``device``, as many, with equal rows.
            device: where the kernel runs.
            chunk_bytes: what one program copies at a time, a power of two.
            num_programs: how many programs run at once. The link needs 8, moves on the device more; each costs a step
                that misses nothing 0.03 us per layer (measured with 8, 16 and 32).
            num_warps: warps of each program.

        Raises:
            ValueError: a row is not contiguous or source and target differ.
        """
        self._keep_alive = (tuple(sources), tuple(targets))
        self.num_programs, self._num_warps = num_programs, num_warps
        self.row_bytes = sum(_row_bytes(source) for source in sources)
        pairs = list(zip(sources, targets, strict=True))
        words = _tabulate([p for p in pairs if _is_aligned(*p)], tl.int32, 4, VECTOR_BYTES, chunk_bytes, device)
        single = _tabulate([p for p in pairs if not _is_aligned(*p)], tl.int8, 1, 1, _BYTEWISE_CHUNK_BYTES, device)
        self._launches = [parameters for parameters in (words, single) if len(parameters.table)]

    @property
    def is_led(self) -> bool:
        """Whether a plan kernel may copy everything itself."""
        return len(self._launches) <= 1

    def is_like(self, other: Gather) -> bool:
        """Whether one kernel can copy what both have to lead with."""
        ours, theirs = self.leading, other.leading
        return ours is None or theirs is None or ours.constants == theirs.constants

    @property
    def leading(self) -> Parameters | None:
        """The parameters that a plan kernel may copy itself; None when there are none at all."""
        return self._launches[0] if self._launches else None

    def run(self, layer: LayerState, *, is_leading_done: bool = False, is_first: bool = False) -> None:
        """Carry out ``layer``'s list on the current stream; a graph may capture it.

        Args:
            layer: whose list it is.
            is_leading_done: the plan kernel has copied `leading`.
            is_first: the stream has no kernel to be chained to, as after waiting for another stream.
        """
        for parameters in self._launches[is_leading_done:]:
            _gather_kernel[(self.num_programs,)](
                parameters.table,
                layer.header,
                layer.lists,
                parameters.chunks_per_expert,
                num_parameters=len(parameters.table),
                width=layer.lists.shape[1],
                num_warps=self._num_warps,
                **parameters.constants,
                **({"is_chained": False} if is_first else chained(layer.header)),
            )


def leading_arguments(first: Gather | None, second: Gather | None, *, unused: torch.Tensor) -> dict[str, Any]:
    """What a plan kernel is told of the parameters that it copies itself; ``unused`` stands for a missing table."""
    arguments: dict[str, Any] = {}
    constants: dict[str, Any] = _NOTHING_TO_COPY
    for name, gather in (("first", first), ("second", second)):
        leading = gather.leading if gather is not None else None
        arguments[f"{name}_ptr"] = leading.table if leading is not None else unused
        arguments[f"{name}_chunks"] = leading.chunks_per_expert if leading is not None else 0
        arguments[f"num_{name}"] = len(leading.table) if leading is not None else 0
        if leading is not None:
            constants = leading.constants
    return arguments | constants


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(tensor[0].numel() * tensor.element_size())


def _is_aligned(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether every row of both starts and ends on a vector's boundary."""
    numbers = [_row_bytes(source)]
    for tensor in (source, target):
        if not tensor[0].is_contiguous():
            raise ValueError(f"rows must be contiguous, got shape {tuple(tensor.shape)}, strides {tensor.stride()}")
        numbers += [tensor.data_ptr(), tensor.stride(0) * tensor.element_size()]
    if _row_bytes(source) != _row_bytes(target):
        raise ValueError(f"a source row has {_row_bytes(source)} bytes, its target row {_row_bytes(target)}")
    return all(number % VECTOR_BYTES == 0 for number in numbers)


def _tabulate(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    unit: tl.dtype,
    unit_bytes: int,
    vector_bytes: int,
    chunk_bytes: int,
    device: torch.device | str,
) -> Parameters:
    rows = []
    num_chunks = 0
    for source, target in pairs:
        row_bytes = _row_bytes(source)
        addresses = [n for t in (source, target) for n in (t.data_ptr(), t.stride(0) * t.element_size())]
        rows.append([*addresses, row_bytes // unit_bytes, num_chunks])
        num_chunks += -(-row_bytes // chunk_bytes)
    table = torch.tensor(rows, dtype=torch.int64, device=device)
    return Parameters(table, num_chunks, unit, unit_bytes, vector_bytes, chunk_bytes)
