"""vLLM arguments of a paged engine: the caller's, plus what WiSP needs, minus what it cannot honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.platforms import current_platform

from wisp_core.engine.host_kv import check_host_kv, transfer_config
from wisp_core.engine.pass_tokens import chosen_pass_tokens
from wisp_core.errors import ConfigurationError
from wisp_core.pager.expert_loader import LOAD_FORMAT
from wisp_core.settings import WispSettings

_OWNED = {
    "additional_config": "settings go into their own argument",
    "worker_cls": "WiSP's worker provides the memory",
    "scheduler_cls": "WiSP's scheduler moves the KV blocks",
    "num_gpu_blocks_override": "vram_budget_bytes sizes the KV cache",
    "kv_cache_memory_bytes": "vram_budget_bytes sizes the KV cache",
    "gpu_memory_utilization": "vram_budget_bytes is the engine's share of the card",
    "enable_return_routed_experts": "signatures come from the pager, and which experts a turn used is nobody else's",
    "kv_transfer_config": "blocks that a connector reads must not be unmapped; set wisp.kv_host_bytes",
    "kv_offloading_size": "wisp.kv_host_bytes is what KV may take of host memory",
    "kv_offloading_backend": "wisp.kv_host_bytes has vLLM's own",
}
_CPU = {
    "worker_cls": "wisp_core.engine.cpu_worker.WispCPUWorker",
    "scheduler_cls": "wisp_core.engine.scheduler.WispScheduler",
}
_IN_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_GPU = {
    "worker_cls": "wisp_core.engine.gpu_worker.WispGPUWorker",
    "scheduler_cls": "wisp_core.engine.scheduler.WispAsyncScheduler",
}


def paged_engine_args(model: str, engine_args: Mapping[str, Any], settings: WispSettings) -> dict[str, Any]:
    """Complete ``engine_args`` (vLLM's Python names) for an engine of ``model`` whose memory can be resized.

    Raises ConfigurationError for a missing budget and for arguments that WiSP sets itself, all at once.
    """
    problems = [f"{name}: {reason}; leave it out" for name, reason in _OWNED.items() if name in engine_args]
    if settings.vram_budget_bytes is None:
        problems.append("wisp.vram_budget_bytes is needed: it is what experts and KV share")
    if settings.kv_host_bytes and engine_args.get("enable_prefix_caching") is False:
        problems.append("enable_prefix_caching: wisp.kv_host_bytes keeps prefixes, so leave it on")
    if problems:
        raise ConfigurationError("engine arguments: " + "; ".join(problems))
    if settings.kv_host_bytes:
        check_host_kv(settings.kv_host_bytes)
    # The engine starts with few experts; the first resize, before any request, brings the configured cap.
    at_start = settings.model_copy(
        update={"cap": None, "bypass_if_it_fits": settings.bypass_if_it_fits and settings.cap is None}
    )
    pass_tokens = chosen_pass_tokens(model, engine_args, settings)
    return {
        **({"load_format": LOAD_FORMAT} if settings.host_store_dir is not None else {}),
        **_over_defaults(engine_args),
        **({"max_num_batched_tokens": pass_tokens} if pass_tokens is not None else {}),
        **(_CPU if current_platform.is_cpu() else _GPU),
        # Only so that vLLM neither profiles nor claims a fraction of the machine; the worker sizes the KV cache.
        "kv_cache_memory_bytes": settings.vram_budget_bytes,
        **({"kv_transfer_config": transfer_config(settings)} if settings.kv_host_bytes else {}),
        "additional_config": {"wisp": at_start.model_dump(exclude_none=True)},
    }


def resident_engine_args(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Complete ``engine_args`` for an engine that holds every expert: the reference of a paged one."""
    worker = {"worker_cls": "wisp_core.engine.cpu_worker.ResidentCPUWorker"} if current_platform.is_cpu() else {}
    return {**worker, **_over_defaults(engine_args)}


def _over_defaults(engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """``engine_args`` over the defaults; a JSON object keeps the default's entries that it does not name itself."""
    merged = _defaults()
    for name, value in engine_args.items():
        default = merged.get(name)
        merged[name] = {**default, **value} if isinstance(default, dict) and isinstance(value, Mapping) else value
    return merged


def _defaults() -> dict[str, Any]:
    if current_platform.is_cpu():
        # Compilation costs minutes of start-up on CPU and brings a paged engine nothing. The worker runs in the engine
        # core's process, as on a GPU, which saves seconds of imports. By name: vLLM turns "uni" into "mp" on a CPU to
        # set the threads of OpenMP, which a replica's environment sets.
        return {"enforce_eager": True, "distributed_executor_backend": _IN_PROCESS}
    # Whole decode steps as graphs; the kernel whose weights may lie in slots.
    return {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}, "moe_backend": "triton"}
