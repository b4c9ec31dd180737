"""vLLM's matrix kernel for experts, launched while the kernel before it ends: its body, tiles and order are unchanged.

A product needs the plan's decision and, for what was missed, the weights that the plan's kernel copies. The first one
is launched beside that kernel and waits for `LayerState.ready`, so it computes while the second one's weights come; the
second waits for the kernel before it, as any kernel does, but is set up by then.
"""

# Kernels are Triton's language, not Python's:
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
import triton
import triton.language as tl
from vllm.model_executor.layers.fused_moe.fused_moe import fused_moe_kernel

from wisp_core.pager.device.launch import chained
from wisp_core.pager.device.state import READY

_READY = tl.constexpr(READY)
COMPUTE_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class Waits(Enum):
    """What a product waits for before it reads anything."""

    READY = "ready"  # the plan's mark; the rest of the plan's kernel runs on
    KERNEL = "kernel"  # the end of the kernel before it


@triton.jit
def _product_kernel(
    ready_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    row_weights_ptr,
    row_ids_ptr,
    expert_rows_ptr,
    num_padded_ptr,
    num_columns,
    num_inner,
    max_padded,
    num_ids,
    stride_am,
    stride_ak,
    stride_be,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    waits_for_ready: tl.constexpr,
    takes_mark_back: tl.constexpr,
    is_chained: tl.constexpr,
    is_weighted: tl.constexpr,
    has_blocks: tl.constexpr,
    top_k: tl.constexpr,
    compute_type: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
):
    if waits_for_ready:
        ready = tl.atomic_add(ready_ptr, 0, sem="acquire")
        while ready != _READY:
            ready = tl.atomic_add(ready_ptr, 0, sem="acquire")
    elif is_chained:
        tl.extra.cuda.gdc_wait()
    if takes_mark_back:  # noqa: SIM102 - one is known when compiled
        if tl.program_id(0) == 0:
            tl.store(ready_ptr, 0)
    fused_moe_kernel(
        a_ptr,
        b_ptr,
        c_ptr,
        None,
        None,
        None,
        row_weights_ptr,
        row_ids_ptr,
        expert_rows_ptr,
        num_padded_ptr,
        num_columns,
        num_inner,
        max_padded,
        num_ids,
        stride_am,
        stride_ak,
        stride_be,
        stride_bk,
        stride_bn,
        stride_cm,
        stride_cn,
        stride_asm=0,
        stride_ask=0,
        stride_bse=0,
        stride_bsk=0,
        stride_bsn=0,
        stride_bbe=0,
        stride_bbn=0,
        group_n=0,
        group_k=0,
        naive_block_assignment=not has_blocks,
        BLOCK_SIZE_M=block_m,
        BLOCK_SIZE_N=block_n,
        BLOCK_SIZE_K=block_k,
        GROUP_SIZE_M=group_m,
        SPLIT_K=1,
        MUL_ROUTED_WEIGHT=is_weighted,
        top_k=top_k,
        compute_type=compute_type,
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        per_channel_quant=False,
        HAS_BIAS=False,
        SWAP_AB=False,
        USE_TD=False,
    )
    if waits_for_ready and is_chained:  # noqa: SIM102
        # What comes after this kernel may take the plan's for done.
        if tl.program_id(0) == tl.num_programs(0) - 1:
            tl.extra.cuda.gdc_wait()


def launch_product(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    row_weights: torch.Tensor | None,
    row_ids: torch.Tensor | None,
    expert_rows: torch.Tensor,
    num_padded: torch.Tensor,
    *,
    top_k: int,
    config: dict[str, Any],
    ready: torch.Tensor,
    waits_for: Waits,
    takes_mark_back: bool,
) -> None:
    """Multiply rows by their experts, as vLLM's ``invoke_fused_moe_triton_kernel`` does for weights without scales.

    Args:
        a: [rows, K].
        b: weights [E, N, K], of which row numbers may lie outside.
        c: [rows, top_k, N], the result.
        row_weights: float32 [rows, top_k], multiplied in; None: not.
        row_ids: int32 [blocks * BLOCK_SIZE_M], see `wisp_core.pager.device.blocks`; None: each block is one routed id.
        expert_rows: int32 [blocks], rows of ``b``.
        num_padded: int32 [1], BLOCK_SIZE_M times the blocks in use.
        top_k: results of one row of ``a``.
        config: vLLM's, for the kernel.
        ready: `LayerState.ready`.
        waits_for: READY right after the plan's kernel, else KERNEL.
        takes_mark_back: let the next step begin with no mark; in the last product of the step.
    """
    block_m, block_n = config["BLOCK_SIZE_M"], config["BLOCK_SIZE_N"]
    num_ids = len(a) * top_k
    max_padded = num_ids * block_m
    _product_kernel[(triton.cdiv(max_padded, block_m) * triton.cdiv(b.shape[1], block_n),)](
        ready,
        a,
        b,
        c,
        row_weights,
        row_ids,
        expert_rows,
        num_padded,
        b.shape[1],
        b.shape[2],
        max_padded,
        num_ids,
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(2),
        b.stride(1),
        c.stride(1),
        c.stride(2),
        waits_for_ready=waits_for is Waits.READY,
        takes_mark_back=takes_mark_back,
        is_weighted=row_weights is not None,
        has_blocks=row_ids is not None,
        top_k=top_k,
        compute_type=COMPUTE_TYPES[a.dtype],
        block_m=block_m,
        block_n=block_n,
        block_k=config["BLOCK_SIZE_K"],
        group_m=config["GROUP_SIZE_M"],
        **{key: config[key] for key in ("num_warps", "num_stages") if key in config},
        **chained(ready),
    )
