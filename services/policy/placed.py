"""Adds to each snapshot what its replica is about to see: the sessions placed there, seen by its curves or not."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from wisp_core.contracts import ReplicaSnapshot, Signature
from wisp_core.store.interface import Store
from wisp_core.working_set.placed_misses import miss_ratio_by_cap
from wisp_core.working_set.predictor import safe_cap
from wisp_core.working_set.signature import Usage, unpack

ACTIVE_S = 60.0
"""A session counts as long as its last turn ended, or it was placed, less than this ago: above usual think times."""
MAX_SESSIONS = 256
"""Sessions looked at, the most recent first."""
SAFE_MISS_SHARE = 0.1
"""Part of the uses that may miss at the predicted safe size."""


async def with_placed_sessions(store: Store, snapshots: Sequence[ReplicaSnapshot]) -> list[ReplicaSnapshot]:
    """``snapshots`` with what ``placed_`` fields say. Raises StoreUnavailableError."""
    sessions = await _active_sessions(store)
    keys = {key for of_replica in sessions.values() for key in of_replica}
    users = {_user_of(key) for key in keys}
    signatures = await store.read_signatures([*keys, *users, *(one.replica_id for one in snapshots)])
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


def _user_of(session_key: str) -> str:
    return session_key.rpartition("/")[0]


def _with_placed(snapshot: ReplicaSnapshot, keys: set[str], signatures: dict[str, Signature]) -> ReplicaSnapshot:
    """A session that has not decoded is taken to be like its user's others.

    Without a signature for every second session nothing is predicted: the rest would pass for the whole.
    """
    found = [signatures.get(key) or signatures.get(_user_of(key)) for key in keys]
    layout = snapshot.layout
    known = [one for one in found if one is not None and _shape(one) == (layout.num_layers, layout.num_experts)]
    fields: dict[str, object] = {"placed_sessions": len(keys)}
    if known and 2 * len(known) > len(keys):
        total = _total(known)
        fields["placed_safe_cap"] = safe_cap(total, SAFE_MISS_SHARE, layout.min_cap)
        seen = signatures.get(snapshot.replica_id)
        if seen is not None and _shape(seen) == total.shape:
            fields["placed_miss_ratio_by_cap"] = miss_ratio_by_cap(total, unpack(seen))
    return snapshot.model_copy(update=fields)


def _shape(signature: Signature) -> tuple[int, int]:
    return signature.num_layers, signature.num_experts


def _total(placed: Sequence[Signature]) -> Usage:
    """Uses of these sessions together, each with the same weight, [L, E]."""
    total = np.zeros(_shape(placed[0]))
    for one in placed:
        weights = unpack(one)
        total += weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
    return total
