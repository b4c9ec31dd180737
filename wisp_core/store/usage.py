"""How the usage of sessions and tenants is kept as counters."""

from __future__ import annotations

from collections.abc import Mapping

from wisp_core.tenant_contracts import SessionUsage, TenantUsage, TurnRecord

_TENANT_COUNTS = ("turns", "failed_turns", "prompt_tokens", "cached_tokens", "completion_tokens")
_COUNTS = (*_TENANT_COUNTS, "ttft_turns")


def usage_fields(turn: TurnRecord) -> dict[str, float]:
    """What ``turn`` adds to each counter of its session."""
    return {
        "turns": 1,
        "failed_turns": int(turn.is_failed),
        "prompt_tokens": turn.prompt_tokens,
        "cached_tokens": turn.cached_tokens,
        "completion_tokens": turn.completion_tokens,
        "ttft_turns": int(turn.ttft_s is not None),
        "ttft_sum_s": turn.ttft_s or 0.0,
        "decode_s": max(0.0, turn.duration_s - (turn.ttft_s or 0.0)) if turn.completion_tokens else 0.0,
    }


def usage_from_fields(session_key: str, fields: Mapping[str, str | float]) -> SessionUsage:
    """Read the counters, plus ``replica_id`` and ``last_turn_at_s``."""
    return SessionUsage(
        session_key=session_key,
        replica_id=str(fields["replica_id"]),
        last_turn_at_s=float(fields["last_turn_at_s"]),
        ttft_sum_s=float(fields.get("ttft_sum_s", 0)),
        decode_s=float(fields.get("decode_s", 0)),
        **{name: int(float(fields.get(name, 0))) for name in _COUNTS},
    )


SINGLE_TURN = "!"
"""First letter of a session's name in its key where a turn came without user and session; no client can send it."""


def is_single_turn(session_key: str) -> bool:
    """Whether no later turn can be of this session: nothing of it is worth remembering."""
    return session_key.rpartition("/")[2].startswith(SINGLE_TURN)


def tenant_of(session_key: str) -> str:
    """The tenant in a session's key."""
    return session_key.partition("/")[0]


def tenant_usage_fields(turn: TurnRecord) -> dict[str, int]:
    """What ``turn`` adds to each counter of its tenant."""
    fields = usage_fields(turn)
    return {name: int(fields[name]) for name in _TENANT_COUNTS}


def tenant_usage_from_fields(tenant_id: str, fields: Mapping[str, str | int]) -> TenantUsage:
    """Read a tenant's counters."""
    return TenantUsage(tenant_id=tenant_id, **{name: int(fields.get(name, 0)) for name in _TENANT_COUNTS})
