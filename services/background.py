"""The tasks that a Serve deployment runs beside its requests: one that ends is a reason to replace the process."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
