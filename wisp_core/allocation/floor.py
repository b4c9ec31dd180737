"""The admission floor κ_min: the least KV that lets every admitted turn finish."""

from __future__ import annotations

from wisp_core.contracts import ReplicaSnapshot


def floor_blocks(snapshot: ReplicaSnapshot) -> int:
    """κ_min of a replica: what it reported, and never less than one longest request."""
    return max(snapshot.kv.floor_blocks, snapshot.layout.longest_request_blocks)
