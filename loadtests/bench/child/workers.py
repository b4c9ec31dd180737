"""Workers that replay a trace: vLLM's own and WiSP's, with the routers wrapped between loading and graph capture."""

from __future__ import annotations

from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from loadtests.bench.child.replay import Replay
from wisp_core.engine import gpu_worker
from wisp_core.engine.cpu_seeds import CpuSeedsMixin
from wisp_core.pager.plugin import register

register()  # also where the package is not installed, so that vLLM finds no entry point

_replay: Replay | None = None


def replay_with(replay: Replay | None) -> None:
    """What the next engine in this process replays; None: it routes as its router says."""
    global _replay
    _replay = replay


class _ReplayMixin:
    vllm_config: Any
    model_runner: Any
    device: torch.device

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, then wrap the routers."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if _replay is not None:
            max_tokens = self.vllm_config.scheduler_config.max_num_batched_tokens
            _replay.install(self.model_runner.get_model(), self.model_runner, self.device, max_tokens)


class BenchGPUWorker(_ReplayMixin, Worker):  # type: ignore[misc]
    """On a GPU; experts are paged or not as the engine's arguments say."""


if current_platform.is_cpu():
    # Elsewhere this import breaks the process: it replaces torch's events and streams, and vLLM's buffers.
    from vllm.v1.worker.cpu_worker import CPUWorker

    class BenchCPUWorker(_ReplayMixin, CpuSeedsMixin, CPUWorker):  # type: ignore[misc]
        """On CPU."""


def replay_in_wisp_workers() -> None:
    """Let the engines that WiSP sizes replay too: vLLM finds their worker by its name. Once per process."""

    class ReplayingWispGPUWorker(_ReplayMixin, gpu_worker.WispGPUWorker):
        """On a GPU, with a budget."""

    gpu_worker.WispGPUWorker = ReplayingWispGPUWorker  # type: ignore[misc]
