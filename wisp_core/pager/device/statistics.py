"""Sums that the device keeps, brought to the host without holding up a step, and what they say of late."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil

import numpy as np
import numpy.typing as npt
import torch

from wisp_core.pager.device.reference import StepCounts
from wisp_core.pager.device.state import DeviceState, FetchPath
from wisp_core.pager.device.step_clock import StepClock
from wisp_core.working_set.forgetting import Forgetting
from wisp_core.working_set.union_power import power_union

_REPORT_S = 0.01
"""What is read within this time belongs to one report, and is of one moment."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Counters at one moment, in the order of the device's stream."""

    counts: npt.NDArray[np.int64]  # [layers, len(FetchPath), fields of StepCounts]
    distances: npt.NDArray[np.int64]  # [layers, E + 1]
    seconds: Mapping[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    """Device time of the forwards that are counted, by whether they are prefills."""
    at_s: float = 0.0
    """When, on the monotonic clock."""

    def total(self, path: FetchPath) -> StepCounts:
        """Counts of one path, summed over layers but for ``steps`` and ``rows``, which all layers share."""
        steps, rows, *by_layer = (int(n) for n in self.counts[:, path].sum(axis=0))
        num_layers = len(self.counts)
        return StepCounts(steps // num_layers, rows // num_layers, *by_layer)


class DeviceSums:
    """Reads the sums of a `DeviceState`.

    A copy that waits for its turn on the stream would hold the caller up for a step. So while the device works, a read
    starts a copy and returns the one before; only an idle device is read at once.
    """

    def __init__(self, state: DeviceState, clock: StepClock) -> None:
        self._state = state
        self._clock = clock
        self._fields = len(StepCounts.__slots__)
        is_cuda = state.counts.is_cuda
        self._counts = torch.empty(state.counts.shape, dtype=torch.int64, pin_memory=is_cuda)
        self._distances = torch.empty(state.distances.shape, dtype=torch.int64, pin_memory=is_cuda)
        self._copied: torch.cuda.Event | None = None
        self._started_s = 0.0
        self._seconds: Callable[[], Mapping[bool, float]]
        self._last = self._empty()

    def read(self) -> Sums:
        """The newest sums that cost no waiting."""
        if not self._state.counts.is_cuda or torch.cuda.current_stream().query():
            self._start()
            self._finish()
        elif self._copied is None:
            self._start()
        elif time.monotonic() - self._started_s > _REPORT_S and self._copied.query():
            self._finish()
            self._start()
        return self._last

    def reset(self) -> None:
        """Zero the sums, in stream order; residency and its order stay."""
        self._state.reset_statistics()
        self._copied = None
        self._last = self._empty()

    def _start(self) -> None:
        self._started_s, self._seconds = time.monotonic(), self._clock.mark()
        self._counts.copy_(self._state.counts, non_blocking=True)
        self._distances.copy_(self._state.distances, non_blocking=True)
        if self._state.counts.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _finish(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        counts, distances = self._counts.numpy(), self._distances.numpy()
        self._last = Sums(
            counts[..., : self._fields].copy(),
            distances[:, : self._state.num_experts + 1].copy(),
            self._seconds(),
            self._started_s,
        )
        self._copied = None

    def _empty(self) -> Sums:
        state = self._state
        shape = (state.num_layers, len(FetchPath), self._fields)
        distances = np.zeros((state.num_layers, state.num_experts + 1), np.int64)
        return Sums(np.zeros(shape, np.int64), distances, at_s=time.monotonic())


class RecentSteps:
    """What steps missed of late, decode and prefill apart; ages by time as all measures do."""

    def __init__(self, num_experts: int, memory_s: float) -> None:
        self._memory = Forgetting(memory_s)
        self._seen = np.zeros(num_experts + 6, np.int64)
        self._recent = np.zeros(num_experts + 6)

    def update(self, sums: Sums, now_s: float) -> None:
        """Take in the steps since the last call; sums that went back (a reset) start anew."""
        decode, prefill = sums.total(FetchPath.DECODE), sums.total(FetchPath.STREAMED)
        counts = (decode.steps, decode.rows, decode.distinct, prefill.steps, prefill.distinct)
        now = np.array([*counts, *sums.distances.sum(axis=0)])
        if (now < self._seen).any():
            self._seen[:], self._recent[:] = 0, 0.0
        self._recent = self._recent * self._memory.keep(now_s) + (now - self._seen)
        self._seen = now

    def decode_misses_by_cap(self) -> tuple[float, ...]:
        """Index C: experts that a step copies at cap C, over all layers; empty before any step; length E + 1."""
        steps, distances = self._recent[0], self._recent[5:]
        return tuple((np.cumsum(distances[::-1])[::-1] / steps).tolist()) if steps > 0 else ()

    def prefill_distinct(self) -> float:
        """Experts that a prefill needs, over all layers; 0 before any."""
        steps, distinct = self._recent[3:5]
        return float(distinct / steps) if steps > 0 else 0.0

    def decode_union_by_batch(self, *, num_layers: int, top_k: int) -> tuple[float, ...]:
        """Index b: distinct experts of one layer that b rows need, up to a mean step's rows; empty where unknown."""
        steps, rows, distinct = self._recent[:3].tolist()
        if steps <= 0:
            return ()
        batch = rows / steps
        return power_union(batch=batch, union=distinct / (steps * num_layers), top_k=top_k, rows=ceil(batch))
