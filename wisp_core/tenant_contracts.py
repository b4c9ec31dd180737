"""Contracts of tenants: their limits, and what their turns come to. See `wisp_core.contracts`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from wisp_core.contracts import Contract, Value


class Isolation(StrEnum):
    """What a tenant shares with others."""

    SHARED = "shared"
    DEDICATED = "dedicated"


TenantId = Annotated[
    str,
    Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$", description="Lower-case letters, digits, _ and -, at most 63."),
]


class TenantLimits(Value):
    """What a tenant may use."""

    requests_per_minute: int = Field(default=600, gt=0)
    tokens_per_minute: int = Field(default=200_000, gt=0, description="Prompt plus requested output tokens.")
    max_concurrent_turns: int = Field(default=64, gt=0)
    weight: float = Field(
        default=1.0, gt=0, le=1000, description="Share of a replica's engine time, against other tenants' weights."
    )
    kv_share: float = Field(
        default=1.0, gt=0, le=1, description="Largest part of a replica's KV and batch that its running turns may hold."
    )


class TenantSpec(Contract, TenantLimits):
    """A tenant and its limits; keys are stored as SHA-256 only."""

    tenant_id: TenantId
    key_sha256: tuple[str, ...]
    isolation: Isolation = Field(
        default=Isolation.SHARED, description="Dedicated: replicas, and so expert caches, of its own."
    )
    is_from_file: bool = Field(
        default=False, description="Declared by a service's file: ends, keys and all, when the file drops it."
    )


class TenantUsage(Value):
    """What the turns of one tenant add up to since the store knows it."""

    tenant_id: str
    turns: int = 0
    failed_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


class TurnRecord(Contract):
    """One finished turn, as the ingress saw it."""

    session_key: str
    replica_id: str
    is_failed: bool = False
    ttft_s: float | None = Field(default=None, description="Time to a stream's first piece; None: none was sent.")
    duration_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = Field(default=0, description="Prompt tokens found in the prefix cache.")
    completion_tokens: int = 0


class SessionUsage(Value):
    """What the turns of one session add up to."""

    session_key: str
    replica_id: str = Field(description="Where the last turn ran.")
    last_turn_at_s: float
    turns: int = 0
    failed_turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_sum_s: float = 0.0
    ttft_turns: int = Field(default=0, description="Turns that have a TTFT.")
    decode_s: float = Field(
        default=0.0, description="Time after the first piece, summed; of turns that were not streamed, all of it."
    )
