"""Turns slot ids into row numbers that a matrix kernel can add to one address, in slots or in host memory.

A kernel reads expert row ``i`` at ``slots + i * stride``. Host row ``e`` lies at ``slots + (h + e) * stride`` if the
host tensor's distance ``h * stride`` from the slots is a whole number of rows, which `LayerSlots` arranges. So one
launch serves resident experts from slots and the others over the link, in place.
"""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from wisp_core.errors import UnsupportedModelError
from wisp_core.pager.device.launch import chained

_IDS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class HostRows:
    """Where the host's experts lie, in rows from slot 0: `first_host_row` of both parameters."""

    first_w13: int
    first_w2: int


@triton.jit(do_not_specialize=["num_ids", "first_w13", "first_w2"])
def _block_rows_kernel(
    ids_ptr,
    w13_rows_ptr,
    w2_rows_ptr,
    num_ids,
    first_w13,
    first_w2,
    num_experts: tl.constexpr,
    ids_at_once: tl.constexpr,
    is_chained: tl.constexpr,
):
    if is_chained:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * ids_at_once + tl.arange(0, ids_at_once)
    ids = tl.load(ids_ptr + at, mask=at < num_ids, other=0)
    is_elsewhere = ids >= num_experts
    expert = ids - num_experts
    tl.store(w13_rows_ptr + at, tl.where(is_elsewhere, first_w13 + expert, ids), mask=at < num_ids)
    tl.store(w2_rows_ptr + at, tl.where(is_elsewhere, first_w2 + expert, ids), mask=at < num_ids)


def first_host_row(host: torch.Tensor, slots: torch.Tensor) -> int:
    """Row number of host row 0, counted from slot 0.

    Raises UnsupportedModelError when the distance is not a whole number of rows or the number needs over 32 bits.
    """
    row_bytes = int(slots.stride(0) * slots.element_size())
    row, rest = divmod(int(host.data_ptr()) - int(slots.data_ptr()), row_bytes)
    limits = np.iinfo(np.int32)
    if rest or not limits.min < row < limits.max - len(host) or -len(host) <= row < len(slots):
        raise UnsupportedModelError(
            f"host row 0 lies {row} rows of {row_bytes} bytes and {rest} bytes from slot 0: one kernel cannot read both"
        )
    return row


def block_rows(ids: torch.Tensor, num_experts: int, host: HostRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers for the two products, on the current stream; a graph may capture it.

    Args:
        ids: int32, slots below ``num_experts``, ``num_experts + expert`` for experts that are in no slot.
        num_experts: E.
        host: where those are.
    """
    w13_rows, w2_rows = torch.empty_like(ids), torch.empty_like(ids)
    _block_rows_kernel[(triton.cdiv(ids.numel(), _IDS_AT_ONCE),)](
        ids,
        w13_rows,
        w2_rows,
        ids.numel(),
        host.first_w13,
        host.first_w2,
        num_experts=num_experts,
        ids_at_once=_IDS_AT_ONCE,
        **chained(ids),
    )
    return w13_rows, w2_rows
