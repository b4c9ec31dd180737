"""Names inside vLLM that WiSP builds on, where nothing would fail at once without them: steps would only go wrong."""

from __future__ import annotations

from inspect import unwrap
from types import ModuleType


def check_scheduler(scheduler: type) -> None:
    """Raise ImportError unless vLLM's ``scheduler`` still asks what `WispSchedulerMixin` and `FairTurns` answer."""
    # Overridden: how a turn ends, and how it loses its blocks.
    require(scheduler, "_free_request", "_free_blocks")
    require(scheduler, "schedule", "_preempt_request")
    # Written: a running turn is put off by one step. Changed in place: who is looked at, and in which order.
    require(scheduler, "schedule", "next_decode_eligible_step", "current_step", "running", "waiting")


def check_kv_cache(manager: type) -> None:
    """Raise ImportError unless vLLM's KV cache ``manager`` has what `BlockBalloon` writes."""
    require(manager, "allocate_slots", "watermark_blocks")


def check_loading(loader: type, after_loading: ModuleType) -> None:
    """Raise ImportError unless vLLM's ``loader`` of weights, and what comes ``after_loading``, heed the pager."""
    require(loader, "_get_weights_iterator", "local_expert_ids")
    require(after_loading, "process_weights_after_loading", "requires_device_loading")


def check_offloading(scheduler: type) -> None:
    """Raise ImportError unless vLLM's offloading ``scheduler`` has what `wisp_core.engine.host_kv` reads."""
    require(scheduler, "__init__", "_block_id_to_pending_jobs", "_req_status")


def require(owner: type | ModuleType, name: str, *names: str) -> None:
    """Raise ImportError unless ``owner`` has a function ``name``, and that uses every one of ``names``."""
    function = unwrap(getattr(owner, name, lambda: None))
    if missing := [one for one in names if one not in function.__code__.co_names]:
        raise ImportError(
            f"{owner.__name__}.{name} does not use {', '.join(missing)}: this vLLM is another than the one that WiSP "
            "is made for (see the dependencies of its extra)"
        )
