"""The ways to run a model whose experts do not all fit, as vLLM arguments for the same bytes on the device.

Offloaders move whole parameters, or whole layers, so they cannot keep exactly a pager's bytes resident. Each is given
the least offloading that the pager's bytes allow it *or less*: where sizes do not match, the baseline keeps more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from wisp_core.planner.model_shape import ModelShape

_GIB = 1 << 30


class Mode(StrEnum):
    """How experts are kept."""

    RESIDENT = "resident"
    PAGED = "paged"
    UVA_EXPERTS = "uva_experts"
    UVA_ALL = "uva_all"
    OFFLOAD_COPY = "offload_copy"
    PREFETCH_OFFLOAD = "prefetch_offload"


class PrefixPlace(StrEnum):
    """Where the prefix of a session that comes back is."""

    RESIDENT = "resident"
    FETCHED = "fetched"
    COMPUTED = "computed"


BASELINES = (Mode.UVA_EXPERTS, Mode.PREFETCH_OFFLOAD, Mode.UVA_ALL, Mode.OFFLOAD_COPY)


@dataclass(frozen=True, slots=True)
class ModeArguments:
    """What a mode adds to an engine."""

    engine_args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def mode_arguments(mode: Mode, shape: ModelShape, cap: int) -> ModeArguments:
    """Arguments that leave at least the bytes of ``cap`` experts per layer on the device, and little more.

    Raises ValueError for a cap at which an offloader has nothing to offload.
    """
    if mode is Mode.RESIDENT:
        return ModeArguments()
    if mode is Mode.PAGED:
        return ModeArguments({"additional_config": {"wisp": {"cap": cap, "min_cap": cap, "bypass_if_it_fits": False}}})
    offload_bytes = shape.num_moe_layers * (shape.num_experts - cap) * shape.expert_bytes
    if offload_bytes <= 0:
        raise ValueError(f"{mode.value}: nothing to offload at cap {cap} of {shape.num_experts}")
    if mode is Mode.UVA_EXPERTS:
        offload_bytes = _whole_parameters(shape, offload_bytes)
        return ModeArguments(_uva(offload_bytes) | {"cpu_offload_params": ["experts"]})
    if mode is Mode.UVA_ALL:
        # The offloader stops after the parameter that reaches the limit: one parameter less, so as not to go over.
        w13_bytes, w2_bytes = layer_parameter_bytes(shape)
        return ModeArguments(_uva(max(w2_bytes, offload_bytes - w13_bytes)))
    if mode is Mode.OFFLOAD_COPY:
        # One layer at a time is copied to the device, which takes memory of its own.
        layer_bytes = sum(layer_parameter_bytes(shape))
        offload_bytes = min(_whole_parameters(shape, offload_bytes) + layer_bytes, shape.experts_bytes)
        arguments = _uva(offload_bytes) | {"cpu_offload_params": ["experts"]}
        return ModeArguments(arguments, {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": "1"})
    return ModeArguments(_prefetch(shape, cap))


def layer_parameter_bytes(shape: ModelShape) -> tuple[int, int]:
    """Bytes of w13 (gate and up) and of w2 (down) of one layer, all experts."""
    w13_bytes, w2_bytes = shape.expert_parameter_bytes
    return shape.num_experts * w13_bytes, shape.num_experts * w2_bytes


def _uva(offload_bytes: int) -> dict[str, Any]:
    return {"offload_backend": "uva", "cpu_offload_gb": offload_bytes / _GIB}


def _whole_parameters(shape: ModelShape, limit_bytes: int) -> int:
    """The most bytes, at most ``limit_bytes``, that whole parameters make up: w13 and w2, layer by layer."""
    w13_bytes, w2_bytes = layer_parameter_bytes(shape)
    layers, rest = divmod(limit_bytes, w13_bytes + w2_bytes)
    return max(w13_bytes, layers * (w13_bytes + w2_bytes) + (w13_bytes if rest >= w13_bytes else 0))


def _prefetch(shape: ModelShape, cap: int) -> dict[str, Any]:
    """Whole layers in one group; the buffer for the layer that comes next counts as resident."""
    resident_layers = math.ceil(shape.num_moe_layers * cap / shape.num_experts)
    offloaded_layers = shape.num_moe_layers - max(0, resident_layers - 1)
    return {
        "offload_backend": "prefetch",
        "offload_group_size": shape.num_moe_layers,
        "offload_num_in_group": min(offloaded_layers, shape.num_moe_layers),
        "offload_prefetch_step": 1,
        "offload_params": ["experts"],
    }
