"""Workers of the CPU engine."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from wisp_core.contracts import Signature
from wisp_core.engine.cpu_seeds import CpuSeedsMixin
from wisp_core.engine.session_tally import SessionTally
from wisp_core.engine.step_rows import StepRows, step_kind
from wisp_core.engine.worker import WispWorkerMixin
from wisp_core.memory.memfd import MemfdBacking
from wisp_core.memory.region import Backing
from wisp_core.pager.pager import Pager
from wisp_core.pager.resident_experts import Clock, HostClock, ResidentExperts


class WispCPUWorker(CpuSeedsMixin, WispWorkerMixin, CPUWorker):  # type: ignore[misc]
    """On CPU: memfd mappings; a step is over when its call returns."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load; from then on sessions are told apart by the routing that the pager sees."""
        super().load_model(*args, **kwargs)
        pager = self._wisp_pager
        assert isinstance(pager, Pager), "only a loaded model can be found to fit"
        self._wisp_tally = SessionTally(num_layers=pager.num_layers, num_experts=pager.num_experts)
        pager.observer = self._wisp_tally

    def _wisp_backing(self) -> Backing:
        return MemfdBacking()

    def _wisp_profile(self) -> None:
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()

    def _wisp_begin_step(self, scheduler_output: Any) -> None:
        if isinstance(self._wisp_pager, ResidentExperts):
            self._wisp_pager.begin_step(*step_kind(scheduler_output))
        else:
            self._wisp_tally.begin_step(StepRows(scheduler_output, self.model_runner))

    def _wisp_end_step(self) -> None:
        if isinstance(self._wisp_pager, ResidentExperts):
            self._wisp_pager.end_step()
        else:
            self._wisp_tally.end_step()

    def _wisp_clock(self) -> Clock:
        return HostClock()

    def _wisp_export_signatures(self) -> list[Signature]:
        return self._wisp_tally.export_touched()

    def _wisp_synchronize(self) -> None:
        return


class ResidentCPUWorker(CpuSeedsMixin, CPUWorker):  # type: ignore[misc]
    """vLLM's own worker for an engine that holds every expert, as a reference."""
