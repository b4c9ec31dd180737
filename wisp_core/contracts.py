"""Every value that crosses a process: frozen, versioned, timestamped.

All of them serialise with ``model_dump_json()`` and read back with ``model_validate_json()``.
Unknown keys are refused, so a reader of another schema version fails loudly; readers in services treat such a
value like a missing one. Times are Unix seconds (``time.time()``); data is *stale* once ``at_s`` is older than the
reader's ``stale_after_s``, and stale data is used like missing data, never silently like fresh data.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION: Literal[1] = 1


class Contract(BaseModel):
    """Base of all contracts."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    schema_version: Literal[1] = SCHEMA_VERSION
    at_s: float = Field(default_factory=time.time, description="When this was written, Unix seconds.")

    def is_stale(self, now_s: float, stale_after_s: float) -> bool:
        """Whether this value is older than ``stale_after_s`` seconds at ``now_s``."""
        return now_s - self.at_s > stale_after_s


class Value(BaseModel):
    """A part of a contract: frozen, without a version or time of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Split(Value):
    """How a replica's pooled budget is divided.

    ``kv_blocks`` counts backed, usable KV blocks without vLLM's null block.
    """

    cap: int = Field(ge=0, description="Expert slots per MoE layer (C).")
    kv_blocks: int = Field(ge=0, description="Usable KV blocks, null block not counted.")


def blocks_of(num_tokens: int, block_tokens: int) -> int:
    """KV blocks that hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_tokens)


class MemoryLayout(Value):
    """Sizes that a solver needs; constant for the life of a replica."""

    page_bytes: int = Field(gt=0)
    num_layers: int = Field(gt=0, description="MoE layers that are paged.")
    num_experts: int = Field(gt=0, description="Experts per layer (E).")
    top_k: int = Field(gt=0)
    is_paged: bool = Field(
        default=True, description="False: the whole model fits, vLLM's own layers hold every expert, min_cap is E."
    )
    min_cap: int = Field(gt=0, description="Smallest cap that is served, at least top_k.")
    experts_bytes_by_cap: tuple[int, ...] = Field(
        description="Index C: bytes of the expert pool at cap C over all layers, whole pages; length E + 1."
    )
    expert_bytes: int = Field(gt=0, description="Bytes copied for one missed expert of one layer, all parameters.")
    block_tokens: int = Field(gt=0, description="Tokens per KV block.")
    block_bytes: int = Field(gt=0, description="Bytes of one KV block over all layers.")
    kv_group_blocks: int = Field(gt=0, description="KV blocks move in groups of this many (whole pages).")
    max_kv_blocks: int = Field(
        gt=0, description="Most usable KV blocks the address range holds, null block not counted."
    )
    max_model_len: int = Field(gt=0, description="Longest request in tokens.")
    max_num_seqs: int = Field(gt=0, description="Most requests running at once.")
    max_pass_tokens: int = Field(default=2048, gt=0, description="Most tokens of one prefill pass.")

    @model_validator(mode="after")
    def _table_covers_every_cap(self) -> Self:
        if len(self.experts_bytes_by_cap) != self.num_experts + 1:
            raise ValueError(f"experts_bytes_by_cap has {len(self.experts_bytes_by_cap)} entries, needs E + 1")
        return self

    @property
    def longest_request_blocks(self) -> int:
        """Blocks of the longest request: less KV than that is never enough."""
        return blocks_of(self.max_model_len, self.block_tokens)

    @property
    def kv_group_bytes(self) -> int:
        """Bytes of a KV group over all layers."""
        return self.kv_group_blocks * self.block_bytes

    def groups_for_blocks(self, kv_blocks: int) -> int:
        """Groups that must be backed for ``kv_blocks`` usable blocks, the null block paid."""
        return -(-(kv_blocks + 1) // self.kv_group_blocks)

    def usable_blocks(self, num_groups: int) -> int:
        """Usable blocks in ``num_groups`` backed groups: all but the null block."""
        return num_groups * self.kv_group_blocks - 1

    def kv_bytes(self, kv_blocks: int) -> int:
        """Bytes of the KV pool with ``kv_blocks`` usable blocks, the null block's group included."""
        return self.groups_for_blocks(kv_blocks) * self.kv_group_bytes

    def pool_bytes(self, split: Split) -> int:
        """Bytes that both pools hold at ``split``."""
        return self.experts_bytes_by_cap[split.cap] + self.kv_bytes(split.kv_blocks)

    def kv_blocks_within(self, num_bytes: int) -> int:
        """Most usable KV blocks that fit ``num_bytes`` (whole groups, null block paid), never below 0."""
        return max(0, min(self.usable_blocks(max(0, num_bytes) // self.kv_group_bytes), self.max_kv_blocks))


class PagerCounts(Value):
    """Expert lookups of one kind of forward, summed over layers, since the engine started."""

    steps: int = 0
    tokens: int = Field(default=0, description="Token rows that were routed.")
    hits: int = Field(default=0, description="Distinct experts per layer and step that were resident.")
    misses: int = Field(default=0, description="Expert copies from host memory to a slot.")
    missed_bytes: int = 0
    distinct: int = Field(default=0, description="Distinct experts, summed over layers and steps.")
    seconds: float = Field(default=0.0, description="Wall time of these forwards, copies included.")
    link_seconds: float = Field(default=0.0, description="Part of it spent copying or charged to the emulated link.")


class ReuseBin(Value):
    """Prefix reuse seen at one distance: with fewer than ``blocks`` KV blocks it would have been lost."""

    blocks: int = Field(ge=0)
    turns_per_s: float = Field(ge=0, description="Turns per second that reused a prefix at this distance.")
    tokens_per_s: float = Field(ge=0, description="Prompt tokens per second that this reuse saved.")
    passes_per_s: float = Field(
        default=0.0,
        ge=0,
        description="Prefill passes per second that it saved: a turn of fewer tokens than a pass "
        "takes needs one anyhow.",
    )


class DemandBin(Value):
    """For which share of the time running and waiting turns needed up to this many KV blocks in full."""

    blocks: int = Field(ge=0)
    share: float = Field(ge=0, le=1)


class CostFit(Value):
    """Compute constants, fitted online to the engine's own steps; transfers over the link are not in them."""

    step_s: float = Field(default=0.0, ge=0, description="Seconds of a decode step without any token.")
    token_s: float = Field(default=0.0, ge=0, description="Seconds per token of a decode step.")
    pass_s: float = Field(default=0.0, ge=0, description="Seconds of a prefill pass without any token.")
    prompt_token_s: float = Field(default=0.0, ge=0, description="Seconds per token of a prefill pass.")
    error_fraction: float = Field(
        default=0.0, ge=0, description="Mean |predicted - measured| / measured of the recent intervals' step time."
    )
    num_samples: int = Field(default=0, ge=0, description="Intervals fitted, 0: nothing is known.")


class KvDemand(Value):
    """What the work asks of the KV pool, measured over the snapshot's window."""

    running_turns: int = 0
    waiting_turns: int = 0
    floor_blocks: int = Field(
        default=0, description="κ_min without the null block: what running turns need in full, at most what is there."
    )
    demand_blocks: int = Field(default=0, description="Peak blocks that admitted and waiting turns need in full.")
    used_blocks: int = Field(default=0, description="Blocks held by running turns now.")
    cached_blocks: int = Field(default=0, description="Free blocks that still hold a reusable prefix.")
    mean_turns: float = Field(default=0.0, description="Mean of running + waiting turns over the window.")
    preemptions: int = Field(default=0, description="Since the engine started.")
    prompt_tokens_per_s: float = Field(
        default=0.0, ge=0, description="Prompt tokens of admitted turns, reused or not; 0: not measured."
    )
    prompt_passes_per_s: float = Field(
        default=0.0, ge=0, description="Prefill passes these prompts would take without any reuse; 0: not measured."
    )
    turns_per_s: float = Field(default=0.0, ge=0, description="Turns admitted; 0: not measured.")
    output_tokens_per_s: float = Field(
        default=0.0, ge=0, description="Output tokens that the admitted turns are expected to take; 0: not measured."
    )
    preempted_tokens_per_s: float = Field(
        default=0.0, ge=0, description="Tokens per second that preempted turns lost and have to compute again."
    )
    fetch_bytes_per_s: float = Field(
        default=0.0,
        ge=0,
        description="Speed at which lost prefixes come back from a host tier; 0: none, or nothing was copied yet.",
    )
    fetched_tokens_per_s: float = Field(default=0.0, ge=0, description="Prefix tokens that came back from it.")
    host_blocks: int | None = Field(default=None, ge=0, description="Blocks that the host tier holds; None: no limit.")
    demand: tuple[DemandBin, ...] = Field(
        default=(), description="Blocks needed in full over time, ascending; empty: only the peak is known."
    )
    reuse: tuple[ReuseBin, ...] = Field(default=(), description="Prefix reuse by distance, ascending in blocks.")
    return_share: float | None = Field(
        default=None, ge=0, le=1, description="Share of turns that are followed by another of their conversation."
    )


class ReplicaSnapshot(Contract):
    """What one replica reports each period: the only input of policy and routing besides signatures."""

    replica_id: str
    incarnation: str = Field(description="Changes with every engine start.")
    model: str
    is_healthy: bool = True
    layout: MemoryLayout
    split: Split
    plan_revision: int = Field(default=0, description="Revision of the last plan that was handled.")
    is_resizing: bool = False
    is_draining: bool = Field(default=False, description="Waits for its running turns to end; send no new ones.")
    budget_bytes: int = Field(description="Pooled budget: experts + KV.")
    other_bytes: int = Field(default=0, description="Dense weights and activations, outside the pools.")
    resident_bytes: int = Field(default=0, description="Bytes of the pools' mappings that are really resident.")
    window_s: float = Field(default=0.0, description="Span of the rates and curves below.")
    decode: PagerCounts = PagerCounts()
    prefill: PagerCounts = PagerCounts()
    decode_steps_per_s: float = 0.0
    prefill_steps_per_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    decode_misses_by_cap: tuple[float, ...] = Field(
        default=(), description="Index C: expected misses per decode step over all layers at cap C; length E + 1."
    )
    prefill_misses_by_cap: tuple[float, ...] = Field(
        default=(), description="Index C: expected misses per prefill step over all layers at cap C; length E + 1."
    )
    decode_union_by_batch: tuple[float, ...] = Field(
        default=(), description="Index b: distinct experts of one layer that b decode rows need together, mean."
    )
    busy_s_per_s: float = Field(
        default=0.0, description="Seconds per second in which the engine ran a step; 0: not measured."
    )
    fit: CostFit = CostFit()
    link_bytes_per_s: float = Field(default=0.0, description="Measured or emulated host-to-device speed.")
    is_link_emulated: bool = False
    kv: KvDemand = KvDemand()
    placed_sessions: int = Field(default=0, description="Sessions placed here that were active lately; 0: not known.")
    placed_miss_ratio_by_cap: tuple[float, ...] = Field(
        default=(),
        description="Index C: decode misses predicted for the sessions placed here, over those predicted for the "
        "sessions that the curve has seen; filled in by the policy service; empty: not known.",
    )
    placed_safe_cap: int = Field(
        default=0,
        ge=0,
        description="Predicted safe size of the working set of the sessions placed here: the smallest cap that keeps "
        "their miss share under a target; filled in by the policy service; 0: not known.",
    )


class Marginals(Value):
    """Seconds of latency per second that one more byte would save in each pool, at the chosen point."""

    experts_s_per_byte: float
    kv_s_per_byte: float


class Decision(Value):
    """What a policy answers: a split with its reason."""

    split: Split
    reason: str
    predicted_cost: float | None = Field(default=None, description="Predicted seconds per second at ``split``.")
    current_cost: float | None = Field(default=None, description="The same at the snapshot's split.")
    model_error: float | None = Field(
        default=None, description="|predicted - measured| / measured engine time of the forwards that ran."
    )
    marginals: Marginals | None = None


class Barrier(StrEnum):
    """When blocks may leave the KV pool."""

    BALLOON = "balloon"
    DRAINED = "drained"


class SplitPlan(Contract):
    """A revisioned, idempotent resize command for one replica."""

    replica_id: str
    incarnation: str
    revision: int = Field(ge=1)
    split: Split
    barrier: Barrier = Barrier.BALLOON
    policy: str
    reason: str
    marginals: Marginals | None = None


class Outcome(StrEnum):
    """What became of a plan; also the metric's label."""

    APPLIED = "applied"
    DEFERRED = "deferred"
    STALE = "stale"
    CONFLICT = "conflict"
    FAILED = "failed"


class ResizeOutcome(Contract):
    """The replica's answer to one plan."""

    replica_id: str
    revision: int
    outcome: Outcome
    reason: str
    before: Split
    after: Split = Field(
        description="Of an applied plan with more slots: as many of them as KV that was free pays for."
    )
    policy: str = ""
    plan_reason: str = ""
    bytes_moved: int = 0
    pause_ms: float = Field(default=0.0, description="Time in which the engine ran no step.")


class Signature(Contract):
    """Which experts one session, user, tenant or replica uses: decayed counts per layer.

    ``weights`` packs uint8 ``[num_layers, num_experts]``, each layer scaled so that its largest is 255,
    zlib-compressed; ``wisp_core.working_set.signature`` packs and reads it.
    """

    key: str = Field(description="Namespaced key: tenant, tenant/user or tenant/user/session, or a replica id.")
    num_layers: int
    num_experts: int
    weights: bytes
    prefill_weights: bytes = Field(default=b"", description="The same of prefills, which are counted apart.")
    prefill_tokens: int = Field(default=0, description="Prompt tokens that these saw.")
    decode_tokens: int = Field(default=0, description="Decode tokens that the counts saw.")
    lookups: int = Field(default=0, description="Distinct (layer, expert) uses in decode steps.")
    hits: int = Field(default=0, description="Those found resident.")


class Placement(Contract):
    """Where a session lives. ``version`` grows with every move."""

    session_key: str
    replica_id: str
    version: int = Field(ge=1)
    reason: str


class DecisionRecord(Contract):
    """One epoch of the policy service for one replica: what it saw, what it decided, and whether a plan came of it."""

    replica_id: str
    policy: str
    before: Split
    budget_bytes: int
    floor_blocks: int
    demand_blocks: int
    mean_turns: float
    decode_steps_per_s: float
    prefill_steps_per_s: float
    decode_misses_per_step: float = Field(description="Expected misses per decode step at the cap before.")
    decision: Decision
    plan_revision: int | None = Field(default=None, description="Revision of the plan written; None: hold.")
