"""Names inside vLLM that WiSP builds on, where nothing would fail at once without them: steps would only go wrong."""

from __future__ import annotations

from inspect import unwrap


def check_scheduler(scheduler: type) -> None:
    """Raise ImportError unless vLLM's ``scheduler`` still asks what `WispSchedulerMixin` and `FairTurns` answer."""
    # Overridden: how a turn ends, and how it loses its blocks.
    require(scheduler, "_free_request", "_free_blocks")
    require(scheduler, "schedule", "_preempt_request")
    # Written: a running turn is put off by one step. Changed in place: who is looked at, and in which order.
    require(scheduler, "schedule", "next_decode_eligible_step", "current_step", "running", "waiting")


def check_offloading(scheduler: type) -> None:
    """Raise ImportError unless vLLM's offloading ``scheduler`` has what `wisp_core.engine.host_kv` reads."""
    require(scheduler, "__init__", "_block_id_to_pending_jobs", "_req_status")


def require(owner: type, method: str, *names: str) -> None:
    """Raise ImportError unless ``owner`` has ``method``, and that uses every one of ``names``."""
    function = unwrap(getattr(owner, method, lambda: None))
    if missing := [name for name in names if name not in function.__code__.co_names]:
        raise ImportError(
            f"{owner.__module__}.{owner.__qualname__}.{method} does not use {', '.join(missing)}: this vLLM is another "
            "than the one that WiSP is made for (see the dependencies of its extra)"
        )
