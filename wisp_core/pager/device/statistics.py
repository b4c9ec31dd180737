"""Sums that the device keeps, brought to the host without holding up a step, and the curve of recent steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from wisp_core.pager.device.reference import StepCounts
from wisp_core.pager.device.state import DeviceState, Path

HALF_LIFE_STEPS = 200.0


@dataclass(frozen=True, slots=True)
class Sums:
    """Counters at one moment, in the order of the device's stream."""

    counts: npt.NDArray[np.int64]  # [layers, len(Path), fields of StepCounts]
    distances: npt.NDArray[np.int64]  # [layers, E + 1]

    def total(self, path: Path) -> StepCounts:
        """Counts of one path, summed over layers but for ``steps`` and ``rows``, which all layers share."""
        steps, rows, *by_layer = (int(n) for n in self.counts[:, path].sum(axis=0))
        num_layers = len(self.counts)
        return StepCounts(steps // num_layers, rows // num_layers, *by_layer)


class DeviceSums:
    """Reads the sums of a `DeviceState`.

    A copy that waits for its turn on the stream would hold the caller up for a step. So while the device works, a read
    starts a copy and returns the one before; only an idle device is read at once.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self._fields = len(StepCounts.__slots__)
        is_cuda = state.counts.is_cuda
        self._counts = torch.empty(state.counts.shape, dtype=torch.int64, pin_memory=is_cuda)
        self._distances = torch.empty(state.distances.shape, dtype=torch.int64, pin_memory=is_cuda)
        self._copied: torch.cuda.Event | None = None
        self._last = self._empty()

    def read(self) -> Sums:
        """The newest sums that cost no waiting."""
        if not self._state.counts.is_cuda or torch.cuda.current_stream().query():
            self._start()
            self._finish()
        elif self._copied is None:
            self._start()
        elif self._copied.query():
            self._finish()
            self._start()
        return self._last

    def reset(self) -> None:
        """Zero the sums, in stream order; residency and its order stay."""
        self._state.reset_statistics()
        self._copied = None
        self._last = self._empty()

    def _start(self) -> None:
        self._counts.copy_(self._state.counts, non_blocking=True)
        self._distances.copy_(self._state.distances, non_blocking=True)
        if self._state.counts.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _finish(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        counts, distances = self._counts.numpy(), self._distances.numpy()
        self._last = Sums(counts[..., : self._fields].copy(), distances[:, : self._state.num_experts + 1].copy())
        self._copied = None

    def _empty(self) -> Sums:
        state = self._state
        shape = (state.num_layers, len(Path), self._fields)
        return Sums(np.zeros(shape, np.int64), np.zeros((state.num_layers, state.num_experts + 1), np.int64))


class RecentCurve:
    """Misses per decode step at every cap, older steps weighing less: half after `HALF_LIFE_STEPS`."""

    def __init__(self) -> None:
        self._seen_steps = 0
        self._seen: npt.NDArray[np.int64] | None = None
        self._steps = 0.0
        self._distances: npt.NDArray[np.float64] | None = None

    def update(self, sums: Sums) -> None:
        """Take in the steps since the last call; sums that went back (a reset) start anew."""
        steps = sums.total(Path.DECODE).steps
        distances = sums.distances.sum(axis=0)
        if self._seen is None or self._distances is None or steps < self._seen_steps:
            self._steps, self._distances = float(steps), distances.astype(np.float64)
        else:
            new_steps = steps - self._seen_steps
            weight = 0.5 ** (new_steps / HALF_LIFE_STEPS)
            self._steps = self._steps * weight + new_steps
            self._distances = self._distances * weight + (distances - self._seen)
        self._seen_steps, self._seen = steps, distances

    def misses_by_cap(self) -> tuple[float, ...]:
        """Index C: experts that a step copies at cap C, over all layers; empty before any step; length E + 1."""
        if not self._steps or self._distances is None:
            return ()
        return tuple((np.cumsum(self._distances[::-1])[::-1] / self._steps).tolist())
