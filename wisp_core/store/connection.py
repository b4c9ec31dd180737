"""The one connection pool of a store: timeouts, a breaker, and every Redis error as StoreUnavailableError."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from wisp_core.errors import StoreUnavailableError
from wisp_core.store.breaker import CircuitBreaker

FAILURES = (RedisError, OSError, RuntimeError)
"""What redis-py raises when Redis goes away. A RuntimeError is uvloop's, for a write to a connection that has ended."""


class Connection:
    """A Redis client for one event loop. Connects at the first call, and again by itself after an outage."""

    def __init__(self, url: str, password: str | None, timeout_s: float) -> None:
        """``password`` overrides the URL's; ``timeout_s`` bounds connecting and each reply."""
        options: dict[str, Any] = {} if password is None else {"password": password}
        self.client = Redis.from_url(
            url,
            decode_responses=True,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            # One retry without delay: it replaces a pooled connection that died while idle.
            retry=Retry(NoBackoff(), 1),
            **options,
        )
        self.round_trips = 0
        """Exchanges with the server since the start: a pipeline, a script and a list with its values are one each."""
        self._breaker = CircuitBreaker()
        self._scripts: dict[str, Any] = {}

    @asynccontextmanager
    async def guard(self) -> AsyncIterator[Any]:
        """Run calls on the Redis client: StoreUnavailableError at once while the breaker is open, or for any failure.

        The client is typed Any: redis-py's annotations do not know that replies are decoded to text here.
        """
        if not self._breaker.allows():
            raise StoreUnavailableError("Redis does not answer")
        self.round_trips += 1
        try:
            yield self.client
        except FAILURES as error:
            self._breaker.record_failure()
            raise StoreUnavailableError(f"Redis: {type(error).__name__}") from error
        self._breaker.record_success()

    async def run(self, script: str, keys: list[str], args: list[str | int | float]) -> Any:
        """Run a script of ``wisp_core.store.scripts``, loaded on first use."""
        registered = self._scripts.get(script)
        if registered is None:
            registered = self._scripts[script] = self.client.register_script(script)
        async with self.guard():
            return await registered(keys=keys, args=args)

    async def close(self) -> None:
        """Close the pool."""
        await cast("Awaitable[None]", self.client.aclose())
