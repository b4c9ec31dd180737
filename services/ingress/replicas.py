"""Calling a replica by handle: the answer's head and pieces, again elsewhere while nothing has been sent.

The other side is ``http(*, path, body, headers, session_key, ...)`` of the replica deployment, an async
generator: ``{"status": int, "headers": {...}, "replica_id": str, "first": bytes}``, then more bytes. It raises
EngineUnavailableError when its engine is gone. The keyword arguments of ``services.ingress.placement.Turn`` are for
the router, which reads them in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from grpc.aio import AioRpcError  # type: ignore[import-untyped]
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from services.ingress.errors import unavailable
from services.ingress.placement import Turn
from wisp_core.errors import EngineUnavailableError

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
RETRY_PAUSE_S = 0.05
END_DELAY_S = 0.005
"""Time after a whole answer at which the end of its call is taken note of."""

LOST = (RayActorError, EngineUnavailableError, AioRpcError)
"""The replica, or its engine, is gone; or it has ended a call of its own accord, as it does when it stops."""


class ReplicaStream(Protocol):
    """What a streaming call by handle gives."""

    def __aiter__(self) -> AsyncIterator[Any]:
        """The items."""
        ...

    def __anext__(self) -> Awaitable[Any]:
        """The next item."""
        ...

    def cancel(self) -> None:
        """Cancel the call on the replica; dropping the stream does not."""
        ...


class ReplicaHandle(Protocol):
    """The part of Serve's DeploymentHandle that the ingress uses."""

    def options(self, *, stream: bool, session_id: str) -> Any:
        """A handle with these options."""
        ...

    def broadcast(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method on every replica."""
        ...


@dataclass(frozen=True, kw_only=True)
class ReplicaCall:
    """One turn on its way to a replica."""

    path: str
    body: bytes
    headers: dict[str, str]
    turn: Turn


@dataclass
class Answer:
    """An answer that has begun: its first piece is here."""

    status: int
    headers: dict[str, str]
    replica_id: str
    stream: ReplicaStream
    first: bytes

    @property
    def is_whole(self) -> bool:
        """Whether the first piece is the whole body."""
        return self.headers.get("content-length") == str(len(self.first))

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body. Raises one of ``LOST`` when the replica is lost on the way."""
        if self.first:
            yield self.first
        async for piece in self.stream:
            yield piece


class ReplicaClient:
    """Calls replicas; the router behind the handle chooses which."""

    def __init__(self, handle: ReplicaHandle, count_retry: Callable[[str], None]) -> None:
        """``count_retry`` is called with the tenant before each attempt of a turn beyond its first."""
        self._handle = handle
        self._count_retry = count_retry
        self._endings: set[asyncio.Future[None]] = set()

    async def open(self, call: ReplicaCall) -> Answer:
        """Send ``call`` and wait for the first piece of the answer.

        A replica that is lost before that costs nothing but time: the call goes to another one. Raises ApiError
        (503) when none answers.
        """
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                await asyncio.sleep(RETRY_PAUSE_S * attempt)
                self._count_retry(call.turn.tenant)
            try:
                return await self._try(call)
            except LOST as error:
                logger.warning("attempt %d of a turn got no first byte: %s", attempt + 1, type(error).__name__)
            except BackPressureError as error:
                raise unavailable("All replicas are busy. Please retry.") from error
            except DeploymentUnavailableError as error:
                raise unavailable("No replica is up. Please retry.", retry_after_s=10.0) from error
        raise unavailable("No replica could answer. Please retry.", retry_after_s=2.0)

    async def collect(self, call: ReplicaCall) -> tuple[Answer, bytes]:
        """Send ``call`` and wait for the whole answer; a replica lost at any point before its end is replaced."""
        for attempt in range(MAX_ATTEMPTS):
            if attempt:
                self._count_retry(call.turn.tenant)
            answer = await self.open(call)
            if answer.is_whole:
                self._let_end(answer.stream)
                return answer, answer.first
            try:
                return answer, b"".join([piece async for piece in answer.pieces()])
            except LOST as error:
                logger.warning("a turn was lost before its end: %s", type(error).__name__)
            finally:
                answer.stream.cancel()
        raise unavailable("No replica could answer. Please retry.", retry_after_s=2.0)

    def _let_end(self, stream: ReplicaStream) -> None:
        """Let a call end by itself whose answer is here: cancelled, it would pass for one whose client has gone."""
        task = asyncio.ensure_future(_drained(stream))
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)

    async def _try(self, call: ReplicaCall) -> Answer:
        turn = call.turn
        handle = self._handle.options(stream=True, session_id=turn.session_key)
        stream: ReplicaStream = handle.http.remote(
            path=call.path,
            body=call.body,
            headers=call.headers,
            **turn.model_dump(exclude_defaults=True),
        )
        is_open = False
        try:
            head: dict[str, Any] = await _first(stream)
            if head["status"] == 503:
                raise EngineUnavailableError("the engine is full")
            is_open = True
        finally:
            if not is_open:
                stream.cancel()
        return Answer(head["status"], head["headers"], head["replica_id"], stream, head["first"])


def by_message(handle: Any) -> Any:
    """``handle`` with its calls sent by Serve's own messages (gRPC) and not as tasks of Ray, which take longer.

    Replicas listen for them in any case, and answer those that have this service's token (Ray's).
    """
    return handle.options(_by_reference=False)


async def _first(stream: ReplicaStream) -> dict[str, Any]:
    """The first item. Raises EngineUnavailableError for Serve's word that a replica ended the call unanswered."""
    try:
        head: dict[str, Any] = await anext(stream)
    except RuntimeError as error:
        # Serve has no class for it; a RuntimeError of the replica's own comes as a class of Ray's.
        if type(error) is RuntimeError and str(error).startswith("Unexpected error (StatusCode."):
            raise EngineUnavailableError("the replica ended the call") from error
        raise
    return head


async def _drained(stream: ReplicaStream) -> None:
    await asyncio.sleep(END_DELAY_S)  # The answer goes out first.
    with contextlib.suppress(*LOST, RayError):  # the answer is complete, whatever comes after it
        async for _ in stream:
            pass


async def broadcast(handle: ReplicaHandle, method_name: str, timeout_s: float = 2.0) -> list[Any]:
    """What every replica of a deployment answers to a method; those that fail or are late are left out.

    Nobody answers for a deployment that is not there yet.
    """
    try:
        async with asyncio.timeout(timeout_s):
            # Not ``results_async``, which gives nobody's answer if one is late.
            calls = await handle.broadcast(method_name)._fetch_replica_results_async()
    except (RayError, DeploymentUnavailableError, TimeoutError):
        return []
    waiting = (asyncio.wait_for(call.get_async(), timeout_s) for call in calls)
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, BaseException)]
