"""KV blocks behind the GPU: vLLM's own KV offloading, and what the rest of an engine has to know of it.

vLLM copies each full block to host memory once it is computed, whether or not it will be evicted, and looks there for
what its prefix cache lacks. So the balloon need not store what it takes: it must only leave alone what a copy that has
not begun yet will still read, since a block without pages reads as something else.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import DirectionalTransferStats, TransferStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.platforms import current_platform

from wisp_core.engine.host_kv_cpu import EMULATED_LINK, CpuHostKvSpec
from wisp_core.errors import ConfigurationError
from wisp_core.private_names import check_offloading
from wisp_core.settings import WispSettings
from wisp_core.working_set.forgetting import DecayedSum

check_offloading(OffloadingConnectorScheduler)

_SHARED_MEMORY = Path("/dev/shm")
"""Where vLLM's worker of a GPU keeps the blocks."""
_CHUNK_BYTES = 4096
"""vLLM rounds a block in host memory up to this."""


def transfer_config(settings: WispSettings) -> KVTransferConfig:
    """vLLM's argument ``kv_transfer_config`` for ``kv_host_bytes``."""
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": settings.kv_host_bytes,
        # The next turn of a conversation repeats the answer too.
        "offload_prompt_only": False,
    }
    if current_platform.is_cpu():
        extra |= {"spec_name": CpuHostKvSpec.__name__, "spec_module_path": CpuHostKvSpec.__module__}
        if settings.emulated_link_bytes_per_s is not None:
            extra[EMULATED_LINK] = settings.emulated_link_bytes_per_s
    return KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)


def check_host_kv(kv_host_bytes: int) -> None:
    """Raises ConfigurationError unless this host has ``kv_host_bytes`` now.

    Called before a model is loaded, and again with the experts in host memory.
    """
    shared_bytes = None if current_platform.is_cpu() else shutil.disk_usage(_SHARED_MEMORY).free
    refuse_too_much(kv_host_bytes, available_bytes=psutil.virtual_memory().available, shared_bytes=shared_bytes)


def refuse_too_much(kv_host_bytes: int, *, available_bytes: int, shared_bytes: int | None) -> None:
    """Raises ConfigurationError that names the setting and a size that fits.

    Args:
        kv_host_bytes: The setting.
        available_bytes: Free memory of this host.
        shared_bytes: Free space of /dev/shm, out of which a GPU engine takes it; None: a CPU engine.
    """
    where, room_bytes = "available on this host beside the experts' copy", available_bytes
    if shared_bytes is not None and shared_bytes < room_bytes:
        where, room_bytes = f"free in {_SHARED_MEMORY}, which a container's --shm-size sets", shared_bytes
    if kv_host_bytes > room_bytes:
        raise ConfigurationError(
            f"kv_host_bytes {kv_host_bytes} is more than the {room_bytes} bytes {where}: set it to that or less, or to "
            "0 to keep no KV in host memory"
        )


def host_blocks(kv_host_bytes: int, block_bytes: int) -> int:
    """KV blocks that ``kv_host_bytes`` hold."""
    return kv_host_bytes // (-(-block_bytes // _CHUNK_BYTES) * _CHUNK_BYTES)


def check_holds_a_block(kv_host_bytes: int, block_bytes: int) -> None:
    """Raises ConfigurationError unless ``kv_host_bytes`` hold a KV block of all layers."""
    if not host_blocks(kv_host_bytes, block_bytes):
        raise ConfigurationError(
            f"kv_host_bytes {kv_host_bytes} holds no KV block of {block_bytes} bytes: set it higher, or to 0 to keep "
            "no KV in host memory"
        )


def blocks_to_copy(scheduler: Any) -> set[int]:
    """Blocks out of use that a copy to host memory will still read.

    Those of turns that have ended, until vLLM hears that their copies are over. Blocks in use are no concern: they
    cannot be taken. A preempted turn's copies are over before the step that preempts it. Of a copy that has begun
    the worker itself takes care: it waits for the device before it releases a page.
    """
    if scheduler.connector is None:
        return set()
    copies = scheduler.connector.scheduler
    blocks = set(copies._block_id_to_pending_jobs)
    # Ended since the last step: the next one looks which of their blocks are still to be copied.
    for request_id in scheduler.finished_req_ids:
        if (turn := copies._req_status.get(request_id)) is not None:
            for group in turn.group_states:
                blocks.update(group.block_ids)
    return blocks


@dataclass(frozen=True, kw_only=True)
class HostKvRates:
    """What the host tier does."""

    fetch_bytes_per_s: float = 0.0
    fetched_tokens_per_s: float = 0.0


class HostKvMeter:
    """Speed of fetches, and how much they bring back; fed with the worker's reports, step by step."""

    def __init__(self, *, token_bytes: float, window_s: float) -> None:
        """``token_bytes`` are those of one token's KV over all layers."""
        self._token_bytes = token_bytes
        self._loads, self._stores = DirectionalTransferStats(), DirectionalTransferStats()
        self._fetched_tokens = DecayedSum(window_s)

    def note_output(self, output: Any, now_s: float) -> None:
        """Take in a step's ModelRunnerOutput."""
        connector_output = output.kv_connector_output
        if connector_output is None or connector_output.kv_connector_worker_meta is None:
            return
        moved: TransferStats = connector_output.kv_connector_worker_meta.transfer_stats
        for total, new in ((self._loads, moved.load), (self._stores, moved.store)):
            total.bytes += new.bytes
            total.time += new.time
        if moved.load.bytes:
            self._fetched_tokens.add(now_s, moved.load.bytes / self._token_bytes)

    def rates(self, now_s: float, observed_s: float) -> HostKvRates:
        """Before anything was fetched, the speed is that of copies to host memory."""
        directions: Sequence[DirectionalTransferStats] = (self._loads, self._stores)
        speeds = [one.bytes / one.time for one in directions if one.time > 0]
        return HostKvRates(
            fetch_bytes_per_s=speeds[0] if speeds else 0.0,
            fetched_tokens_per_s=self._fetched_tokens.per_s(now_s, observed_s),
        )
