"""What Redis forgets by its TTLs, the twin in memory forgets by its clock."""

from __future__ import annotations

from wisp_core.contracts import Placement
from wisp_core.store.keys import SESSION_TTL_S
from wisp_core.store.memory_store import MemoryStore
from wisp_core.tenant_contracts import TurnRecord


async def test_sessions_end_with_their_ttl_and_a_later_turn_begins_anew() -> None:
    now_s = 1000.0
    store = MemoryStore(clock=lambda: now_s)
    turn = TurnRecord(session_key="t/u/s", replica_id="r1", prompt_tokens=7)
    await store.place("t/u/s", None, Placement(session_key="t/u/s", replica_id="r1", version=1, reason="score"))
    await store.record_turn(turn)
    now_s += SESSION_TTL_S - 1
    await store.record_turn(turn)
    now_s += SESSION_TTL_S - 1
    assert [session.turns for session in await store.list_sessions(10)] == [2]
    assert await store.read_placements(["t/u/s"])
    now_s += 1
    assert await store.list_sessions(10) == []
    await store.record_turn(turn)
    assert [session.turns for session in await store.list_sessions(10)] == [1]
    assert not await store.read_placements(["t/u/s"]), "a turn keeps a placement alive, and does not bring it back"
