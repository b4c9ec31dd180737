"""From a model's shape and a card to the costs of an engine that is not running yet.

The constants were fitted to ``loadtests/results/decode-h200.json`` (decode) and to prefills of the same model on the
same card. What they mean carries over to other cards: bytes over memory bandwidth, operations over arithmetic, and a
few fixed microseconds per layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from wisp_core.contracts import MemoryLayout, blocks_of
from wisp_core.errors import ConfigurationError
from wisp_core.memory.balloon import group_blocks_of
from wisp_core.memory.layout import experts_bytes_by_cap, kv_groups_beside
from wisp_core.planner.cards import Card
from wisp_core.planner.model_shape import ModelShape
from wisp_core.settings import EngineSettings
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.expert_curves import ExpertCurves

LAYER_S = 55e-6
"""Of a decode step per layer, beside reading weights: launches inside a graph, small kernels."""
MEMORY_SHARE = 0.77
"""Of the card's nominal memory bandwidth that reading weights reaches."""
PAGER_LAYER_S = 2.5e-6
"""Of a decode step per paged layer: planning what to copy."""
DECODE_STRETCH = 1.05
"""Time of a decode step's copies over their time at the link's full speed."""
PASS_STRETCH = 1.045
"""The same of a prefill pass, whose copies are large."""
IN_PLACE_TOKENS = 128
"""Passes of up to so many tokens read missing experts where they lie, as the pager does."""
IN_PLACE_STRETCH = 1.17
"""Time of those reads over the link's: 47 of 55 GB/s."""
EAGER_LAYER_S = 1e-3
"""Of a prefill pass per layer: launched kernel by kernel."""
FLOPS_SHARE = 0.3
"""Of the card's nominal arithmetic that a prefill reaches."""

CONTEXT_BYTES = 1 << 30
"""CUDA's context, libraries and captured graphs."""
ALLOCATOR_BYTES = 256 << 20
"""What torch's allocator holds beside the tensors themselves: its segments are never quite full."""


@dataclass(frozen=True, kw_only=True)
class EngineChoice:
    """vLLM's arguments and the settings that decide sizes."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    settings: EngineSettings = field(default_factory=EngineSettings)


def other_bytes(shape: ModelShape, choice: EngineChoice) -> int:
    """Bytes outside the pools on a GPU: dense weights, activations of the largest pass, staging, context.

    An upper estimate, in whole MiB: an engine that is told this number (``replica.other_bytes``) takes exactly it.
    Raises ConfigurationError when the settings tell it a smaller one.
    """
    settings = choice.settings
    tokens = choice.max_num_batched_tokens
    per_token = 12 * shape.hidden_size + shape.top_k * (3 * shape.moe_intermediate + 2 * shape.hidden_size)
    logits = max(choice.max_num_seqs, 1) * shape.vocab_size * 10  # 16-bit logits, then float32 copies to sample from
    activations = tokens * per_token * 2 + logits + ALLOCATOR_BYTES
    unseen = max(CONTEXT_BYTES, settings.activation_bytes)
    total = -(-(shape.dense_bytes + activations + settings.staging_bytes + unseen) // (1 << 20)) * (1 << 20)
    if settings.other_bytes is None:
        return total
    if settings.other_bytes < total:
        raise ConfigurationError(
            f"other_bytes is {settings.other_bytes}, and passes of {tokens} tokens may need {total} outside the pools"
        )
    return settings.other_bytes


def memory_layout(shape: ModelShape, choice: EngineChoice, *, pooled_bytes: int, page_bytes: int) -> MemoryLayout:
    """The layout that the engine reports, by the same arithmetic.

    Raises ConfigurationError, with the bytes that are missing, when the smallest cap and one longest request do not
    fit ``pooled_bytes``.
    """
    min_cap = choice.settings.min_cap or shape.top_k
    experts = experts_bytes_by_cap(
        shape.expert_parameter_bytes,
        num_layers=shape.num_moe_layers,
        num_experts=shape.num_experts,
        page_bytes=page_bytes,
    )
    per_layer = choice.block_size * shape.kv_token_layer_bytes
    block_bytes = per_layer * shape.num_layers
    # The engine's address range is whole groups of either layout of the cache; it lays layers out one by one.
    range_blocks = group_blocks_of([per_layer, block_bytes], page_bytes)
    groups = kv_groups_beside(experts[min_cap], pooled_bytes=pooled_bytes, group_bytes=range_blocks * block_bytes)
    num_blocks = groups * range_blocks
    needed = blocks_of(choice.max_model_len, choice.block_size) + 1
    if num_blocks < needed:
        needed_bytes = experts[min_cap] + -(-needed // range_blocks) * range_blocks * block_bytes
        raise ConfigurationError(
            f"{needed_bytes} bytes are needed for cap {min_cap} and one request of {choice.max_model_len} tokens, "
            f"{pooled_bytes} are left for both pools: {needed_bytes - pooled_bytes} more"
        )
    return MemoryLayout(
        page_bytes=page_bytes,
        num_layers=shape.num_moe_layers,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        min_cap=min_cap,
        experts_bytes_by_cap=experts,
        expert_bytes=shape.expert_bytes,
        block_tokens=choice.block_size,
        block_bytes=block_bytes,
        kv_group_blocks=group_blocks_of([per_layer], page_bytes),
        max_kv_blocks=num_blocks - 1,
        max_model_len=choice.max_model_len,
        max_num_seqs=choice.max_num_seqs,
        max_pass_tokens=choice.max_num_batched_tokens,
    )


def engine_model(
    shape: ModelShape,
    card: Card,
    choice: EngineChoice,
    curves: ExpertCurves,
    *,
    layout: MemoryLayout,
    pooled_bytes: int,
) -> EngineModel:
    """Costs of the engine on ``card``; see `EngineModel`."""
    read_bytes_per_s = card.memory_bytes_per_s * MEMORY_SHARE
    return EngineModel(
        name=shape.name,
        layout=layout,
        budget_bytes=pooled_bytes,
        link_bytes_per_s=card.link_bytes_per_s,
        curves=curves,
        step_s=shape.num_layers * LAYER_S
        + shape.num_moe_layers * PAGER_LAYER_S
        + shape.dense_read_bytes / read_bytes_per_s,
        distinct_s=shape.expert_bytes / read_bytes_per_s,
        pass_s=shape.num_layers * EAGER_LAYER_S,
        token_s=2 * shape.active_elements / (card.flops * FLOPS_SHARE),
        pass_tokens=choice.max_num_batched_tokens,
        is_pass_overlapped=True,
        stretch=DECODE_STRETCH,
        pass_stretch=PASS_STRETCH,
        in_place_tokens=IN_PLACE_TOKENS,
        in_place_stretch=IN_PLACE_STRETCH,
        # 43 ms for 1.16 GB, 87 ms for 2.68 GB: what moving pages of 4 MiB took on an H200.
        resize_s=0.009,
        resize_s_per_byte=3.0e-11,
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A predicted time with its doubt."""

    seconds: float
    low_s: float
    high_s: float

    def __str__(self) -> str:
        return f"{self.seconds:.4g} s ({self.low_s:.4g} to {self.high_s:.4g})"


def decode_estimate(
    model: EngineModel, card: Card, *, cap: int, batch: int, topics: int, curve_error: float
) -> Estimate:
    """Time of a decode step; copies doubt the link and the curve, compute is known within a tenth."""
    step = model.decode_step(cap, batch, topics)
    compute_s = step.seconds - step.link_s
    doubt_s = math.hypot(0.1 * compute_s, step.link_s * math.hypot(card.link_error, curve_error))
    return Estimate(seconds=step.seconds, low_s=max(0.0, step.seconds - doubt_s), high_s=step.seconds + doubt_s)


def fetch_estimate(layout: MemoryLayout, card: Card, *, tokens: int) -> Estimate:
    """Time until the KV of so many tokens is back from host memory (``kv_host_bytes``)."""
    seconds = tokens * layout.block_bytes / layout.block_tokens / card.link_bytes_per_s
    doubt_s = seconds * card.link_error
    return Estimate(seconds=seconds, low_s=seconds - doubt_s, high_s=seconds + doubt_s)


def first_token_estimate(model: EngineModel, card: Card, *, cap: int, prompt_tokens: int) -> Estimate:
    """Time to first token of a prompt alone, nothing of it cached."""
    seconds = model.first_token_s(cap, prompt_tokens)
    doubt_s = seconds * math.hypot(card.link_error, 0.05)
    return Estimate(seconds=seconds, low_s=seconds - doubt_s, high_s=seconds + doubt_s)
