"""Peak of GPU memory as NVML reports it, sampled beside the engine, and as torch's allocator counts it."""

from __future__ import annotations

import os
import threading
from typing import Any

import torch
from vllm.platforms import current_platform

_INTERVAL_S = 0.05


class GpuMemory:
    """Samples until the process ends. Without a GPU every figure is None. Create it before the process uses the GPU.

    NVML counts what torch does not: virtual-memory pages, the CUDA context, graphs. Where it knows no figure for one
    process (in a virtual machine), the device's total above what was in use before the engine stands in for it.
    """

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        if torch.cuda.is_available():
            self._nvml, self._handle = _open_nvml()
        self._lock = threading.Lock()
        self._peak_bytes = 0
        self._before_bytes = 0
        self.source = "none"
        if self._nvml is not None:
            self._before_bytes = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
            # Sampled from a thread of its own: NVML is no part of the CUDA context and waits for no kernel.
            threading.Thread(target=self._sample_for_ever, daemon=True).start()

    def restart(self) -> None:
        """Forget the peak so far."""
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with self._lock:
            self._peak_bytes = 0

    def peak_bytes(self) -> int | None:
        """Highest sample since `restart`."""
        if self._nvml is None:
            return self.torch_peak_bytes()
        self._sample()
        with self._lock:
            return self._peak_bytes

    def torch_peak_bytes(self) -> int | None:
        """Highest sum of torch's allocations since `restart`."""
        return int(torch.cuda.max_memory_allocated()) if torch.cuda.is_available() else None

    def _sample_for_ever(self) -> None:
        pause = threading.Event()
        while not pause.wait(_INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        used = self._own_bytes()
        with self._lock:
            self._peak_bytes = max(self._peak_bytes, used)

    def _own_bytes(self) -> int:
        assert self._nvml is not None
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                self.source = "NVML, this process"
                return int(process.usedGpuMemory)
        self.source = "NVML, device above idle"
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used) - self._before_bytes


def _open_nvml() -> tuple[Any, Any]:
    from vllm.third_party import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByIndex(current_platform.visible_device_id_to_physical_device_id(0))
    except pynvml.NVMLError:
        return None, None
