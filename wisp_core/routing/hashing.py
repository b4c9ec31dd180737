"""Rendezvous hashing: the same order of replicas for a session in every process, and few moves when one goes."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b


def hash_fraction(session_key: str, replica_id: str) -> float:
    """A number in [0, 1) that depends on nothing but the two names."""
    digest = blake2b(session_key.encode(), key=replica_id.encode()[-64:], digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def hash_order(session_key: str, replica_ids: Iterable[str]) -> list[str]:
    """``replica_ids`` in the session's own order of preference."""
    return sorted(replica_ids, key=lambda replica_id: (hash_fraction(session_key, replica_id), replica_id))
