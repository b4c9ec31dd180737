"""The two products beside a plan's copies equal vLLM's own on all experts, byte for byte: needs a GPU and its vLLM."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.triton_utils import tl

from wisp_core.pager.device.blocks import Blocks
from wisp_core.pager.device.gather_kernel import Gather
from wisp_core.pager.device.plan_kernel import plan_step
from wisp_core.pager.device.products import Waits, launch_product
from wisp_core.pager.device.reference import LayerTable
from wisp_core.pager.device.state import DeviceState

DEVICE = "cuda"
NUM_EXPERTS, TOP_K, HIDDEN, INNER = 32, 4, 256, 128
CONFIG = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}


class Layer:
    """One layer's experts in host memory and in slots, and what vLLM makes of all of them on the device."""

    def __init__(self, rows: int, cap: int) -> None:
        generator = torch.Generator().manual_seed(rows)
        shapes = [(NUM_EXPERTS, 2 * INNER, HIDDEN), (NUM_EXPERTS, HIDDEN, INNER)]
        weights = [torch.randn(shape, generator=generator, dtype=torch.bfloat16) / 16 for shape in shapes]
        self.host = [weight.pin_memory() for weight in weights]
        self.full = [weight.to(DEVICE) for weight in weights]
        self.slots = [torch.full_like(weight, float("nan")) for weight in self.full]
        self.gathers = [Gather([h], [s], DEVICE) for h, s in zip(self.host, self.slots, strict=True)]
        self.state = DeviceState(1, NUM_EXPERTS, cap, DEVICE)
        self.x = torch.randn(rows, HIDDEN, generator=generator, dtype=torch.bfloat16).to(DEVICE)
        self.weights = torch.rand(rows, TOP_K, generator=generator).to(DEVICE)
        self.topk_ids = torch.zeros(rows, TOP_K, dtype=torch.int32, device=DEVICE)

    def expected(self) -> torch.Tensor:
        row_ids, expert_ids, num_padded = moe_align_block_size(self.topk_ids, CONFIG["BLOCK_SIZE_M"], NUM_EXPERTS)
        first, inner, second = self._buffers()
        arguments = (row_ids, expert_ids, num_padded)
        self._invoke(self.x, self.full[0], first, None, *arguments, TOP_K)
        torch.mul(first[..., :INNER].reshape(inner.shape), first[..., INNER:].reshape(inner.shape), out=inner)
        self._invoke(inner, self.full[1], second, self.weights, *arguments, 1)
        return second

    def paged(self, waits_for: Waits, has_blocks: bool) -> torch.Tensor:
        layer = self.state.layer(0)
        first, inner, second = self._buffers()
        blocks = Blocks.empty(self.topk_ids, CONFIG["BLOCK_SIZE_M"], None) if has_blocks else None
        slot_ids = torch.empty_like(self.topk_ids)
        plan_step(
            layer,
            self.topk_ids,
            slot_ids,
            self.state.num_valid_rows,
            gather=self.gathers[0],
            gather_after=self.gathers[1],
            blocks=blocks,
            is_marking=True,
        )
        if blocks is not None:
            row_ids, rows, num_padded = blocks.row_ids, (blocks.w13_rows, blocks.w2_rows), blocks.num_padded
        else:
            all_padded = slot_ids.numel() * CONFIG["BLOCK_SIZE_M"]
            row_ids, rows = None, (slot_ids.view(-1), slot_ids.view(-1))
            num_padded = torch.full((1,), all_padded, dtype=torch.int32, device=DEVICE)
            waits_for = Waits.KERNEL  # the fill came in between
        common = {"config": CONFIG, "ready": layer.ready}
        launch_product(
            self.x,
            self.slots[0],
            first,
            None,
            row_ids,
            rows[0],
            num_padded,
            top_k=TOP_K,
            waits_for=waits_for,
            takes_mark_back=False,
            **common,
        )
        torch.mul(first[..., :INNER].reshape(inner.shape), first[..., INNER:].reshape(inner.shape), out=inner)
        launch_product(
            inner,
            self.slots[1],
            second,
            self.weights,
            row_ids,
            rows[1],
            num_padded,
            top_k=1,
            waits_for=Waits.KERNEL,
            takes_mark_back=True,
            **common,
        )
        return second

    def _buffers(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = len(self.x)
        return (
            torch.full((rows, TOP_K, 2 * INNER), float("nan"), dtype=torch.bfloat16, device=DEVICE),
            torch.full((rows * TOP_K, INNER), float("nan"), dtype=torch.bfloat16, device=DEVICE),
            torch.full((rows, TOP_K, HIDDEN), float("nan"), dtype=torch.bfloat16, device=DEVICE),
        )

    def _invoke(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        weights: torch.Tensor | None,
        row_ids: torch.Tensor,
        expert_ids: torch.Tensor,
        num_padded: torch.Tensor,
        top_k: int,
    ) -> None:
        invoke_fused_moe_triton_kernel(
            a,
            b,
            c,
            None,
            None,
            weights,
            row_ids,
            expert_ids,
            num_padded,
            weights is not None,
            top_k,
            CONFIG,
            compute_type=tl.bfloat16,
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
        )


@pytest.mark.parametrize("rows", [1, 3, 8, 16])
@pytest.mark.parametrize("waits_for", list(Waits))
@pytest.mark.parametrize("has_blocks", [True, False])
def test_products_beside_the_copies_equal_vllms_on_all_experts(rows: int, waits_for: Waits, has_blocks: bool) -> None:
    """Every step runs twice, eagerly and from a graph that was captured once."""
    cap = min(NUM_EXPERTS, rows * TOP_K)
    layer, table = Layer(rows, cap), LayerTable(NUM_EXPERTS, cap)
    rng = np.random.default_rng(rows)
    layer.paged(waits_for, has_blocks)
    table.plan(layer.topk_ids.cpu().numpy())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.paged(waits_for, has_blocks)
    for step in range(20):
        ids = np.argsort(rng.random((rows, NUM_EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
        layer.topk_ids.copy_(torch.from_numpy(ids))
        if step % 2:
            graph.replay()
            result = captured
        else:
            result = layer.paged(waits_for, has_blocks)
        assert torch.equal(result, layer.expected())
        table.plan(ids)
        assert layer.state.layer(0).read().slot_of == table.slot_of
        assert int(layer.state.ready[0, 0]) == 0, "the mark was not taken back"
