"""The tasks that a Serve deployment runs beside its requests: one that ends is a reason to replace the process."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

_CANCEL_AGAIN_S = 5.0


class BackgroundTasks:
    """Tasks that run until the process stops. Make it in the event loop that runs them."""

    def __init__(self, **tasks: Coroutine[Any, Any, None]) -> None:
        self._tasks = [asyncio.create_task(task, name=f"wisp-{name}") for name, task in tasks.items()]

    def check(self) -> None:
        """Raises what ended one of them."""
        for task in self._tasks:
            if task.done():
                error = None if task.cancelled() else task.exception()
                # In words too: Serve tells of a failed health check without its cause.
                raise RuntimeError(f"{task.get_name()} has ended: {error!r}") from error

    async def stop(self) -> None:
        """Cancel all and wait for their ends."""
        await end_tasks(self._tasks)


async def end_tasks(tasks: Collection[asyncio.Task[Any]], *, again_s: float = _CANCEL_AGAIN_S) -> None:
    """Cancel ``tasks`` and wait for their ends, whatever these are.

    Those that go on are cancelled again: redis-py sends under ``asyncio.wait_for``, which in Python 3.11 loses a
    cancellation that comes in the moment in which what it waits for is done.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=again_s)
    await asyncio.gather(*tasks, return_exceptions=True)
