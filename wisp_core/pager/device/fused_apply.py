"""vLLM's Triton experts, run on slots, on host memory in place, or group by group: the same kernels, tiles and order.

A row's result does not depend on where its expert lies or which other rows run with it, as long as the kernel and its
configuration are those of the whole batch; and the k results of a row are added once, at the end. So every way of
running here equals vLLM's own byte for byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.fused_moe import invoke_fused_moe_triton_kernel, try_get_optimal_moe_config
from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
from vllm.model_executor.layers.fused_moe.utils import _resize_cache
from vllm.v1.worker.workspace import current_workspace_manager

from wisp_core.pager.device.block_rows import HostRows, block_rows
from wisp_core.pager.device.blocks import DecodePlan
from wisp_core.pager.device.products import COMPUTE_TYPES, Waits, launch_product
from wisp_core.pager.device.staging import Group

_constants: dict[tuple[int, torch.device], torch.Tensor] = {}


def _constant(number: int, device: torch.device) -> torch.Tensor:
    """``number`` as int32 [1]. One for all steps saves a launch a layer, half of what planning costs."""
    found = _constants.get((number, device))
    if found is None:
        found = torch.full((1,), number, dtype=torch.int32, device=device)
        if not torch.cuda.is_current_stream_capturing():  # a graph's memory pool would use its memory again
            _constants[number, device] = found
    return found


@dataclass(frozen=True, slots=True)
class _Assignment:
    """Which rows of the batch each block of a product computes, as vLLM's kernel takes it."""

    sorted_row_ids: torch.Tensor | None  # None: each block is one (row, expert)
    expert_ids: torch.Tensor
    num_padded: torch.Tensor


class FusedExperts:
    """One forward of one layer's experts. Buffers come from vLLM's workspace, as for its own."""

    def __init__(self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> None:
        """Prepare for rows ``x`` [rows, H] of ``layer``, a RoutedExperts whose weights are slots [E, ...].

        Of ``topk_ids`` [rows, top_k] only the shape matters. Where slot ids [rows, top_k] are asked for below, they are
        int32: a slot, or ``E + expert`` for an expert in no slot.
        """
        self._layer, self._x, self._topk_weights = layer, x, topk_weights
        self._experts = layer.quant_method.moe_kernel.fused_experts
        w13, w2 = layer.w13_weight, layer.w2_weight
        self._num_experts, rows, n, h, self._top_k = self._experts.moe_problem_size(x, w13, w2, topk_ids)
        self._config = try_get_optimal_moe_config(
            w13.size(),
            w2.size(),
            self._top_k,
            self._experts.quant_config.config_name(x.dtype),
            rows,
            block_shape=self._experts.block_shape,
        )
        shapes = self._experts.workspace_shapes(
            rows, n, h, self._top_k, self._num_experts, self._num_experts, None, layer.activation
        )
        workspace_13, workspace_2, output = shapes
        self._workspace_13, self._workspace_2 = current_workspace_manager().get_simultaneous(
            ((max(prod(workspace_13), prod(output)),), x.dtype), (workspace_2, x.dtype)
        )
        # As in vLLM, the second product's results take the place of the first's.
        self._first = _resize_cache(self._workspace_2, (rows, self._top_k, n))
        inner = self._experts.adjust_N_for_activation(n, layer.activation)
        self._inner = _resize_cache(self._workspace_13, (rows * self._top_k, inner))
        self._second = _resize_cache(self._workspace_2, (rows, self._top_k, h))

    @property
    def rows_per_block(self) -> int:
        """Rows that one block of a product computes."""
        return int(self._config["BLOCK_SIZE_M"])

    def run_plan(self, plan: DecodePlan) -> torch.Tensor:
        """Run what the plan just launched says, beside its copies; a graph may capture it."""
        blocks, slot_ids = plan.blocks, plan.slot_ids.view(-1)
        if blocks is None:
            rows = (slot_ids, slot_ids)
            row_ids, num_padded = None, _constant(len(slot_ids) * self.rows_per_block, self._x.device)
        else:
            rows = (blocks.w13_rows, blocks.w2_rows)
            row_ids, num_padded = blocks.row_ids, blocks.num_padded
        launch_product(
            self._x,
            self._layer.w13_weight,
            self._first,
            None,
            row_ids,
            rows[0],
            num_padded,
            top_k=self._top_k,
            config=self._config,
            ready=plan.ready,
            waits_for=Waits.READY if plan.is_whole else Waits.KERNEL,
            takes_mark_back=False,
        )
        self._activate()
        launch_product(
            self._inner,
            self._layer.w2_weight,
            self._second,
            self._topk_weights,
            row_ids,
            rows[1],
            num_padded,
            top_k=1,
            config=self._config,
            ready=plan.ready,
            waits_for=Waits.KERNEL,
            takes_mark_back=True,
        )
        return self._sum()

    def run(self, slot_ids: torch.Tensor, host: HostRows | None) -> torch.Tensor:
        """Read resident experts from slots and the others from host memory; a graph may capture it.

        ``host`` says where the others lie; None: there are none.
        """
        assignment = self._assign_all(slot_ids, self._num_experts if host is None else 2 * self._num_experts)
        w13_rows = w2_rows = assignment.expert_ids
        if host is not None:
            w13_rows, w2_rows = block_rows(assignment.expert_ids, self._num_experts, host)
        self._product_1(self._layer.w13_weight, assignment, w13_rows)
        self._activate()
        self._product_2(self._layer.w2_weight, assignment, w2_rows)
        return self._sum()

    def run_in_groups(self, slot_ids: torch.Tensor, groups: list[Group]) -> torch.Tensor:
        """Run the groups one after another; together they hold every expert that a row needs."""
        assignments = [self._assign_group(slot_ids, group) for group in groups]
        for group, assignment in zip(groups, assignments, strict=True):
            self._product_1(group.w13(), assignment, assignment.expert_ids)
            group.done()
        self._activate()
        for group, assignment in zip(groups, assignments, strict=True):
            self._product_2(group.w2(), assignment, assignment.expert_ids)
            group.done()
        return self._sum()

    def _assign_all(self, slot_ids: torch.Tensor, num_ids_known: int) -> _Assignment:
        num_ids = slot_ids.numel()
        if num_ids * 4 <= self._num_experts:  # vLLM's rule for few rows
            num_padded = _constant(num_ids * self.rows_per_block, self._x.device)
            return _Assignment(None, slot_ids.view(-1), num_padded)
        return _Assignment(*moe_align_block_size(slot_ids, self.rows_per_block, num_ids_known))

    def _assign_group(self, slot_ids: torch.Tensor, group: Group) -> _Assignment:
        return _Assignment(
            *moe_align_block_size(
                slot_ids,
                self.rows_per_block,
                2 * self._num_experts,
                group.expert_map,
                ignore_invalid_experts=True,
            )
        )

    def _product_1(self, w13: torch.Tensor, assignment: _Assignment, rows: torch.Tensor) -> None:
        self._product(self._x, w13, self._first, None, assignment, rows, self._top_k)

    def _activate(self) -> None:
        self._experts.activation(self._layer.activation, self._inner, self._first.view(-1, self._first.shape[-1]))

    def _product_2(self, w2: torch.Tensor, assignment: _Assignment, rows: torch.Tensor) -> None:
        self._product(self._inner, w2, self._second, self._topk_weights, assignment, rows, 1)

    def _product(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        row_weights: torch.Tensor | None,
        assignment: _Assignment,
        expert_rows: torch.Tensor,
        top_k: int,
    ) -> None:
        invoke_fused_moe_triton_kernel(
            a,
            b,
            c,
            None,
            None,
            row_weights,
            assignment.sorted_row_ids,
            expert_rows,
            assignment.num_padded,
            row_weights is not None,
            top_k,
            self._config,
            compute_type=COMPUTE_TYPES[self._x.dtype],
            use_fp8_w8a8=False,
            use_int8_w8a8=False,
            use_int8_w8a16=False,
            use_int4_w4a16=False,
            per_channel_quant=False,
            block_shape=None,
        )

    def _sum(self) -> torch.Tensor:
        output = torch.empty_like(self._x)
        self._experts.moe_sum(self._second, output)
        return output
