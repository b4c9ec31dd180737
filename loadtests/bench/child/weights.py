"""Made-up weights, the same in every mode: vLLM's dummy loader draws other numbers on the host than on a GPU."""

from __future__ import annotations

import math
import zlib

import torch
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from wisp_core.pager.registry import current_pager

LOAD_FORMAT = "wisp_bench"
_CHUNK_BYTES = 64 << 20  # drawn at once: little memory beside the model


@register_model_loader(LOAD_FORMAT)
class SeededLoader(BaseModelLoader):  # type: ignore[misc]
    """Uniform weights with the variance of 1 / inputs, drawn on the engine's device wherever the parameter lies.

    Norm weights are ones. A parameter's numbers depend on its name and shape alone.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def load_weights(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Fill all parameters in place."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        pager = current_pager()
        is_attached = pager is not None and pager.host_memory.is_filled
        for name, parameter in model.named_parameters():
            if is_attached and name.rpartition(".")[2].startswith(("w13_", "w2_")):
                continue  # another process on this host has drawn them
            if parameter.dim() < 2:
                parameter.data.fill_(1.0)
                continue
            _fill(parameter.data, device, seed=zlib.crc32(name.encode()))


def _fill(weights: torch.Tensor, device: torch.device, seed: int) -> None:
    generator = torch.Generator(device=device).manual_seed(seed)
    bound = math.sqrt(3.0 / weights.shape[-1])
    row_bytes = weights[0].numel() * weights.element_size()
    num_rows = max(1, _CHUNK_BYTES // row_bytes)
    scratch = torch.empty_like(weights[:num_rows], device=device)
    for start in range(0, weights.shape[0], num_rows):
        chunk = weights[start : start + num_rows]
        chunk.copy_(scratch[: len(chunk)].uniform_(-bound, bound, generator=generator))


def register() -> None:
    """Entry point of a vLLM plugin: importing this module has registered the loader."""
