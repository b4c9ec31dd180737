"""Rendezvous hashing: the same order of replicas for a session in every process, and few moves when one goes."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]


def name_hash(name: str) -> int:
    """64 bits that depend on nothing but the name."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")


def hash_fractions(session_key: str, replica_hashes: Hashes) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each of the replicas with these `name_hash`es, [N]: SplitMix64 of both hashes."""
    mixed = replica_hashes ^ np.uint64(name_hash(session_key))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    # 53 bits fit a float exactly, so that none rounds up to 1.
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def hash_order(session_key: str, replica_ids: Iterable[str]) -> list[str]:
    """``replica_ids`` in the session's own order of preference."""
    names = list(replica_ids)
    fractions = hash_fractions(session_key, np.array([name_hash(name) for name in names], dtype=np.uint64))
    return [name for _, name in sorted(zip(fractions.tolist(), names, strict=True))]
