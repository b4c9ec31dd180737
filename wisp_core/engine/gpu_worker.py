"""Worker of the GPU engine. Apart from the CPU's: importing that one changes vLLM's buffers for the whole process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from wisp_core.contracts import Signature
from wisp_core.engine.dense_bytes import dense_parameter_bytes
from wisp_core.engine.device_tally import DeviceSessionTally
from wisp_core.engine.step_rows import step_kind
from wisp_core.engine.worker import WispWorkerMixin
from wisp_core.memory.region import Backing
from wisp_core.pager.device.step_clock import StepClock
from wisp_core.pager.resident_experts import Clock, ResidentExperts

if TYPE_CHECKING:
    from wisp_core.pager.device.device_pager import DevicePager  # needs Triton, which a CPU machine has not


_UNSEEN_BYTES = 1 << 30
"""What the profiling forward does not see: CUDA's context (half of it on an H200), captured graphs, libraries."""


_MAX_COUNTED_KEYS = 256
"""Sessions that are told apart between two reports; each takes 4 bytes per expert of every layer on the device."""


class WispGPUWorker(WispWorkerMixin, Worker):  # type: ignore[misc]
    """On a GPU: virtual memory whose pages slots and KV cache share; the pager decides on the device."""

    _wisp_pager: DevicePager | ResidentExperts

    def init_device(self) -> None:
        """Take the device; of its memory vLLM then asks for the budget and not for nearly all, which others hold.

        Not for what CUDA's context has taken by then: the budget covers it, and it is no longer free.
        """
        total_bytes = current_platform.get_device_total_memory()
        wanted_bytes = max(1, (self._wisp_settings.vram_budget_bytes or 0) - _UNSEEN_BYTES)
        self.cache_config.gpu_memory_utilization = min(1.0, wanted_bytes / total_bytes)
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load; until the first step, forwards (profiling, warm-up, capture) have no real tokens."""
        super().load_model(*args, **kwargs)
        assert not isinstance(self._wisp_pager, ResidentExperts), "only a loaded model can be found to fit"
        pager = self._wisp_pager
        self._wisp_pages = pager.backing
        self._wisp_device_tally = DeviceSessionTally(
            pager.count_uses(_MAX_COUNTED_KEYS),
            num_layers=pager.num_layers,
            num_experts=pager.num_experts,
            top_k=pager.top_k,
        )
        self._wisp_pager.begin_step(0, is_prefill=False)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture, and forget what that counted."""
        times = super().compile_or_warm_up_model()
        self._wisp_pager.reset_statistics()
        self._wisp_device_tally.reset()
        return times

    def _wisp_backing(self) -> Backing:
        # A padded row may read or write any block, so addresses without pages must not fault.
        return self._wisp_pages.with_filler()

    def _wisp_trim(self) -> None:
        self._wisp_pages.trim()

    def _wisp_profile(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        Worker.determine_available_memory(self)

    def _wisp_activation_bytes(self) -> int:
        """The allocator's peak in the profiling forward above the weights, staging included, and what that misses."""
        weights_bytes = dense_parameter_bytes(self.model_runner.get_model())
        peak_bytes = int(torch.cuda.max_memory_reserved())
        return max(0, peak_bytes - weights_bytes) + max(_UNSEEN_BYTES, self._wisp_settings.activation_bytes)

    def _wisp_begin_step(self, scheduler_output: Any) -> None:
        num_tokens, is_prefill = step_kind(scheduler_output)
        self._wisp_pager.begin_step(num_tokens, is_prefill=is_prefill)
        self._wisp_device_tally.begin_step(scheduler_output)

    def _wisp_end_step(self) -> None:
        self._wisp_pager.end_step()
        if not isinstance(self._wisp_pager, ResidentExperts):
            self._wisp_device_tally.end_step(_batch_of(self.model_runner))

    def _wisp_clock(self) -> Clock:
        return StepClock()

    def _wisp_export_signatures(self) -> list[Signature]:
        return self._wisp_device_tally.export_touched()

    def _wisp_synchronize(self) -> None:
        torch.accelerator.synchronize()


def _batch_of(model_runner: Any) -> Any:
    """The batch that the runner has just launched, in its order; None if it launched nothing.

    vLLM's second runner keeps it between running the model and sampling; the first one, which a setting may bring back,
    has no batch of that kind there.
    """
    return getattr(getattr(model_runner, "execute_model_state", None), "input_batch", None)
