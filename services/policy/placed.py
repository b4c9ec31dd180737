"""Adds to each snapshot what its replica is about to see: the sessions placed there, seen by its curves or not."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from wisp_core.contracts import ReplicaSnapshot, Signature
from wisp_core.store.interface import Store
from wisp_core.working_set.placed_misses import miss_ratio_by_cap
from wisp_core.working_set.signature import unpack

ACTIVE_S = 60.0
"""A session counts as long as its last turn ended, or it was placed, less than this ago: above usual think times."""
MAX_SESSIONS = 256
"""Sessions looked at, the most recent first."""


async def with_placed_sessions(store: Store, snapshots: Sequence[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
    """``snapshots`` with ``placed_sessions`` and ``placed_miss_ratio_by_cap``. Raises StoreUnavailableError."""
    sessions = await _active_sessions(store)
    keys = {key for of_replica in sessions.values() for key in of_replica}
    signatures = await store.read_signatures([*keys, *(one.replica_id for one in snapshots)])
    return [_with_placed(one, sessions.get(one.replica_id, set()), signatures) for one in snapshots]


async def _active_sessions(store: Store) -> dict[str, set[str]]:
    """Keys of active sessions by the replica where they are placed now."""
    since_s = time.time() - ACTIVE_S
    of_replica: dict[str, set[str]] = defaultdict(set)
    placed = {one.session_key: one for one in await store.list_placements(MAX_SESSIONS)}
    recent = {one.session_key for one in await store.list_sessions(MAX_SESSIONS) if one.last_turn_at_s >= since_s}
    placed |= await store.read_placements(recent - placed.keys())
    for key, placement in placed.items():
        if key in recent or placement.at_s >= since_s:
            of_replica[placement.replica_id].add(key)
    return of_replica


def _with_placed(snapshot: ReplicaSnapshot, keys: set[str], signatures: dict[str, Signature]) -> ReplicaSnapshot:
    """Without a signature of every second session nothing is predicted: the rest would pass for the whole."""
    known = [signatures[key] for key in keys if key in signatures]
    seen = signatures.get(snapshot.replica_id)
    ratios: tuple[float, ...] = ()
    if seen is not None and 2 * len(known) > len(keys):
        ratios = _ratios(known, seen, snapshot.layout.num_experts)
    return snapshot.model_copy(update={"placed_sessions": len(keys), "placed_miss_ratio_by_cap": ratios})


def _ratios(placed: Sequence[Signature], seen: Signature, num_experts: int) -> tuple[float, ...]:
    shape = (seen.num_layers, seen.num_experts)
    alike = [one for one in placed if (one.num_layers, one.num_experts) == shape]
    if not alike or seen.num_experts != num_experts:
        return ()
    total = np.zeros(shape)
    for one in alike:
        weights = unpack(one)
        total += weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
    return miss_ratio_by_cap(total, unpack(seen))
