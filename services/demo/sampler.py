"""Watches the replicas' memory from outside: the resident bytes of the arenas' mappings, ten times a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from wisp_core.memory.memfd import MAPPING_PREFIX
from wisp_core.memory.smaps import resident_bytes

PERIOD_S = 0.1


KV_PREFIX = f"{MAPPING_PREFIX}kv"


@dataclass(frozen=True)
class Sample:
    """One reading of one replica."""

    at_s: float
    resident_bytes: int
    kv_bytes: int

    def __str__(self) -> str:
        """Both pools in MiB."""
        return f"experts {(self.resident_bytes - self.kv_bytes) / 2**20:.1f}, KV {self.kv_bytes / 2**20:.1f}"


class MemorySampler:
    """A thread that reads ``/proc`` each ``PERIOD_S`` while the context is open."""

    def __init__(self, pids: Mapping[str, Sequence[int]], budget_bytes: Mapping[str, int]) -> None:
        """``pids`` are the engine processes by replica, ``budget_bytes`` what both pools together may hold."""
        self._pids = pids
        self._budget_bytes = budget_bytes
        self._samples: dict[str, list[Sample]] = {replica_id: [] for replica_id in pids}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    @property
    def num_exceeded(self) -> int:
        """Readings above the budget."""
        return sum(
            sample.resident_bytes > self._budget_bytes[replica_id]
            for replica_id, samples in self._samples.items()
            for sample in samples
        )

    @property
    def num_samples(self) -> int:
        """Readings so far, over all replicas."""
        return sum(map(len, self._samples.values()))

    def at(self, replica_id: str, time_s: float) -> Sample:
        """The reading next to ``time_s``, Unix seconds; an empty one without any."""
        samples = self._samples.get(replica_id, [])
        return min(samples, key=lambda sample: abs(sample.at_s - time_s), default=Sample(time_s, 0, 0))

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            for replica_id, pids in self._pids.items():
                # KV first: what moves between the two readings is then counted as experts, never twice.
                kv_bytes = sum(resident_bytes(pid, KV_PREFIX) for pid in pids)
                self._samples[replica_id].append(Sample(time.time(), sum(map(resident_bytes, pids)), kv_bytes))
