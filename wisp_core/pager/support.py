"""What cannot be paged exactly is refused at start, naming the setting and the fix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wisp_core.errors import ConfigurationError, UnsupportedModelError
from wisp_core.settings import WispSettings

MAX_DEVICE_EXPERTS = 495
"""vLLM's alignment kernel takes fewer than 1,024 ids, rounded up to 32; an expert has two, for its two places."""


def refuse_unsupported(vllm_config: Any, moe_config: Any, quant_method: Any, settings: WispSettings) -> None:
    """Check one layer before its weights are created.

    Args:
        vllm_config: vLLM's VllmConfig.
        moe_config: vLLM's FusedMoEConfig of the layer.
        quant_method: the method that vLLM chose for the layer.
        settings: the ``wisp`` object.

    Raises:
        UnsupportedModelError: every reason found, one a line.
    """
    device_type = vllm_config.device_config.device_type
    # By name: a quantized method may well be a subclass.
    method = type(quant_method).__name__
    quantization = None if method == "UnquantizedFusedMoEMethod" else method
    reasons = [
        *_arguments(moe_config.moe_parallel_config, vllm_config),
        *refused_experts(
            quantization=quantization,
            has_bias=moe_config.has_bias,
            num_experts=moe_config.num_experts,
            is_on_gpu=device_type != "cpu",
        ),
        *(_kernel(quant_method, device_type) if quantization is None else []),
    ]
    if reasons:
        raise UnsupportedModelError("this engine cannot page its experts:\n  " + "\n  ".join(reasons))
    refuse_misplaced(
        "additional_config.wisp",
        prefetch=settings.prefetch,
        emulated_link_bytes_per_s=settings.emulated_link_bytes_per_s,
        is_on_gpu=device_type != "cpu",
    )


def refuse_misplaced(section: str, *, prefetch: int, emulated_link_bytes_per_s: float | None, is_on_gpu: bool) -> None:
    """Raises ConfigurationError for a setting in ``section`` that is for the other kind of device."""
    if prefetch and not is_on_gpu:
        raise ConfigurationError(f"{section}.prefetch is for GPUs, where copies run beside computation")
    if emulated_link_bytes_per_s is not None and is_on_gpu:
        raise ConfigurationError(f"{section}.emulated_link_bytes_per_s is for the CPU backend: leave it out")


def refused_experts(*, quantization: str | None, has_bias: bool, num_experts: int, is_on_gpu: bool) -> list[str]:
    """Why experts of this kind cannot be paged; all of it can be told from a model's config.json."""
    reasons = []
    if quantization is not None:
        reasons.append(
            f"quantization by {quantization}: untested with paging; use an unquantized checkpoint and no --quantization"
        )
    if is_on_gpu and has_bias:
        reasons.append("experts with biases: not read in place from host memory; use a checkpoint without")
    if is_on_gpu and num_experts > MAX_DEVICE_EXPERTS:
        reasons.append(f"{num_experts} experts per layer: at most {MAX_DEVICE_EXPERTS} on a GPU")
    return reasons


_IN_THE_WAY = {
    "enable_expert_parallel": "slots hold experts of one device; leave it out",
    "enable_eplb": "moved experts would not match the host store; leave it out",
    "enable_lora": "adapters on experts would bypass the slots; leave it out",
    "speculative_config": "a draft model's layers are not counted apart; leave it out",
    "cpu_offload_gb": "paging takes its place; leave it out",
    "offload_group_size": "paging takes its place; leave it out",
}
_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def refused_arguments(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Engine arguments that cannot go with paging, by their Python names, and why."""
    reasons = {}
    for name in _SIZES:
        size = arguments.get(name)
        if isinstance(size, int) and size > 1:
            reasons[name] = f"{size} is untested with paging; set it to 1 and add replicas instead"
    return reasons | {name: why for name, why in _IN_THE_WAY.items() if arguments.get(name)}


def _arguments(moe_parallel: Any, vllm_config: Any) -> list[str]:
    """The same of an engine that knows what came of its arguments."""
    offload = vllm_config.offload_config
    arguments = {
        "enable_expert_parallel": moe_parallel.use_ep,
        "enable_eplb": moe_parallel.enable_eplb,
        "enable_lora": vllm_config.lora_config is not None,
        "speculative_config": vllm_config.speculative_config is not None,
        "cpu_offload_gb": offload.uva.cpu_offload_gb,
        "offload_group_size": offload.prefetch.offload_group_size,
        **{name: getattr(vllm_config.parallel_config, name) for name in _SIZES},
    }
    return [f"--{name.replace('_', '-')}: {why}" for name, why in refused_arguments(arguments).items()]


def _kernel(quant_method: Any, device_type: str) -> list[str]:
    if quant_method.is_monolithic:
        return ["the MoE kernel routes by itself (monolithic): set --moe-backend triton"]
    # Weights are post-processed in host memory, which is tried for vLLM's CPU kernels and a no-op for Triton.
    if device_type != "cpu" and quant_method.unquantized_backend.name != "TRITON":
        return [f"the {quant_method.unquantized_backend.name} MoE kernel: untested; set --moe-backend triton"]
    return []
