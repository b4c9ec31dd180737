"""Runs experts at every size of a step before an engine serves, so that no step waits for a compiler.

Triton compiles a kernel when it is first launched with other constants, and which constants those are follows from the
number of rows: vLLM's tables give the products other tiles, the pager goes another way. vLLM's own warm-up runs a few
small steps. Layers are alike, so one of them stands for all.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.forward_context import set_forward_context

MOST_ROWS_ONE_BY_ONE = 128
"""Steps of so few rows may each go a way of their own; larger ones differ by their tiles only."""


def row_counts(most: int) -> list[int]:
    """Numbers of rows, ascending, that between them launch all that any number up to ``most`` does.

    Beyond `MOST_ROWS_ONE_BY_ONE` vLLM's tables name powers of two and the middles between them, and a number of rows
    takes the nearest. Where vLLM's own kernel runs, it is compiled once more for most odd numbers.
    """
    powers = [2**exponent for exponent in range(most.bit_length())]
    named = {rows + odd for power in powers for rows in (power, power * 3 // 2) for odd in (0, 1)}
    return sorted(rows for rows in {*range(1, MOST_ROWS_ONE_BY_ONE + 1), *named, most - 1, most} if 0 < rows <= most)


def run_experts(vllm_config: Any, rows: int, device: torch.device) -> torch.Tensor:
    """One forward of the first layer of experts, as the model's own: output [rows, H] of zeros routed to anybody."""
    model = vllm_config.model_config
    layer = next(
        layer
        for layer in vllm_config.compilation_config.static_forward_context.values()
        if hasattr(layer, "routed_experts")
    )
    num_experts = layer.moe_config.num_logical_experts
    hidden = torch.zeros(rows, model.get_hidden_size(), dtype=model.dtype, device=device)
    router_logits = torch.zeros(rows, num_experts, dtype=model.dtype, device=device)
    with torch.inference_mode(), set_forward_context(None, vllm_config, num_tokens=rows):
        output: torch.Tensor = layer(hidden, router_logits, input_ids=hidden.new_zeros(rows, dtype=torch.int32))
    return output
