"""How many bytes a weight takes, from a checkpoint's ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from wisp_core.errors import UnsupportedModelError

_NAMES = "fp8, awq, gptq, compressed-tensors, modelopt (NVFP4), mxfp4, bitsandbytes (4 and 8 bit), experts_int8"
_LEFT_ALONE = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules")
"""Where methods list the modules that keep their precision."""


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Bits of a weight, and of the scales beside it; ``bits`` None: not quantized."""

    name: str
    bits: int | None = None
    group_size: int | None = None
    """Weights that share a scale along the input; None: one scale per output channel or tensor."""
    scale_bytes: int = 2
    zero_bits: int = 0
    """Bits of a zero point per group."""
    block: tuple[int, int] | None = None
    """Output and input rows that share a scale."""
    are_linears_quantized: bool = True
    are_experts_quantized: bool = True

    @classmethod
    def read(cls, config: Mapping[str, Any] | None) -> Quantization:
        """From ``quantization_config``. Raises UnsupportedModelError for a method that is not known here."""
        if not config:
            return cls(name="none", are_experts_quantized=False)
        return replace(cls._by_method(config), are_experts_quantized=not _are_experts_left_alone(config))

    @classmethod
    def _by_method(cls, config: Mapping[str, Any]) -> Quantization:
        method = str(config.get("quant_method", "")).lower()
        if method == "fp8":
            block = config.get("weight_block_size")
            return cls(name="fp8", bits=8, scale_bytes=4, block=tuple(block) if block else None)
        if method in ("awq", "gptq", "awq_marlin", "gptq_marlin", "auto-round"):
            bits = int(config.get("bits", config.get("w_bit", 4)))
            has_zeros = method.startswith("awq") or not config.get("sym", True)
            group = int(config.get("group_size", config.get("q_group_size", 128)))
            return cls(name=method, bits=bits, group_size=max(group, 0) or None, zero_bits=bits if has_zeros else 0)
        if method == "compressed-tensors":
            return cls._compressed(config)
        if method in ("modelopt", "modelopt_fp4", "nvfp4"):
            return cls(name="nvfp4", bits=4, group_size=16, scale_bytes=1)
        if method == "mxfp4":
            return cls(name="mxfp4", bits=4, group_size=32, scale_bytes=1, are_linears_quantized=False)
        if method == "experts_int8":
            return cls(name=method, bits=8, scale_bytes=4, are_linears_quantized=False)
        if method == "bitsandbytes":
            return cls(name=method, bits=4 if config.get("load_in_4bit") else 8, group_size=64, scale_bytes=4)
        raise UnsupportedModelError(f"quantization_config.quant_method {method!r} is not known; known: {_NAMES}")

    @classmethod
    def _compressed(cls, config: Mapping[str, Any]) -> Quantization:
        groups = list((config.get("config_groups") or {}).values())
        weights = (groups[0].get("weights") or {}) if groups else {}
        if "num_bits" not in weights:
            raise UnsupportedModelError(
                "quantization_config of compressed-tensors has no config_groups.*.weights.num_bits"
            )
        bits, group = int(weights["num_bits"]), weights.get("group_size")
        is_fp4 = bits == 4 and weights.get("type") == "float"
        block = weights.get("block_structure")
        return cls(
            name=f"compressed-tensors {weights.get('type', 'int')}{bits}",
            bits=bits,
            group_size=int(group) if group and int(group) > 0 else None,
            scale_bytes=1 if is_fp4 else 4 if bits == 8 else 2,
            zero_bits=0 if weights.get("symmetric", True) else bits,
            block=tuple(block) if block else None,
        )

    def expert_parameter_bytes(
        self, hidden: int, intermediate: int, element_bytes: int, *, has_bias: bool = False
    ) -> tuple[int, ...]:
        """Of one expert: gate and up together (``w13``), down (``w2``), then what scales them, by parameter."""
        shapes = ((2 * intermediate, hidden), (hidden, intermediate))
        weights = tuple(self._weight_bytes(rows, columns, element_bytes) for rows, columns in shapes)
        scales = tuple(size for rows, columns in shapes for size in self._scale_bytes(rows, columns))
        biases = tuple(rows * element_bytes for rows, _ in shapes) if has_bias else ()
        return (*weights, *scales, *biases)

    def linear_bytes(self, elements: int, element_bytes: int) -> int:
        """Of dense linear layers, their scales about."""
        if self.bits is None or not self.are_linears_quantized:
            return elements * element_bytes
        per_group = (self.scale_bytes * 8 + self.zero_bits) / self.group_size if self.group_size else 0.0
        return round(elements * (self.bits + per_group) / 8)

    def _weight_bytes(self, rows: int, columns: int, element_bytes: int) -> int:
        if self.bits is None or not self.are_experts_quantized:
            return rows * columns * element_bytes
        return rows * columns * self.bits // 8

    def _scale_bytes(self, rows: int, columns: int) -> tuple[int, ...]:
        """Scales and zero points of one matrix, a parameter each."""
        if not self.are_experts_quantized:
            return ()
        if self.block is not None:
            scales = -(-rows // self.block[0]) * -(-columns // self.block[1])
        else:
            scales = rows * (-(-columns // self.group_size) if self.group_size else 1)
        zeros = (scales * self.zero_bits // 8,) if self.zero_bits else ()
        return (scales * self.scale_bytes, *zeros)


def _are_experts_left_alone(config: Mapping[str, Any]) -> bool:
    """Whether a list of modules to leave alone names the routed experts of every layer."""
    names = [str(name) for key in _LEFT_ALONE for name in config.get(key) or ()]
    return any("experts" in name and "shared" not in name and not re.search(r"\d", name) for name in names)
