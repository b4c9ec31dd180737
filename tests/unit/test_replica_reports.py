"""What a replica reports when the store goes away in the middle of a report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import pytest
from policy_snapshots import make_snapshot

from services.replica.metrics import ReplicaMetrics
from services.replica.reporter import Reporter
from services.replica.state import ReplicaState
from wisp_core.contracts import ReplicaSnapshot, Signature
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.memory_store import MemoryStore
from wisp_core.working_set.signature import pack


class Engine:
    """Tells each session's signature once, as the real one does."""

    is_dead = False

    def __init__(self) -> None:
        self.touched = ["t/u/a"]
        self.expected: list[str] = []

    async def snapshot(self) -> ReplicaSnapshot:
        return make_snapshot()

    async def signatures(self) -> list[Signature]:
        touched, self.touched = self.touched, []
        return [signature_of(key) for key in touched]

    async def expect(self, signatures: Iterable[Signature]) -> None:
        self.expected += [one.key for one in signatures if one.key.count("/") == 2]


class FailingStore(MemoryStore):
    """Takes snapshots always, signatures only while ``is_up``."""

    is_up = False

    async def write_signatures(self, replica_id: str, signatures: Iterable[Signature]) -> None:
        if not self.is_up:
            raise StoreUnavailableError("no answer", may_have_run=True)
        await super().write_signatures(replica_id, signatures)


def signature_of(key: str) -> Signature:
    weights = pack(np.eye(2, 8))
    return Signature(key=key, num_layers=2, num_experts=8, weights=weights, decode_tokens=30, lookups=120)


async def test_signatures_that_the_store_did_not_take_come_with_the_next_report() -> None:
    store, engine, metrics = FailingStore(), Engine(), ReplicaMetrics()
    state = ReplicaState(replica_id="r1", engine=cast(Any, engine), store=store, metrics=metrics)
    state.prompt_groups.note("t/u/a", "t/@p")
    state.prompt_groups.note("t//!1", "t/@q")
    engine.touched.append("t//!1")  # Nobody will ask for it, but for what its prompt is like.
    reporter = Reporter(state, period_s=60.0)
    for touched in ([], ["t/u/b"]):
        engine.touched += touched
        with pytest.raises(StoreUnavailableError):
            await reporter.report()
    store.is_up = True
    await reporter.report()
    await reporter.report()
    found = await store.read_signatures(["t/u/a", "t/@p", "t/u/b", "t//!1", "t/@q"])
    assert found.keys() == {"t/u/a", "t/@p", "t/u/b", "t/@q"}
    assert engine.expected == ["t/u/a", "t/u/b"]
    metrics.close()
