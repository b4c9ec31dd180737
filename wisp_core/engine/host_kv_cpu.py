"""vLLM's KV offloading for the CPU engine: its scheduler's side as it is, and a worker that copies by memory copy.

vLLM's own worker for this needs CUDA or XPU. ``extra_config`` may hold ``EMULATED_LINK`` in bytes per second.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from wisp_core.errors import UnsupportedModelError

EMULATED_LINK = "emulated_link_bytes_per_s"


class _Copy(NamedTuple):
    job_id: int
    num_bytes: int
    seconds: float
    due_s: float


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, and says so when a link of ``link_bytes_per_s`` would have: one copy after the other."""

    def __init__(self, kv_caches: CanonicalKVCaches, *, num_chunks: int, link_bytes_per_s: float | None) -> None:
        """Give each KV tensor, [blocks, bytes], a host twin, [chunks, bytes], whose pages come as they are written."""
        if len(kv_caches.group_data_refs) != 1:
            raise UnsupportedModelError("kv_host_bytes: KV layers differ; leave it out for a hybrid model")
        self._device = [one.tensor for one in kv_caches.tensors]
        self._host = [torch.zeros((num_chunks, one.shape[1]), dtype=one.dtype) for one in self._device]
        self._block_bytes = sum(one.shape[1] for one in self._device)
        self._link_bytes_per_s = link_bytes_per_s
        self._copies: deque[_Copy] = deque()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """KV blocks to host memory."""
        return self._copy(job_id, self._device, src_spec, self._host, dst_spec)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Host memory to KV blocks."""
        return self._copy(job_id, self._host, src_spec, self._device, dst_spec)

    def get_finished(self) -> list[TransferResult]:
        """What is over by now."""
        now_s, finished = time.monotonic(), []
        while self._copies and self._copies[0].due_s <= now_s:
            copy = self._copies.popleft()
            finished.append(
                TransferResult(
                    job_id=copy.job_id, success=True, transfer_size=copy.num_bytes, transfer_time=copy.seconds
                )
            )
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return when these copies are over."""
        due_s = max((copy.due_s for copy in self._copies if copy.job_id in job_ids), default=0.0)
        time.sleep(max(0.0, due_s - time.monotonic()))

    def _copy(
        self, job_id: int, sources: list[torch.Tensor], source: Any, targets: list[torch.Tensor], target: Any
    ) -> bool:
        started_s = time.monotonic()
        rows, places = (torch.from_numpy(spec.block_ids.astype("int64")) for spec in (source, target))
        for have, want in zip(sources, targets, strict=True):
            want[places] = have[rows]
        num_bytes = len(rows) * self._block_bytes
        ended_s = time.monotonic()
        due_s, seconds = ended_s, ended_s - started_s
        if self._link_bytes_per_s is not None:
            seconds = max(seconds, num_bytes / self._link_bytes_per_s)
            due_s = max(started_s, self._copies[-1].due_s if self._copies else 0.0) + seconds
        self._copies.append(_Copy(job_id, num_bytes, seconds, due_s))
        return True


class CpuHostKvSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's host tier with `HostCopyWorker`; vLLM finds it by module and name."""

    _worker: HostCopyWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker's side, made at the first call."""
        if self._worker is None:
            self._worker = HostCopyWorker(
                kv_caches, num_chunks=self.num_chunks, link_bytes_per_s=self.extra_config.get(EMULATED_LINK)
            )
        return self._worker
