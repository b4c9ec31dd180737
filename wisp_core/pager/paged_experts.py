"""vLLM's RoutedExperts with its experts paged: the only adapter between vLLM's layers and the pager.

How a layer becomes paged: vLLM builds it (weights are created in host memory), loads it, and post-processes it for
its kernel; then every ``w13_*`` and ``w2_*`` parameter is handed to the pager and its ``.data`` is pointed at slot
tensors of the same shape. In a forward, vLLM's own kernels run on slots, with expert ids mapped to slot ids.

The paged body is one opaque custom op, because on CPU vLLM traces this layer into its compiled graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.utils import weights_already_processed
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)

from wisp_core.memory.memfd import MemfdBacking
from wisp_core.pager.host_files import HostFiles, checkpoint_facts
from wisp_core.pager.host_memory import PageableMemory
from wisp_core.pager.host_store import paged_parameters
from wisp_core.pager.interface import ExpertPager, ForwardInfo
from wisp_core.pager.pager import Pager
from wisp_core.pager.registry import set_current_pager
from wisp_core.pager.support import refuse_unsupported
from wisp_core.settings import WispSettings

logger = init_logger(f"vllm.{__name__}")  # below "vllm", whose handlers and level a server configures


_OF_CHECKPOINTS = {"auto", "hf", "safetensors", "wisp"}  # load formats that give the same weights

RunLayer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Callable[[], ForwardInfo | None]], torch.Tensor]
"""Computes one paged layer: ``(x, topk_weights, topk_ids, describe) -> output``."""


class PagedRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """RoutedExperts whose weights live in host memory; acts as vLLM's own without a ``wisp`` object."""

    _pager: ExpertPager | None = None
    _pager_index: int = 0
    _run: RunLayer
    _host_tensors: Mapping[str, torch.Tensor]

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: FusedMoEConfig) -> FusedMoEMethodBase:
        """Where vLLM chooses the layer's kernel, before it creates weights: the place to refuse and to intercept."""
        quant_method = super()._get_quant_method(prefix, quant_config, moe_config)
        vllm_config = get_current_vllm_config()
        additional_config = vllm_config.additional_config
        settings = WispSettings.from_additional_config(additional_config if isinstance(additional_config, dict) else {})
        if settings is None or _is_bypassed(settings, moe_config):
            return quant_method
        refuse_unsupported(vllm_config, moe_config, quant_method, settings)
        platform = _platform(vllm_config.device_config.device_type)
        self._pager = _pager_of_engine(vllm_config, moe_config, settings, platform)
        self._pager_index = self._pager.add_layer()
        self._run = platform.runner(self._pager, self._pager_index, self)
        self._intercept(quant_method, self._pager, vllm_config.compilation_config)
        return quant_method

    def weight_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Load a part of a parameter, unless another process on this host has done so."""
        if self._pager is None or not self._pager.host_memory.is_filled:
            return super().weight_loader(*args, **kwargs)
        return True if kwargs.get("return_success") else None

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the routed experts of ``x`` [rows, hidden]; shared experts have run already."""
        if self._pager is None:
            return super().forward_modular(x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        return torch.ops.wisp.paged_experts(x, topk_weights, topk_ids, _encode_layer_name(self.layer_name))

    def run_paged(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """Body of the custom op."""
        return self._run(x, topk_weights, topk_ids, _describe_forward)

    def release_slots(self) -> None:
        """Let go of the pager and its slots; `hold_experts` must follow before the next forward."""
        for name in self._host_tensors:
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.new_empty(0)
        del self.quant_method.create_weights, self.quant_method.process_weights_after_loading  # ours; the class has its
        self._pager, self._run = None, self._run_plain

    def hold_experts(self) -> None:
        """Be vLLM's plain layer: every expert on the device, where on CPU the host's tensors are already."""
        for name, tensor in self._host_tensors.items():
            parameter = self.get_parameter(name)
            parameter.data = tensor.to(parameter.device)
        self._host_tensors = {}

    def _run_plain(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        describe: Callable[[], ForwardInfo | None],
    ) -> torch.Tensor:
        """For a graph that was compiled while the layer was paged."""
        output: torch.Tensor = super().forward_modular(x, topk_weights, topk_ids)
        return output

    def _intercept(self, quant_method: FusedMoEMethodBase, pager: ExpertPager, compilation_config: Any) -> None:
        """Create this layer's weights in host memory and page them once they are in the kernel's format."""
        host = pager.host_memory
        create_weights: Callable[..., None] = quant_method.create_weights
        process_weights: Callable[..., None] = quant_method.process_weights_after_loading

        def create_in_host_memory(layer: RoutedExperts, **kwargs: Any) -> None:
            with host.creating():
                create_weights(layer=layer, **kwargs)

        def process_and_page(layer: RoutedExperts) -> None:
            # What another process has loaded is in the kernel's format already.
            with weights_already_processed() if host.is_filled else nullcontext():
                process_weights(layer)
            parameters = paged_parameters(self.layer_name, self.named_parameters(recurse=False), pager.num_experts)
            if host.is_filled:
                tensors = host.attach(self._pager_index)
            else:
                tensors = host.publish(self._pager_index, {name: p.data for name, p in parameters.items()})
            self._host_tensors = tensors
            slots = pager.page_layer(self._pager_index, tensors)
            for name, parameter in parameters.items():
                # Only .data: kernels and quantization configs hold these very Parameter objects.
                parameter.data = slots[name]
            if pager.is_ready:
                host.finish()
                if not host.is_in_reach:
                    compilation_config.cudagraph_mode = CUDAGraphMode.NONE  # nothing is captured yet
                _log_ready(pager)

        # Else vLLM moves each layer to the device for post-processing and back to the host afterwards.
        quant_method.requires_device_loading = False
        quant_method.create_weights = create_in_host_memory
        quant_method.process_weights_after_loading = process_and_page


def paged_layers(model: torch.nn.Module) -> list[PagedRoutedExperts]:
    """The layers of ``model`` whose experts are paged, in the order of the forward."""
    return [module for module in model.modules() if isinstance(module, PagedRoutedExperts) and module._pager]


# vLLM's loaders ask for this before they name the experts' parameters.
PagedRoutedExperts.weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]


@contextmanager
def _host_weights(layer: PagedRoutedExperts, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let the layer's parameters be the host's ``tensors`` for one call of its kernel."""
    parameters = {name: layer.get_parameter(name) for name in tensors}
    slots = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = tensors[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = slots[name]


class _Host:
    """On CPU: the host decides. Decode steps run once per sub-batch of rows, prefills once on the host's tensors."""

    def pager(self, settings: WispSettings, moe_config: FusedMoEConfig, vllm_config: Any) -> ExpertPager:
        return Pager(
            settings,
            moe_config.num_experts,
            moe_config.experts_per_token,
            MemfdBacking(),
            PageableMemory(_host_files(settings, vllm_config)),
        )

    def runner(self, pager: Any, index: int, layer: PagedRoutedExperts) -> RunLayer:
        def compute(x: torch.Tensor, topk_weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = layer.quant_method.apply(
                layer=layer,
                x=x,
                topk_weights=topk_weights,
                topk_ids=ids,
                shared_experts=None,
                shared_experts_input=None,
            )
            return output

        def run(
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            describe: Callable[[], ForwardInfo | None],
        ) -> torch.Tensor:
            def apply(rows: slice, slot_ids: torch.Tensor) -> torch.Tensor:
                return compute(x[rows], topk_weights[rows], slot_ids)

            def apply_in_place() -> torch.Tensor:
                with _host_weights(layer, pager.host_tensors(index)):
                    return compute(x, topk_weights, topk_ids)

            output: torch.Tensor = pager.run_layer(index, topk_ids, apply, describe, apply_in_place)
            return output

        return run


class _Device:
    """On a GPU: the device decides, and a decode step is launches only."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type

    def pager(self, settings: WispSettings, moe_config: FusedMoEConfig, vllm_config: Any) -> ExpertPager:
        # These need Triton and cuda.bindings, which a CPU machine has not.
        from wisp_core.memory.cuda_vmm import CudaBacking
        from wisp_core.pager.device.device_pager import DevicePager
        from wisp_core.pager.pinned_memory import PinnedMemory

        if vllm_config.compilation_config.cudagraph_mode.mixed_mode() is not CUDAGraphMode.NONE:
            logger.warning(
                "WiSP: prefills that run in CUDA graphs take slots from the decode steps; better set "
                '--compilation-config \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\''
            )
        return DevicePager(
            settings,
            moe_config.num_experts,
            moe_config.experts_per_token,
            device=torch.device(self._device_type, torch.accelerator.current_device_index()),
            backing=CudaBacking(self._device_type),
            host_memory=PinnedMemory(
                settings.host_memory_bytes,
                _host_files(settings, vllm_config),
                is_locking=settings.lock_host_memory,
            ),
        )

    def runner(self, pager: Any, index: int, layer: PagedRoutedExperts) -> RunLayer:
        from wisp_core.pager.device.layer_runner import LayerRunner
        from wisp_core.pager.device.unlocked_runner import UnlockedRunner

        locked, unlocked = LayerRunner(pager, index, layer), UnlockedRunner(pager, index, layer)

        def run(
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            describe: Callable[[], ForwardInfo | None],
        ) -> torch.Tensor:
            # Which one is known once the weights are created.
            runner = locked if pager.host_memory.is_in_reach else unlocked
            return runner.run(x, topk_weights, topk_ids, describe)

        return run


_Platform = _Host | _Device


def _host_files(settings: WispSettings, vllm_config: Any) -> HostFiles | None:
    """The copy that this host's replicas share, keyed by all that its bytes depend on."""
    if settings.host_store_dir is None:
        return None
    model, load_format = vllm_config.model_config, str(vllm_config.load_config.load_format)
    subject = {
        "model": str(model.model),
        "revision": model.revision,
        "dtype": str(model.dtype),
        "device": vllm_config.device_config.device_type,  # whose kernels' format it is
        "load_format": "checkpoint" if load_format in _OF_CHECKPOINTS else load_format,
    }
    version = {
        "vllm": vllm.__version__,
        "files": checkpoint_facts(model.model),
        "commit": getattr(model.hf_config, "_commit_hash", None),
        "config": model.hf_config.to_dict(),
    }
    return HostFiles(Path(settings.host_store_dir), subject=subject, version=version)


def _platform(device_type: str) -> _Platform:
    return _Host() if device_type == "cpu" else _Device(device_type)


def _pager_of_engine(
    vllm_config: Any, moe_config: FusedMoEConfig, settings: WispSettings, platform: _Platform
) -> ExpertPager:
    """The pager that the layers built before this one use; a new one for the first layer of an engine."""
    for runner in vllm_config.compilation_config.static_forward_context.values():
        experts = getattr(runner, "routed_experts", None)
        if isinstance(experts, PagedRoutedExperts) and experts._pager is not None:
            return experts._pager
    pager = platform.pager(settings, moe_config, vllm_config)
    set_current_pager(pager)
    return pager


def _is_bypassed(settings: WispSettings, moe_config: FusedMoEConfig) -> bool:
    """Whether a cap without a budget holds every expert, so that paging would only cost."""
    is_bypassed = (
        settings.bypass_if_it_fits and settings.vram_budget_bytes is None and settings.cap == moe_config.num_experts
    )
    if is_bypassed:
        logger.info_once("WiSP: the cap holds all %d experts, so they are not paged", moe_config.num_experts)
    return is_bypassed


def _describe_forward() -> ForwardInfo | None:
    """Kind and size of the running forward from its attention metadata; None in profiling and dummy runs."""
    metadata = get_forward_context().attn_metadata
    if not metadata:
        return None
    layers = metadata if isinstance(metadata, dict) else metadata[0]
    for of_layer in layers.values():
        longest = getattr(of_layer, "max_query_len", None)
        if longest is not None:
            return ForwardInfo(is_prefill=longest > 1, num_tokens=of_layer.num_actual_tokens)
    return None


def _log_ready(pager: ExpertPager) -> None:
    logger.info(
        "WiSP: %d layers paged, %d of %d experts in slots, %.1f MiB",
        pager.num_layers,
        pager.cap,
        pager.num_experts,
        pager.experts_bytes_by_cap()[pager.cap] / 2**20,
    )
    if pager.cap == pager.num_experts:
        logger.warning("WiSP: the cap holds every expert, so paging only costs")


def _paged_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: LayerNameType
) -> torch.Tensor:
    runner = get_forward_context().no_compile_layers[_resolve_layer_name(layer_name)]
    output: torch.Tensor = runner.routed_experts.run_paged(x, topk_weights, topk_ids)
    return output


def _paged_experts_fake(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: LayerNameType
) -> torch.Tensor:
    return torch.empty_like(x)


_library = torch.library.Library("wisp", "FRAGMENT")
direct_register_custom_op(
    op_name="paged_experts",
    op_func=_paged_experts,
    fake_impl=_paged_experts_fake,
    target_lib=_library,
    tags=(torch.Tag.needs_fixed_stride_order,),
)
