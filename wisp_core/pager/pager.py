"""All paged layers of one engine process: one cap, one set of counters.

A forward begins with layer 0 and ends with the last layer, so the pager needs nothing from the engine around it.
Everything here runs on the thread that runs the model; a resize happens between forwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from wisp_core.contracts import PagerCounts
from wisp_core.errors import ConfigurationError, IntegrityError, UnsupportedModelError
from wisp_core.memory.region import Backing
from wisp_core.pager.counters import ForwardCounter
from wisp_core.pager.host_memory import HostMemory, PageableMemory
from wisp_core.pager.host_store import HostStore
from wisp_core.pager.initial_cap import initial_cap
from wisp_core.pager.interface import ForwardInfo, ForwardObserver
from wisp_core.pager.layer_slots import LayerSlots
from wisp_core.pager.link import Link
from wisp_core.pager.paged_layers import PagedLayers
from wisp_core.pager.slot_table import SlotTable
from wisp_core.pager.time_share import TimeShare
from wisp_core.settings import WispSettings
from wisp_core.working_set.miss_curve import MissCurve
from wisp_core.working_set.union_curve import UnionCurve

OBSERVING_FRACTION = 0.01
"""Most of the forwards' time that curves may take: beyond it steps are left out, at the mean's expense only."""
MAX_UNION_ROWS = 64


class _Layer:
    """Table, slots and curves of one layer."""

    def __init__(
        self, name: str, tensors: Mapping[str, torch.Tensor], cap: int, backing: Backing, memory_s: float
    ) -> None:
        store = HostStore(tensors)
        self.host_tensors = dict(tensors)
        self.expert_bytes = store.expert_bytes
        self.table = SlotTable(store.num_experts, cap)
        self.slots = LayerSlots(name, store, backing)
        self.slots.back(0, cap)
        self.decode_curve = MissCurve(store.num_experts, memory_s)
        self.prefill_curve = MissCurve(store.num_experts, memory_s)
        self.union_curve = UnionCurve(MAX_UNION_ROWS, memory_s)


class Pager(PagedLayers[_Layer]):
    """Keeps ``cap`` experts of every layer in slots and copies the missing ones in when they are routed to.

    The host decides, so this is for the CPU engine; on a GPU it is `wisp_core.pager.device.device_pager.DevicePager`.
    """

    def __init__(
        self,
        settings: WispSettings,
        num_experts: int,
        top_k: int,
        backing: Backing,
        host_memory: HostMemory | None = None,
    ) -> None:
        """Raises ConfigurationError for a cap outside top-k..E, naming the setting."""
        self.host_memory = host_memory if host_memory is not None else PageableMemory()
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.observer: ForwardObserver | None = None
        self.cap = initial_cap(settings, num_experts, top_k)
        self._backing = backing
        self._memory_s = settings.window_s
        self._link = Link(settings.emulated_link_bytes_per_s)
        self._decode, self._prefill = ForwardCounter(), ForwardCounter()
        self._forward: ForwardInfo | None = None
        self._forward_start_s = 0.0
        self._observing = TimeShare(OBSERVING_FRACTION)
        self._is_observing = False

    # -- building ---------------------------------------------------------------------------------------------------

    def page_layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Take over the host tensors [E, ...] of layer ``index``; returns the slot tensors to use instead.

        Raises UnsupportedModelError when its experts differ in size from the other layers', MemoryError when the
        slots cannot be backed.
        """
        self._refuse_twice(index)
        layer = _Layer(f"experts-{index}", tensors, self.cap, self._backing, self._memory_s)
        other = next(iter(self._loaded()), layer)
        if (other.expert_bytes, other.table.num_experts) != (layer.expert_bytes, layer.table.num_experts):
            raise UnsupportedModelError(
                f"layer {index} has {layer.table.num_experts} experts of {layer.expert_bytes} bytes, another layer "
                f"{other.table.num_experts} of {other.expert_bytes}: layers must be alike to be paged"
            )
        self._layers[index] = layer
        return layer.slots.tensors

    # -- the forward ------------------------------------------------------------------------------------------------

    def run_layer(
        self,
        index: int,
        topk_ids: torch.Tensor,
        apply: Callable[[slice, torch.Tensor], torch.Tensor],
        describe: Callable[[], ForwardInfo | None],
        apply_in_place: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Run the experts of one layer.

        A prefill is a pass over most experts. It reads them in host memory, each one that has no slot crossing the
        link once, and leaves slots and their order to the decode steps, as on a GPU.

        Args:
            index: which layer.
            topk_ids: expert ids [rows, top_k], distinct within a row.
            apply: computes some rows, given the rows and their slot ids (same dtype as ``topk_ids``).
            describe: called once per forward, in layer 0; None for a forward that does not count (profiling).
            apply_in_place: computes all rows from the host tensors that `page_layer` was given.

        Returns:
            Outputs for all rows, in order.
        """
        if index == 0:
            self._forward = describe()
            self._forward_start_s = time.perf_counter()
            self._is_observing = self._observing.has_room()
        layer = self._layer(index)
        ids = topk_ids.numpy()
        was_resident = layer.table.is_resident()
        if self._forward is not None:
            self._look(index, layer, ids[: self._forward.num_tokens], was_resident, self._forward)
        if self._forward is not None and self._forward.is_prefill:
            num_copies = self._num_missing(ids, was_resident)
            self._link.charge(num_copies * layer.expert_bytes, 0.0)
            output = apply_in_place()
        else:
            output, num_copies = self._run_in_slots(layer, topk_ids, ids, apply)
        if self._forward is not None:
            self._count(ids[: self._forward.num_tokens], was_resident, num_copies, self._forward)
        if index == self.num_layers - 1:
            self._end_forward()
        return output

    # -- resizing ---------------------------------------------------------------------------------------------------

    def set_cap(self, cap: int) -> None:
        """Change the slots per layer, between forwards; the most recent experts stay.

        Raises ConfigurationError for a cap outside top-k..E and MemoryError when pages are refused; then nothing has
        changed.
        """
        if not self.top_k <= cap <= self.num_experts:
            raise ConfigurationError(f"cap {cap} is outside {self.top_k} (top-k) .. {self.num_experts} (experts)")
        if cap > self.cap:
            self._back(cap)
        for layer in self._all_layers():
            layer.slots.move(layer.table.set_cap(cap))
            layer.slots.release(self.cap, cap)
        self.cap = cap

    def resident(self) -> tuple[tuple[int, ...], ...]:
        """Per layer: ids of the experts in slots, ascending."""
        return tuple(layer.table.resident() for layer in self._all_layers())

    def tables(self) -> list[SlotTable]:
        """The slot table of each layer, for audits between forwards: copy before planning with them."""
        return [layer.table for layer in self._all_layers()]

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every table is sound and the pages held are exactly those of the cap."""
        for index, layer in enumerate(self._all_layers()):
            layer.table.check_integrity()
            held, due = layer.slots.region.resident_bytes(), layer.slots.bytes_at(self.cap)
            if layer.table.cap != self.cap or held != due:
                raise IntegrityError(
                    f"layer {index}: cap {layer.table.cap} with {held} bytes, expected cap {self.cap} with {due} bytes"
                )

    # -- statistics -------------------------------------------------------------------------------------------------

    @property
    def counted_at_s(self) -> None:
        """None: now."""

    @property
    def counts_decode(self) -> PagerCounts:
        """Forwards in which every request computed one token."""
        return self._decode.counts(self.expert_bytes)

    @property
    def counts_prefill(self) -> PagerCounts:
        """Forwards in which some request computed more than one token."""
        return self._prefill.counts(self.expert_bytes)

    def decode_misses_by_cap(self) -> tuple[float, ...]:
        """Index C: expected copies per decode step over all layers, recent steps weighing more; empty before any."""
        return self._expected_misses([layer.decode_curve for layer in self._loaded()])

    def prefill_misses_by_cap(self) -> tuple[float, ...]:
        """Index C: the same per prefill step."""
        return self._expected_misses([layer.prefill_curve for layer in self._loaded()])

    def decode_union_by_batch(self) -> tuple[float, ...]:
        """Index b: distinct experts of one layer that b decode rows need together, mean over layers."""
        sizes = [layer.union_curve.sizes() for layer in self._loaded()]
        if not sizes or not all(sizes):
            return ()
        length = min(map(len, sizes))
        return tuple(np.mean([of_layer[:length] for of_layer in sizes], axis=0).tolist())

    def host_tensors(self, index: int) -> Mapping[str, torch.Tensor]:
        """The tensors [E, ...] that `page_layer` was given."""
        return self._layer(index).host_tensors

    def reset_statistics(self) -> None:
        """Forget counts and curves, as after profiling; residency and its order stay."""
        self._decode, self._prefill = ForwardCounter(), ForwardCounter()
        for layer in self._loaded():
            layer.decode_curve.reset()
            layer.prefill_curve.reset()
            layer.union_curve.reset()

    # -- inside -----------------------------------------------------------------------------------------------------

    def _run_in_slots(
        self,
        layer: _Layer,
        topk_ids: torch.Tensor,
        ids: npt.NDArray[np.integer],
        apply: Callable[[slice, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, int]:
        """Copy what is missing and compute, sub-batch by sub-batch; returns outputs and the number of copies."""
        num_copies = 0
        outputs = []
        for batch in layer.table.plan(ids):
            if batch.copies:
                self._copy(layer, batch.copies)
                num_copies += len(batch.copies)
            slot_ids = torch.from_numpy(batch.slot_ids).to(topk_ids.dtype)
            outputs.append(apply(slice(batch.start, batch.stop), slot_ids))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)), num_copies

    def _num_missing(self, ids: npt.NDArray[np.integer], was_resident: npt.NDArray[np.bool_]) -> int:
        is_needed = np.zeros(self.num_experts, dtype=np.bool_)
        is_needed[ids] = True
        return int(np.count_nonzero(is_needed & ~was_resident))

    def _look(
        self,
        index: int,
        layer: _Layer,
        ids: npt.NDArray[np.integer],
        was_resident: npt.NDArray[np.bool_],
        forward: ForwardInfo,
    ) -> None:
        if self._is_observing:
            started_s = time.perf_counter()
            if forward.is_prefill:
                layer.prefill_curve.observe_pass(layer.table.last_use, ids, self._forward_start_s)
            else:
                layer.decode_curve.observe(layer.table.last_use, ids, self._forward_start_s)
                layer.union_curve.observe(ids, self._forward_start_s)
            self._observing.spend(time.perf_counter() - started_s)
        if self.observer is not None:
            self.observer.observe(index, ids, was_resident, forward.is_prefill)

    def _copy(self, layer: _Layer, copies: list[tuple[int, int]]) -> None:
        start_s = time.perf_counter()
        layer.slots.copy_in(copies)
        self._link.charge(len(copies) * layer.expert_bytes, time.perf_counter() - start_s)

    def _count(
        self,
        ids: npt.NDArray[np.integer],
        was_resident: npt.NDArray[np.bool_],
        num_copies: int,
        forward: ForwardInfo,
    ) -> None:
        is_needed = np.zeros(self.num_experts, dtype=np.bool_)
        is_needed[ids] = True
        counter = self._prefill if forward.is_prefill else self._decode
        counter.look_up(
            distinct=int(np.count_nonzero(is_needed)),
            hits=int(np.count_nonzero(is_needed & was_resident)),
            misses=num_copies,
        )

    def _end_forward(self) -> None:
        if self._forward is None:
            self._link.forgive()
            return
        link_s = self._link.settle()
        counter = self._prefill if self._forward.is_prefill else self._decode
        seconds = time.perf_counter() - self._forward_start_s
        self._observing.earn(seconds)
        counter.add(self._forward.num_tokens, seconds, link_s)

    def _expected_misses(self, curves: list[MissCurve]) -> tuple[float, ...]:
        expected = [curve.expected() for curve in curves]
        known = [misses for misses in expected if misses is not None]
        return tuple(np.sum(known, axis=0).tolist()) if known else ()
