"""Fetches what a layer will probably need while the layer before it computes.

Each layer's guess and copies are launched on a side stream behind the fetches of the layer before, and are over before
the layer itself is planned: so the plan finds them in slots or not at all, and what it decides is right either way. The
first layer has none before it and gets no guess. All of it may be captured by a graph.
"""

from __future__ import annotations

import dataclasses

import torch

from wisp_core.pager.device.gather_kernel import Gather
from wisp_core.pager.device.prefetch_kernel import FETCHED, SUMS_WIDTH, USED, WASTED, guess
from wisp_core.pager.device.prefetch_reference import PrefetchCounts
from wisp_core.pager.device.state import DeviceState


class Prefetcher:
    """Guesses and copies of all layers."""

    def __init__(self, state: DeviceState, gathers: list[Gather], most: int, device: torch.device) -> None:
        """Fetch at most ``most`` experts per layer and step, by ``gathers`` of each layer."""
        num_layers, width = state.num_layers, state.width
        self._state, self._gathers, self._most = state, gathers, most
        self._history = torch.zeros(num_layers, 2, width, dtype=torch.int32, device=device)
        self._sums = torch.zeros(num_layers, SUMS_WIDTH, dtype=torch.int64, device=device)
        headers, lists = torch.zeros_like(state.header), torch.zeros_like(state.lists)
        self._copies = [
            dataclasses.replace(state.layer(index), header=headers[index], lists=lists[index])
            for index in range(num_layers)
        ]
        self._done: list[torch.cuda.Event | None] = [None] * num_layers

    def launch(self, index: int, stream: torch.cuda.Stream | None) -> None:
        """Fetch for layer ``index`` on ``stream``, behind what it has."""
        if stream is None:
            self._run(index)
            return
        with torch.cuda.stream(stream):
            self._run(index)
            self._done[index] = stream.record_event()

    def join(self, index: int) -> None:
        """Before layer ``index`` is planned on the current stream: let that wait for its fetches."""
        done, self._done[index] = self._done[index], None
        if done is not None:
            torch.cuda.current_stream().wait_event(done)

    def counts(self) -> PrefetchCounts:
        """Sums over layers. Waits for the device."""
        sums = self._sums.sum(dim=0).tolist()
        return PrefetchCounts(fetched=sums[FETCHED], used=sums[USED], wasted=sums[WASTED])

    def reset_counts(self) -> None:
        """Zero the sums, in stream order; history stays, and what is pending may be counted as used later."""
        self._sums.zero_()

    def _run(self, index: int) -> None:
        copies = self._copies[index]
        guess(self._state.layer(index), copies, self._history[index], self._sums[index], self._most)
        self._gathers[index].run(copies, is_first=True)
