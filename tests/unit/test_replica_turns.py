"""A turn on a replica whose engine may die: what its caller is told. The engine is an ASGI app and a flag."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import pytest

from services.replica.deployment import Replica, without_traceback
from services.replica.metrics import ReplicaMetrics
from services.replica.state import ReplicaState
from wisp_core.errors import EngineUnavailableError
from wisp_core.store.memory_store import MemoryStore

Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class DyingEngine:
    """Answers in two pieces, and dies before the piece of this number."""

    dies_before: int | None = None
    is_dead: bool = False

    async def app(self, scope: Any, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number, piece in enumerate((b"first", b"second")):
            self.is_dead |= number == self.dies_before
            await send({"type": "http.response.body", "body": piece, "more_body": number == 0})


class OnEngine(Replica):
    """A replica whose engine is there already."""

    def __init__(self, engine: DyingEngine) -> None:
        self._state = ReplicaState("r1", cast(Any, engine), MemoryStore(), ReplicaMetrics())

    def __del__(self) -> None:  # type: ignore[override]
        """Serve would await it."""


async def asked(engine: DyingEngine, pieces: list[bytes]) -> None:
    """Ask a replica with this engine; ``pieces`` gets what comes of the body."""
    async for item in OnEngine(engine).http(path="/v1/completions", headers={}, body=b"{}"):
        pieces.append(item["first"] if isinstance(item, dict) else item)


async def test_an_answer_of_a_living_engine_comes_whole() -> None:
    pieces: list[bytes] = []
    await asked(DyingEngine(), pieces)
    assert b"".join(pieces) == b"firstsecond"


@pytest.mark.parametrize("dies_before", [0, 1])
async def test_an_answer_that_a_dead_engine_cuts_is_told_as_lost(dies_before: int) -> None:
    pieces: list[bytes] = []
    with pytest.raises(EngineUnavailableError, match="ended during this turn"):
        await asked(DyingEngine(dies_before), pieces)
    assert b"second" not in b"".join(pieces)


async def test_a_turn_that_meets_no_engine_is_sent_elsewhere_without_an_error() -> None:
    replica = OnEngine(DyingEngine(is_dead=True))
    assert [item async for item in replica.http(path="/v1/completions", headers={}, body=b"{}")] == [
        {"status": 503, "headers": {}, "replica_id": "r1", "first": b""}
    ]


@pytest.mark.parametrize(
    ("error", "line", "has_traceback"),
    [
        (EngineUnavailableError("the engine ended"), "Request failed. the engine ended", False),
        (ValueError("a fault of ours"), "Request failed.", True),
    ],
)
def test_a_turn_whose_engine_ended_is_one_line_of_serve_s_log(error: Exception, line: str, has_traceback: bool) -> None:
    with pytest.raises(type(error)) as raised:
        raise error
    told = (raised.type, raised.value, raised.tb)
    record = logging.LogRecord("ray.serve", logging.ERROR, __file__, 1, "Request %s.", ("failed",), told)
    assert without_traceback(record)
    first, *rest = logging.Formatter("%(message)s").format(record).splitlines()
    assert (first, bool(rest)) == (line, has_traceback)
