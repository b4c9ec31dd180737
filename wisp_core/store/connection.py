"""The one connection pool of a store: timeouts, a breaker, and every Redis error as StoreUnavailableError.

After a timeout or a lost connection nobody knows whether a command has run: only scripts that may run twice are sent
again. A pooled connection that ended while idle is noticed, and replaced, before a command goes out.
"""

from __future__ import annotations

import logging
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig

from wisp_core.errors import StoreUnavailableError
from wisp_core.store.breaker import CircuitBreaker
from wisp_core.store.scripts import REPEATABLE

logger = logging.getLogger(__name__)

TOLD_AGAIN_S = 60.0
"""A failure for the same reason is logged again after this."""
FAILURES = (exceptions.RedisError, OSError, RuntimeError)
"""What redis-py raises when Redis goes away. A RuntimeError is uvloop's, for a write to a connection that has ended."""


class Connection:
    """A Redis client for one event loop. Connects at the first call, and again by itself after an outage."""

    def __init__(self, url: str, password: str | None, timeout_s: float, *, is_needed: bool = False) -> None:
        """``password`` overrides the URL's; ``timeout_s`` bounds connecting and each reply.

        Whoever needs Redis tells of a failure itself; for others, which go on, it is logged.
        """
        self._is_needed = is_needed
        options: dict[str, Any] = {} if password is None else {"password": password}
        self.client = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            # With them redis-py does not look whether a pooled connection has ended.
            maint_notifications_config=MaintNotificationsConfig(enabled=False),
            **options,
        )
        self.round_trips = 0
        """Exchanges with the server since the start: a pipeline, a script and a list with its values are one each."""
        self._breaker = CircuitBreaker()
        self._failure = ""
        """Why Redis cannot be used, while it cannot."""
        self._told: tuple[str, float] = ("", 0.0)
        """The failure that was logged last, and when."""
        self._scripts: dict[str, Any] = {}

    @asynccontextmanager
    async def guard(self, *, writes: bool = True) -> AsyncIterator[Any]:
        """Run calls on the Redis client: StoreUnavailableError at once while the breaker is open, or for any failure.

        Without ``writes`` the calls change nothing, so none of them may have.
        The client is typed Any: redis-py's annotations do not know that replies are decoded to text here.
        """
        if not self._breaker.allows():
            raise StoreUnavailableError(self._failure)
        self.round_trips += 1
        try:
            yield self.client
        except FAILURES as error:
            self._breaker.record_failure()
            self._failure = f"Redis at {self.address}: {_words(error)}"
            self._tell_failure()
            raise StoreUnavailableError(self._failure, may_have_run=writes and not _is_unsent(error)) from error
        if self._breaker.is_open:
            logger.info("Redis at %s can be used again", self.address)
        self._breaker.record_success()

    @property
    def address(self) -> str:
        """Where Redis is, without a password."""
        options = self.client.connection_pool.connection_kwargs
        return str(options.get("path") or f"{options.get('host')}:{options.get('port')}")

    def _tell_failure(self) -> None:
        """Log a failure once per outage: what this process does without Redis is right, but has to be known."""
        now_s = time.monotonic()
        if self._is_needed:
            return
        if self._told[0] != self._failure or now_s - self._told[1] > TOLD_AGAIN_S:
            self._told = (self._failure, now_s)
            logger.warning("%s; going on without it", self._failure)

    async def run(self, script: str, keys: list[str], args: list[str | int | float]) -> Any:
        """Run a script of ``wisp_core.store.scripts``, loaded on first use."""
        registered = self._scripts.get(script)
        if registered is None:
            registered = self._scripts[script] = self.client.register_script(script)
        async with self.guard():
            try:
                return await registered(keys=keys, args=args)
            except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                if script not in REPEATABLE or _is_unsent(error):
                    raise
                try:
                    return await registered(keys=keys, args=args)
                except FAILURES as again:
                    raise again from error  # The first may have run, whatever became of this.

    async def close(self) -> None:
        """Close the pool."""
        await cast("Awaitable[None]", self.client.aclose())


def _is_unsent(error: BaseException) -> bool:
    """Whether there was no server to connect to: redis-py's error is raised while it handles the system's."""
    return error.__cause__ is None and isinstance(error.__context__, ConnectionRefusedError | FileNotFoundError)


def _words(error: BaseException) -> str:
    """What ``error`` says, without the arguments of commands: keys hold the ids of sessions."""
    name, text = type(error).__name__, str(error)
    text = text.rpartition("of pipeline caused error: ")[2].partition(", with args beginning with")[0]
    if text.startswith("HELLO must be called"):
        text = "it asks for a password"
    text = textwrap.shorten(text.rstrip("."), 200, placeholder=" …")
    return f"{name}: {text}" if text else name
