"""vLLM's own loader of checkpoints, less the experts that this host holds already.

Reading them only to throw them away would make every restart of a replica as slow as its first start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader import utils as loader_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from wisp_core.pager.registry import current_pager
from wisp_core.private_names import check_loading

check_loading(DefaultModelLoader, loader_utils)

LOAD_FORMAT = "wisp"
"""vLLM's ``load_format`` of this loader: like "auto", for any Hugging Face checkpoint."""

_EXPERTS = ".experts."


@register_model_loader(LOAD_FORMAT)
class ExpertLoader(DefaultModelLoader):  # type: ignore[misc]
    """Loads everything, or everything but the experts when the pager is attached to a copy that others have loaded."""

    def __init__(self, load_config: LoadConfig) -> None:
        """The configuration but for its ``load_format`` is vLLM's."""
        super().__init__(dataclasses.replace(load_config, load_format="auto"))

    def _get_weights_iterator(self, source: DefaultModelLoader.Source) -> Iterator[tuple[str, torch.Tensor]]:
        pager = current_pager()
        if pager is None or not pager.host_memory.is_filled:
            yield from super()._get_weights_iterator(source)
            return
        # vLLM has two filters that spare the reading: of whole files, and of single experts, here all of them.
        self.local_expert_ids: set[int] = set()
        source = dataclasses.replace(source, is_unused_weight=_is_unused(source.is_unused_weight))
        for name, tensor in super()._get_weights_iterator(source):
            if _EXPERTS not in name:  # fused experts come as views that nobody has read yet
                yield name, tensor


def _is_unused(of_model: Any) -> Any:
    return lambda name: _EXPERTS in name or (of_model is not None and of_model(name))
