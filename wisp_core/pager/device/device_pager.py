"""The pager of a GPU: tables and decisions live on the device, so a decode step needs no host and fits a CUDA graph.

The host only launches, in the order of the layers. Two kinds of forward differ:

* *decode* steps take missing experts into slots. Experts that find no slot, since the step needs more than the cap, are
  read from host memory in place;
* *prefills* leave the slots to the decode steps: what they miss is read in place (few rows) or streamed (many).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from wisp_core.contracts import PagerCounts
from wisp_core.errors import ConfigurationError, IntegrityError, UnsupportedModelError
from wisp_core.memory.region import Backing, FillableBacking
from wisp_core.pager.device.blocks import Blocks, DecodePlan
from wisp_core.pager.device.cap_kernel import set_cap
from wisp_core.pager.device.gather_kernel import Gather
from wisp_core.pager.device.plan_kernel import plan_step
from wisp_core.pager.device.prefetch import Prefetcher
from wisp_core.pager.device.prefetch_reference import PrefetchCounts
from wisp_core.pager.device.reference import NO_SLOT, LayerTable
from wisp_core.pager.device.staging import Staging
from wisp_core.pager.device.state import DeviceState, FetchPath, LayerState, Table
from wisp_core.pager.device.statistics import DeviceSums, RecentSteps
from wisp_core.pager.device.step_clock import StepClock
from wisp_core.pager.device.uses import DeviceUses
from wisp_core.pager.host_memory import HostMemory, PageableMemory
from wisp_core.pager.host_store import HostStore
from wisp_core.pager.initial_cap import initial_cap
from wisp_core.pager.interface import ForwardInfo
from wisp_core.pager.layer_slots import LayerSlots
from wisp_core.pager.paged_layers import PagedLayers
from wisp_core.settings import WispSettings

_MOVE_PROGRAMS = 132
_SECOND_PREFIX = "w2_"


class _Layer:
    """Host store and slots of one layer, and its state once all layers are known."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor], cap: int, backing: Backing) -> None:
        self.store = HostStore(tensors)
        self.slots = LayerSlots(name, self.store, backing, is_host_in_reach=True)
        self.slots.back(0, cap)
        self.expert_bytes = self.store.expert_bytes
        self.state: LayerState
        self.gather_all: Gather
        self.gather_first: Gather  # what the first product reads
        self.gather_second: Gather  # the rest
        self.moves: Gather

    def attach(self, state: LayerState, device: torch.device) -> None:
        """Prepare the kernels' arguments."""
        names = list(self.store.shapes)
        second = [name for name in names if name.startswith(_SECOND_PREFIX)]
        slots = [self.slots.tensors[name] for name in names]
        self.state = state
        self.gather_all = self._gather(names, device)
        self.gather_first = self._gather([name for name in names if name not in second], device)
        self.gather_second = self._gather(second, device)
        if not self.gather_first.is_like(self.gather_second):  # sizes so odd that one kernel cannot copy both
            self.gather_first, self.gather_second = self.gather_all, self._gather([], device)
        self.moves = Gather(slots, slots, device, num_programs=_MOVE_PROGRAMS)

    def _gather(self, names: list[str], device: torch.device) -> Gather:
        return Gather([self.store.tensor(name) for name in names], [self.slots.tensors[name] for name in names], device)


class DevicePager(PagedLayers[_Layer]):
    """Keeps ``cap`` experts of every layer in slots. `wisp_core.pager.interface.ExpertPager` says what the rest asks.

    ``backing`` and ``host_memory`` are kept for their owners: the one lends pages to the KV cache too, the other must
    outlive every step.
    """

    def __init__(
        self,
        settings: WispSettings,
        num_experts: int,
        top_k: int,
        *,
        device: torch.device,
        backing: FillableBacking,
        host_memory: HostMemory | None = None,
    ) -> None:
        """Raises ConfigurationError for a cap outside top-k..E, naming the setting."""
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.cap = initial_cap(settings, num_experts, top_k)
        self.smallest_cap = settings.min_cap if settings.min_cap is not None else top_k
        self.settings = settings
        self.device = device
        self.backing = backing
        self.host_memory: HostMemory = host_memory if host_memory is not None else PageableMemory()
        self.clock = StepClock()
        self.link_bytes_per_s: float | None = None  # measured once all layers are there
        self._state: DeviceState | None = None
        self._is_told = False
        self._is_prefill = False
        self._recent = RecentSteps(num_experts, settings.window_s)
        self._prefetcher: Prefetcher | None = None

    # -- building ---------------------------------------------------------------------------------------------------

    def page_layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take over the page-locked host tensors [E, ...] of layer ``index``; returns the slot tensors to use instead.

        Raises UnsupportedModelError when its experts differ from the other layers' or lie badly, MemoryError when the
        slots cannot be backed.
        """
        self._refuse_twice(index)
        layer = _Layer(f"experts-{index}", tensors, self.cap, self.backing)
        other = next(iter(self._loaded()), layer)
        if other.store.shapes != layer.store.shapes:
            raise UnsupportedModelError(
                f"layer {index} has experts {layer.store.shapes}, another layer {other.store.shapes}: layers must be "
                "alike to be paged"
            )
        self._layers[index] = layer
        if self.is_ready:
            self._attach()
        return layer.slots.tensors

    @property
    def stores(self) -> list[HostStore]:
        """Host tensors by layer."""
        return [layer.store for layer in self._all_layers()]

    # -- the forward ------------------------------------------------------------------------------------------------

    def begin_step(self, num_tokens: int, *, is_prefill: bool) -> None:
        """Say what the next step is, before its launches. A step of 0 tokens uses no expert (profiling, capture).

        Without this call, as under a plain vLLM worker, padding rows count as tokens, and only forwards outside graphs
        know whether they are prefills.
        """
        self._is_told = True
        self._is_prefill = is_prefill
        self._device_state.num_valid_rows.fill_(num_tokens)
        if num_tokens and self.device.type == "cuda":
            self.clock.start(is_prefill=is_prefill)

    def end_step(self) -> None:
        """The step's launches are made."""
        self.clock.stop()

    def begin_forward(self, describe: Callable[[], ForwardInfo | None]) -> None:
        """Called in layer 0, by the host code of a forward; a replayed graph has none."""
        if not self._is_told:
            forward = describe()
            self._is_prefill = forward is not None and forward.is_prefill

    @property
    def is_prefill(self) -> bool:
        """Whether the running forward is a prefill."""
        return self._is_prefill

    def plan(self, index: int, topk_ids: torch.Tensor, path: FetchPath) -> torch.Tensor:
        """Plan one layer; returns slot ids, ``E + expert`` for experts in no slot.

        On the path DECODE it fetches into slots what is missing. Launches only, so that a graph may capture it. Ids are
        integer [rows, top_k], contiguous.
        """
        if path is FetchPath.DECODE:
            return self._plan_decode(index, topk_ids, None, is_marking=False)
        slot_ids = torch.empty_like(topk_ids, dtype=torch.int32)
        plan_step(self._layer(index).state, topk_ids, slot_ids, self._device_state.num_valid_rows, path=path)
        return slot_ids

    def fetch_by_host(self, index: int, topk_ids: torch.Tensor) -> torch.Tensor:
        """`plan` on the path DECODE where the device cannot read host memory: the host makes the copies.

        Waits for the device, and fits no graph.
        """
        layer = self._layer(index)
        slot_ids = torch.empty_like(topk_ids, dtype=torch.int32)
        plan_step(layer.state, topk_ids, slot_ids, self._device_state.num_valid_rows)
        for expert, slot in layer.state.read_list():
            if slot == NO_SLOT:
                continue
            for name, slots in layer.slots.tensors.items():
                slots[slot].copy_(layer.store.rows(name)[expert])
        return slot_ids

    def plan_products(self, index: int, topk_ids: torch.Tensor, blocks: Blocks | None) -> DecodePlan:
        """`plan` on the path DECODE for products that run beside its copies; they must be launched next."""
        slot_ids = self._plan_decode(index, topk_ids, blocks, is_marking=True)
        layer = self._layer(index)
        is_whole = layer.gather_first.is_led and layer.gather_second.is_led
        return DecodePlan(slot_ids, blocks, layer.state.ready, is_whole)

    def _plan_decode(
        self, index: int, topk_ids: torch.Tensor, blocks: Blocks | None, *, is_marking: bool
    ) -> torch.Tensor:
        layer = self._layer(index)
        slot_ids = torch.empty_like(topk_ids, dtype=torch.int32)
        if self._prefetcher is not None:
            self._prefetcher.join(index)
        plan_step(
            layer.state,
            topk_ids,
            slot_ids,
            self._device_state.num_valid_rows,
            gather=layer.gather_first,
            gather_after=layer.gather_second,
            blocks=blocks,
            is_marking=is_marking,
        )
        if self._prefetcher is not None and index + 1 < self.num_layers:
            self._prefetcher.launch(index + 1, self._forked_side_stream())  # behind what this layer waits for
        return slot_ids

    def _forked_side_stream(self) -> torch.cuda.Stream | None:
        """The side stream, behind all that is launched so far; None where there are no streams."""
        if self.device.type != "cuda":
            return None
        self._side_stream.wait_stream(torch.cuda.current_stream(self.device))
        return self._side_stream

    def is_resident(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Residency now, [layers, E]. Waits for the device."""
        slots = self._device_state.table[:, Table.SLOT, : self.num_experts].cpu().numpy()
        resident: np.ndarray[Any, np.dtype[np.bool_]] = slots != NO_SLOT
        return resident

    def can_overflow(self, num_rows: int) -> bool:
        """Whether a decode step of ``num_rows`` may need more experts than the smallest cap has slots."""
        return num_rows * self.top_k > self.smallest_cap

    # -- resizing ---------------------------------------------------------------------------------------------------

    def set_cap(self, cap: int) -> None:
        """Change the slots per layer, between steps; the most recent experts stay, and captured graphs stay valid.

        Raises ConfigurationError for a cap outside min_cap..E (graphs are captured for no less) and MemoryError when
        pages are refused; then nothing has changed.
        """
        if not self.smallest_cap <= cap <= self.num_experts:
            raise ConfigurationError(f"cap {cap} is outside {self.smallest_cap} (min_cap) .. {self.num_experts}")
        layers = self._all_layers()
        if cap > self.cap:
            self._back(cap)
        set_cap(self._device_state, cap)
        if cap < self.cap:
            for layer in layers:
                layer.moves.run(layer.state)
            for layer in layers:
                layer.slots.release(self.cap, cap)
        self.cap = cap

    def resident(self) -> tuple[tuple[int, ...], ...]:
        """Per layer: ids of the experts in slots, ascending. Waits for the device."""
        return tuple(tuple(np.flatnonzero(of_layer).tolist()) for of_layer in self.is_resident())

    def tables(self) -> list[LayerTable]:
        """Copies of each layer's table, as the reference's type, for audits between forwards. Waits for the device."""
        return [layer.state.read() for layer in self._all_layers()]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every table is sound and the pages held are exactly those of the cap."""
        for index, layer in enumerate(self._all_layers()):
            table = layer.state.read()
            table.check_integrity()
            held, due = layer.slots.region.resident_bytes(), layer.slots.bytes_at(self.cap)
            if table.cap != self.cap or held != due:
                raise IntegrityError(
                    f"layer {index}: cap {table.cap} with {held} bytes, expected cap {self.cap} with {due} bytes"
                )

    # -- statistics -------------------------------------------------------------------------------------------------

    @property
    def counted_at_s(self) -> float:
        """Moment of the counts, on the monotonic clock: about the last report's, while the device works."""
        return self._sums.read().at_s

    @property
    def counts_decode(self) -> PagerCounts:
        """Forwards in which every request computed one token; misses include experts read in place."""
        return self._counts(FetchPath.DECODE)

    @property
    def counts_prefill(self) -> PagerCounts:
        """Forwards in which some request computed more than one token; misses are needed experts in no slot."""
        return self._counts(FetchPath.STREAMED)

    @property
    def prefetched(self) -> PrefetchCounts:
        """Experts fetched on a guess, by what became of them. Waits for the device."""
        return self._prefetcher.counts() if self._prefetcher is not None else PrefetchCounts()

    def count_uses(self, max_keys: int) -> DeviceUses:
        """A counter of who uses which experts, at most ``max_keys`` keys between two drains."""
        return DeviceUses(self._device_state, self.top_k, max_keys)

    def decode_misses_by_cap(self) -> tuple[float, ...]:
        """Index C: expected copies per decode step over all layers, recent steps weighing more; empty before any."""
        return self._recent_steps().decode_misses_by_cap()

    def prefill_misses_by_cap(self) -> tuple[float, ...]:
        """Index C: the same per prefill: of the experts that it needs, the share that is in no slot."""
        distinct = self._recent_steps().prefill_distinct()
        return tuple(distinct * (1 - cap / self.num_experts) for cap in range(self.num_experts + 1)) if distinct else ()

    def decode_union_by_batch(self) -> tuple[float, ...]:
        """Index b: distinct experts of one layer that b decode rows need together; measured at the mean batch alone."""
        return self._recent_steps().decode_union_by_batch(num_layers=self.num_layers, top_k=self.top_k)

    def _recent_steps(self) -> RecentSteps:
        self._recent.update(self._sums.read(), time.monotonic())
        return self._recent

    def reset_statistics(self) -> None:
        """Forget counts and curves, as after profiling; residency and its order stay."""
        if self._state is not None:
            self._sums.reset()
        if self._prefetcher is not None:
            self._prefetcher.reset_counts()
        self.clock.reset()
        self._recent = RecentSteps(self.num_experts, self.settings.window_s)

    # -- inside -----------------------------------------------------------------------------------------------------

    @property
    def _device_state(self) -> DeviceState:
        if self._state is None:
            raise RuntimeError("not all announced layers are loaded yet")
        return self._state

    def _attach(self) -> None:
        self._state = DeviceState(self.num_layers, self.num_experts, self.cap, self.device)
        self._sums = DeviceSums(self._state, self.clock)
        for index, layer in enumerate(self._all_layers()):
            layer.attach(self._state.layer(index), self.device)
        if self.settings.prefetch:
            gathers = [layer.gather_all for layer in self._all_layers()]
            self._prefetcher = Prefetcher(self._state, gathers, self.settings.prefetch, self.device)
        if self.device.type == "cuda":  # without a copy engine (the kernels' interpreter), there is nothing to stream
            self._side_stream = torch.cuda.Stream(self.device)
            self.staging = Staging(self.stores, self.settings.staging_bytes, self.device)
            self.link_bytes_per_s = self.staging.measure_link()

    def _counts(self, path: FetchPath) -> PagerCounts:
        sums = self._sums.read()
        counts = sums.total(path)
        missed_bytes = counts.misses * self.expert_bytes
        return PagerCounts(
            steps=counts.steps,
            tokens=counts.rows,
            hits=counts.hits,
            misses=counts.misses,
            missed_bytes=missed_bytes,
            distinct=counts.distinct,
            seconds=sums.seconds[path is FetchPath.STREAMED],
            # Inside a graph copies cannot be timed one by one: what they take at the link's measured speed.
            link_seconds=missed_bytes / self.link_bytes_per_s if self.link_bytes_per_s else 0.0,
        )
