"""The complete configuration of an online run, and why its numbers are what they are.

The tiny model stands for a 30B one with 8-bit experts (28 GB) on a 24 GB card behind PCIe 4.0 x16 (25 GB/s), scaled
down so that the proportions that a split depends on stay:

- 1 of 16 experts per token; both pools together hold about 60 % of the experts' bytes.
- A context of 4,096 tokens (for 32,768) takes 8 % of the experts' bytes in KV, and 16 prefill passes.
- The link's speed makes a decode step of one stream in which every lookup misses cost 16 times its compute, as 384
  copies of 4.7 MB at 25 GB/s (72 ms) cost beside some 4.5 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from loadtests.service.running import service_file, tenant
from services.config import ServiceConfig
from wisp_core.tiny_model.tiny import TinyModelConfig

MODEL = TinyModelConfig(experts=64, top_k=4, moe_intermediate=128, kv_heads=1)
SERVED_NAME = "tiny-moe"
TENANTS = ("acme", "globex", "initech")


@dataclass(frozen=True, kw_only=True)
class OnlineConfig:
    """Workload, service and what is compared on it."""

    name: str = "online"
    model: TinyModelConfig = MODEL
    workflow: str = "shifts"
    num_turns: int = 500
    seed: int = 0
    max_context_tokens: int = 4096
    time_scale: float = 0.1
    """Of the workflow's pauses, as turns of this model are shorter too."""
    mixed_share: float = 0.5
    """Of a prompt's words are of any topic, so that a pass over a long prompt needs nearly every expert."""
    caps: tuple[int, ...] = (8, 24, 28, 30, 32)
    """Static splits, in expert slots per layer; KV gets the rest."""
    policy: str = "mv_wsa"
    num_replicas: int = 2
    vram_budget_bytes: int = 44_000_000
    activation_bytes: int = 8_388_608
    link_bytes_per_s: float = 25e6
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 256
    block_tokens: int = 32
    window_s: float = 10.0
    epoch_s: float = 1.0
    deadline_s: float = 1800.0
    """Of one way to divide the budget: it is cut there, and its throughput is then known as a bound."""


def service_config(config: OnlineConfig, directory: Path) -> ServiceConfig:
    """The service of a run, with everything it writes in ``directory`` and a free port."""
    replica = {
        "count": config.num_replicas,
        "vram_budget_bytes": config.vram_budget_bytes,
        "activation_bytes": config.activation_bytes,
        "emulated_link_bytes_per_s": config.link_bytes_per_s,
        "window_s": config.window_s,
        "graceful_shutdown_timeout_s": 30,
        "engine": {
            "max_model_len": config.max_context_tokens,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "block_size": config.block_tokens,
            "dtype": "bfloat16",
            "enable_prefix_caching": True,
        },
    }
    policy = {"name": "static_split", "epoch_s": config.epoch_s}
    tenants = [tenant(directory, name) for name in TENANTS]
    file = service_file("wisp-bench", directory, SERVED_NAME, replica, tenants, policy=policy)
    return ServiceConfig.model_validate(file)
