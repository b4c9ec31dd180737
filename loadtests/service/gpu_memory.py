"""What replicas hold on a GPU as NVML counts it per process, asked from outside while they serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

PERIOD_S = 0.1


@dataclass
class Watched:
    """Readings of one replica, all its processes together."""

    budget_bytes: int
    num_samples: int = 0
    num_exceeded: int = 0
    peak_bytes: int = 0
    last_bytes: int = 0

    def add(self, used_bytes: int) -> None:
        """Take one reading."""
        self.num_samples += 1
        self.num_exceeded += used_bytes > self.budget_bytes
        self.peak_bytes = max(self.peak_bytes, used_bytes)
        self.last_bytes = used_bytes


class GpuProcesses:
    """A thread that asks NVML each ``PERIOD_S`` while the context is open."""

    source = "NVML, used memory of each process"

    def __init__(self, pids: Mapping[str, Sequence[int]], budget_bytes: int) -> None:
        """``pids`` are the processes by replica; each replica may hold ``budget_bytes``."""
        self.replicas = {replica_id: Watched(budget_bytes) for replica_id in pids}
        self._lock = threading.Lock()
        self._pids = {replica_id: set(of_replica) for replica_id, of_replica in pids.items()}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-processes", daemon=True)

    def __enter__(self) -> Self:
        self._nvml, self._devices = open_nvml()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def follow(self, pids: Mapping[str, Sequence[int]]) -> None:
        """Watch these processes from now on: an engine that was started again is a new one."""
        with self._lock:
            self._pids = {replica_id: set(of_replica) for replica_id, of_replica in pids.items()}

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            used = used_bytes_by_pid(self._nvml, self._devices)
            with self._lock:
                for replica_id, pids in self._pids.items():
                    self.replicas[replica_id].add(sum(used.get(pid, 0) for pid in pids))


def open_nvml() -> tuple[Any, list[Any]]:
    """NVML and the handles of all GPUs."""
    import pynvml  # of the GPU installation; a CPU machine has none

    pynvml.nvmlInit()
    return pynvml, [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]


def used_bytes_by_pid(nvml: Any, devices: Sequence[Any]) -> dict[int, int]:
    """Device memory of every process that computes, all GPUs together."""
    used: dict[int, int] = {}
    for device in devices:
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(device):
            used[process.pid] = used.get(process.pid, 0) + int(process.usedGpuMemory or 0)
    return used


def wait_until_gone(pids: Sequence[int], timeout_s: float = 60.0) -> bool:
    """Wait until none of ``pids`` holds device memory; False when that takes longer."""
    nvml, devices = open_nvml()
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if not set(pids) & set(used_bytes_by_pid(nvml, devices)):
            return True
        time.sleep(0.2)
    return False
