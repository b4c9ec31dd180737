"""Workers whose KV cache and expert slots share one budget: vLLM's own, plus backing, commands and attribution.

Importing this module registers the pager's layer, so a paged engine works even where no entry point is found (a
checkout on PYTHONPATH, Ray's working_dir). Every added method starts with ``wisp_`` and takes and returns JSON.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.v1.sample.sampler import Sampler

from wisp_core.contracts import MemoryLayout, Signature, blocks_of
from wisp_core.engine.dense_bytes import dense_parameter_bytes
from wisp_core.engine.host_kv import check_holds_a_block, check_host_kv
from wisp_core.engine.kv_backing import RegionForZeros, block_group, kv_geometry
from wisp_core.engine.pooled_memory import PooledMemory
from wisp_core.engine.reports import LayoutReport, PagerReport
from wisp_core.errors import ConfigurationError
from wisp_core.memory.layout import kv_groups_beside
from wisp_core.memory.region import Backing
from wisp_core.pager.interface import ExpertPager
from wisp_core.pager.paged_experts import paged_layers
from wisp_core.pager.plugin import register
from wisp_core.pager.registry import current_pager
from wisp_core.pager.resident_experts import Clock, ResidentExperts
from wisp_core.settings import WispSettings

register()

logger = init_logger(f"vllm.{__name__}")  # below "vllm", whose handlers and level a server configures


class WispWorkerMixin:
    """The worker's side of a paged, resizable engine."""

    # vLLM's worker provides these.
    vllm_config: Any
    model_runner: Any
    get_kv_cache_spec: Callable[[], dict[str, Any]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        settings = WispSettings.from_additional_config(self.vllm_config.additional_config)
        if settings is None or settings.vram_budget_bytes is None:
            raise ConfigurationError("a WiSP worker needs additional_config.wisp.vram_budget_bytes")
        self._wisp_settings = settings
        self._wisp_budget_bytes = 0
        self._wisp_other_bytes = 0
        self._wisp_measured_other_bytes = 0
        self._wisp_pager: ExpertPager | ResidentExperts
        self._wisp_zeros: RegionForZeros
        self._wisp_memory: PooledMemory

    # -- vLLM's life cycle ----------------------------------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load, then check that the experts are ours: vLLM logs a plugin that fails and goes on without it."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        pager = current_pager()
        if pager is None or not pager.is_ready:
            raise ConfigurationError("no expert layer of this model is paged: it has none, or it is not vLLM's own")
        self._wisp_pager = pager

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, and compile what vLLM leaves for the first step that is asked for log-probabilities: seconds."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        vocab_size, device = self.vllm_config.model_config.get_vocab_size(), self.model_runner.device
        with torch.inference_mode():
            logprobs, token_ids = (
                torch.zeros(1, vocab_size, device=device),
                torch.zeros(1, dtype=torch.int64, device=device),
            )
            Sampler.gather_logprobs(logprobs, 1, token_ids)
        return times

    def determine_available_memory(self) -> int:
        """Bytes of the KV address range: the pooled budget less the experts at their smallest cap, whole groups."""
        self._wisp_profile()
        settings = self._wisp_settings
        dense_bytes = dense_parameter_bytes(self.model_runner.get_model())
        activation_bytes = self._wisp_activation_bytes()
        self._wisp_measured_other_bytes = dense_bytes + activation_bytes
        self._wisp_other_bytes = self._wisp_fixed_bytes(self._wisp_measured_other_bytes)
        self._wisp_budget_bytes = (settings.vram_budget_bytes or 0) - self._wisp_other_bytes
        specs = self.get_kv_cache_spec()
        group_blocks, block_bytes = block_group(specs, self._wisp_backing().page_bytes)
        if settings.kv_host_bytes:
            check_holds_a_block(settings.kv_host_bytes, block_bytes)
            check_host_kv(settings.kv_host_bytes)
        group_bytes = group_blocks * block_bytes
        self._wisp_bypass_if_it_fits(group_blocks, group_bytes)
        experts_bytes = self._wisp_pager.experts_bytes_by_cap()[self._wisp_min_cap]
        num_groups = kv_groups_beside(experts_bytes, pooled_bytes=self._wisp_budget_bytes, group_bytes=group_bytes)
        needed = blocks_of(self.vllm_config.model_config.max_model_len, self.vllm_config.cache_config.block_size) + 1
        if num_groups * group_blocks < needed:
            needed_bytes = self._wisp_other_bytes + experts_bytes + -(-needed // group_blocks) * group_bytes
            raise ConfigurationError(
                f"vram_budget_bytes {settings.vram_budget_bytes} is too small: {self._wisp_other_bytes} outside the "
                f"pools ({dense_bytes} dense weights) + {experts_bytes} experts at cap {self._wisp_min_cap} leave "
                f"no room for the {needed} KV blocks of {block_bytes} bytes that max_model_len "
                f"{self.vllm_config.model_config.max_model_len} needs; set vram_budget_bytes to {needed_bytes} or "
                "more, or lower max_model_len"
            )
        return int(num_groups * group_bytes)

    def _wisp_fixed_bytes(self, measured_bytes: int) -> int:
        """What stays outside the pools: the configured number, where there is one that suffices."""
        configured = self._wisp_settings.other_bytes
        if configured is not None and configured < measured_bytes:
            raise ConfigurationError(
                f"other_bytes is {configured}, but dense weights and activations take {measured_bytes}: set it to that "
                "or more, or leave it out"
            )
        return measured_bytes if configured is None else configured

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag != "kv_cache":
            context: AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)  # type: ignore[misc]
            return context
        self._wisp_zeros = RegionForZeros(self._wisp_backing())
        return self._wisp_zeros

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Allocate the KV cache; from here on both pools are accounted."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        region = self._wisp_zeros.region
        if region is None:
            raise ConfigurationError("vLLM did not allocate its KV cache where expected; use the tested vLLM version")
        self._wisp_memory = PooledMemory(
            budget_bytes=self._wisp_budget_bytes,
            experts=self._wisp_pager,
            kv_region=region,
            geometry=kv_geometry(kv_cache_config, region.page_bytes),
        )

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Run one step, and tell whoever counts what it is. An error here ends the engine, and it is restarted."""
        self._wisp_memory.check_usable()
        self._wisp_begin_step(scheduler_output)
        try:
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        finally:
            self._wisp_end_step()

    # -- commands -------------------------------------------------------------------------------------------------

    def wisp_layout(self) -> dict[str, Any]:
        """`LayoutReport`: what does not change."""
        pager, geometry = self._wisp_pager, self._wisp_memory.geometry
        layout = MemoryLayout(
            page_bytes=geometry.page_bytes,
            num_layers=pager.num_layers,
            num_experts=pager.num_experts,
            top_k=pager.top_k,
            is_paged=not isinstance(pager, ResidentExperts),
            min_cap=self._wisp_min_cap,
            experts_bytes_by_cap=pager.experts_bytes_by_cap(),
            expert_bytes=pager.expert_bytes,
            block_tokens=self.vllm_config.cache_config.block_size,
            block_bytes=geometry.block_bytes,
            kv_group_blocks=geometry.group_blocks,
            max_kv_blocks=geometry.num_blocks - 1,
            max_model_len=self.vllm_config.model_config.max_model_len,
            max_num_seqs=self.vllm_config.scheduler_config.max_num_seqs,
            max_pass_tokens=self.vllm_config.scheduler_config.max_num_batched_tokens,
        )
        return LayoutReport(
            layout=layout,
            budget_bytes=self._wisp_budget_bytes,
            other_bytes=self._wisp_other_bytes,
            measured_other_bytes=self._wisp_measured_other_bytes,
            worker_pid=os.getpid(),
            emulated_link_bytes_per_s=self._wisp_settings.emulated_link_bytes_per_s,
        ).model_dump()

    def wisp_set_cap(self, cap: int) -> None:
        """Give every layer ``cap`` slots."""
        self._wisp_synchronize()
        self._wisp_memory.set_cap(cap)

    def wisp_map_groups(self, groups: list[int]) -> None:
        """Back KV groups with zero pages."""
        self._wisp_synchronize()
        self._wisp_memory.map_groups(groups)

    def wisp_unmap_groups(self, groups: list[int]) -> None:
        """Return the pages of KV groups that are out of vLLM's pool."""
        self._wisp_synchronize()
        self._wisp_memory.unmap_groups(groups)

    def wisp_memory(self) -> dict[str, Any]:
        """`MemoryReport`: both pools now."""
        return self._wisp_memory.report().model_dump()

    def wisp_pager(self) -> dict[str, Any]:
        """`PagerReport`: counters and curves."""
        return PagerReport.of(self._wisp_pager).model_dump()

    def wisp_signatures(self) -> list[dict[str, Any]]:
        """`Signature` of each key touched since the last call."""
        return [report.model_dump() for report in self._wisp_export_signatures()]

    def wisp_check_integrity(self) -> None:
        """Raise IntegrityError when a conservation check fails."""
        self._wisp_memory.check_integrity()

    def wisp_pid(self) -> int:
        """Proves that the worker answers, and that it can run steps."""
        self._wisp_memory.check_usable()
        return os.getpid()

    # -- all experts fit ------------------------------------------------------------------------------------------

    def _wisp_bypass_if_it_fits(self, group_blocks: int, group_bytes: int) -> None:
        """Give every expert its place for good when the budget allows it beside the KV cache that is asked for."""
        settings, pager = self._wisp_settings, self._wisp_pager
        if isinstance(pager, ResidentExperts):
            return
        experts_bytes = pager.experts_bytes_by_cap()[-1]
        tokens = max(self.vllm_config.model_config.max_model_len, settings.declared_kv_tokens or 0)
        blocks = blocks_of(tokens, self.vllm_config.cache_config.block_size) + 1  # the null block
        kv_bytes = -(-blocks // group_blocks) * group_bytes
        if not settings.bypass_if_it_fits or experts_bytes + kv_bytes > self._wisp_budget_bytes:
            return
        self._wisp_pager = ResidentExperts(pager, self._wisp_clock())
        del pager
        layers = paged_layers(self.model_runner.get_model())
        for layer in layers:
            layer.release_slots()
        # Slots first, so that not even for a moment more than all experts is held.
        gc.collect()
        self._wisp_trim()
        for layer in layers:
            layer.hold_experts()
        logger.info(
            "WiSP: the whole model fits: %d bytes of experts and %d of KV cache within the %d that weights and "
            "activations leave, so nothing is paged and no memory moves (bypass_if_it_fits)",
            experts_bytes,
            kv_bytes,
            self._wisp_budget_bytes,
        )

    # -- what differs by platform ---------------------------------------------------------------------------------

    @property
    def _wisp_min_cap(self) -> int:
        if isinstance(self._wisp_pager, ResidentExperts):
            return self._wisp_pager.num_experts
        return self._wisp_settings.min_cap or self._wisp_pager.top_k

    def _wisp_backing(self) -> Backing:
        raise NotImplementedError

    def _wisp_profile(self) -> None:
        """Compile and warm up where vLLM does so while it measures memory."""
        raise NotImplementedError

    def _wisp_activation_bytes(self) -> int:
        """Bytes of activations, workspaces and whatever else is neither weights nor KV."""
        return self._wisp_settings.activation_bytes

    def _wisp_clock(self) -> Clock:
        """Times steps of which no pager knows."""
        raise NotImplementedError

    def _wisp_export_signatures(self) -> list[Signature]:
        raise NotImplementedError

    def _wisp_trim(self) -> None:
        """Give pages that nobody holds any more back to the system, where a backing keeps some."""

    def _wisp_begin_step(self, scheduler_output: Any) -> None:
        raise NotImplementedError

    def _wisp_end_step(self) -> None:
        raise NotImplementedError

    def _wisp_synchronize(self) -> None:
        """Wait until no step in flight can touch a page that moves."""
        raise NotImplementedError
