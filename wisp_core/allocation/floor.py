"""The admission floor κ_min: the least KV that lets every admitted turn finish."""

from __future__ import annotations

from collections.abc import Iterable

from wisp_core.contracts import ReplicaSnapshot, blocks_of


def admission_floor_blocks(*, max_model_len: int, block_tokens: int, turn_tokens: Iterable[int] = ()) -> int:
    """κ_min in usable blocks, without vLLM's null block.

    The larger of one longest request, ``max_model_len`` tokens, and all admitted turns together; ``turn_tokens``
    holds prompt plus expected output of each.
    """
    admitted = sum(blocks_of(tokens, block_tokens) for tokens in turn_tokens)
    return max(blocks_of(max_model_len, block_tokens), admitted)


def floor_blocks(snapshot: ReplicaSnapshot) -> int:
    """κ_min of a replica: what it reported, and never less than one longest request."""
    return max(snapshot.kv.floor_blocks, snapshot.layout.longest_request_blocks)
