"""Settings of one paged engine: the ``wisp`` object of vLLM's ``--additional-config``."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from wisp_core.errors import ConfigurationError


class EngineSettings(BaseModel):
    """What the pager, the arena and the resizer of an engine need to know, by the names that a service's file has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    activation_bytes: int = Field(
        default=64 << 20,
        ge=0,
        description="Part of the budget set aside for activations and workspaces, bytes. On a GPU these are measured "
        "at start, and this is for what that does not see: at least 1 GiB.",
    )
    other_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Part of the budget outside the pools: dense weights, activations, captured graphs. Set, it is "
        "taken as it is, so that the KV capacity is known before the start (`wisp plan` gives it), and an engine that "
        "needs more is refused; None: as measured at start.",
    )
    bypass_if_it_fits: bool = Field(
        default=True,
        description="Page nothing when all experts fit: vLLM's own layers then run, and memory does not move. With a "
        "budget that is so when no cap is set and dense weights, activations, all experts and the KV cache fit it; "
        "without one when the cap is the number of experts.",
    )
    declared_kv_tokens: int | None = Field(
        default=None,
        gt=0,
        description="Tokens of KV cache that must fit beside all experts, or they are paged. None: max_model_len.",
    )
    min_cap: int | None = Field(default=None, gt=0, description="Smallest cap a plan may ask for; None: top-k.")
    emulated_link_bytes_per_s: float | None = Field(
        default=None,
        gt=0,
        description="CPU only: charge expert copies at this speed. None: copies cost what they cost.",
    )
    window_s: float = Field(
        default=10.0,
        gt=0,
        description="Span of the rates, means and peaks that a snapshot reports, seconds: above usual think times, and "
        "the time a policy needs to notice that the work has changed.",
    )
    staging_bytes: int = Field(
        default=256 << 20,
        gt=0,
        description="GPU only: part of the budget through which long prompts stream experts that have no slot, bytes.",
    )
    prefetch: int = Field(
        default=0,
        ge=0,
        le=64,
        description="GPU only: experts of each layer that are fetched on a guess from the routing so far, per decode "
        "step, while the layer before computes. It never changes an answer. 0: none, which is faster where the link is "
        "what a step waits for.",
    )
    host_memory_bytes: int | None = Field(
        default=None,
        gt=0,
        description="GPU only: most host memory that experts may lock. None: what the system reports as available.",
    )
    lock_host_memory: bool = Field(
        default=True,
        description="GPU only: page-lock the experts in host memory, so that kernels read them in place. Without it, "
        "and where CUDA refuses it, the host copies what each layer needs, which is many times slower.",
    )
    host_store_dir: str | None = Field(
        default=None,
        description="Directory of a memory file system (/dev/shm) in which this host's replicas keep one copy of the "
        "experts; it stays when they end, so that a restart does not read them again. None: a copy of this process's "
        "own. A plain `vllm serve` needs `--load-format wisp` to spare the reading too.",
    )
    kv_host_bytes: int = Field(
        default=0,
        ge=0,
        description="Host memory for KV blocks that leave the device, bytes: a session that returns fetches its prefix "
        "instead of computing it. By vLLM's own KV offloading, beside the experts' copy; 0: none.",
    )
    drain_timeout_s: float = Field(default=30.0, gt=0, description="Longest wait for a drained barrier, seconds.")
    co_schedule: bool = Field(
        default=False,
        description="Hold turns back whose experts do not fit the slots beside those of running turns: for as long as "
        "eight turns usually take, 2 s at least and 30 s at most.",
    )


class WispSettings(EngineSettings):
    """The ``wisp`` object. JSON only, as vLLM passes it on."""

    cap: int | None = Field(
        default=None, gt=0, description="Expert slots per layer at start (C); None: as many as the budget allows."
    )
    vram_budget_bytes: int | None = Field(
        default=None,
        gt=0,
        description="Everything this engine may hold on its device: dense weights, activations, experts, KV. "
        "None: the cap alone decides, and KV stays as vLLM sizes it (plain `vllm serve`).",
    )

    @model_validator(mode="after")
    def _host_kv_is_of_a_budget(self) -> WispSettings:
        if self.kv_host_bytes and self.vram_budget_bytes is None:
            raise ValueError("kv_host_bytes needs vram_budget_bytes; a plain `vllm serve` has --kv-offloading-size")
        return self

    @classmethod
    def from_additional_config(cls, additional_config: dict[str, Any]) -> WispSettings | None:
        """Read the ``wisp`` object; None when there is none. Raises ConfigurationError naming each bad setting."""
        if "wisp" not in additional_config:
            return None
        try:
            return cls.model_validate(additional_config["wisp"])
        except ValidationError as error:
            details = "; ".join(
                f"additional_config.wisp.{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})"
                for e in error.errors()
            )
            raise ConfigurationError(details) from error
