"""Notices an engine that died or hangs, ends its turns, and starts it again in the same process.

In place is faster than a new Serve replica by the import of vLLM, and metrics and sessions' users stay. When a restart
fails, the replica reports itself unhealthy and Serve replaces the whole process.
"""

from __future__ import annotations

import asyncio
import logging
import time

from services.replica.state import ReplicaState
from wisp_core.errors import EngineUnavailableError, WispError

logger = logging.getLogger(__name__)

CHECK_PERIOD_S = 0.1
HEARTBEAT_PERIOD_S = 2.0
MAX_RESTARTS = 3
"""Restarts in a row that fail, or whose engine does not live for ``_STABLE_S``, before Serve shall take over."""
_STABLE_S = 60.0


class Supervisor:
    """Restarts the engine. Its ``run`` ends only by an error, which the replica's health check shows."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state
        self._restarts = 0
        self._last_beat_s = time.monotonic()
        self._started_s = time.monotonic()

    async def run(self) -> None:
        """Supervise until cancelled. Raises EngineUnavailableError when restarting does not help."""
        while True:
            await asyncio.sleep(CHECK_PERIOD_S)
            if await self._is_dead():
                await self._restart()

    async def _is_dead(self) -> bool:
        if self._state.engine.is_dead:
            return True
        if time.monotonic() - self._last_beat_s < HEARTBEAT_PERIOD_S:
            return False
        try:
            await self._state.engine.heartbeat()
        except EngineUnavailableError as error:
            logger.error("engine lost: %s", error)
            return True
        self._last_beat_s = time.monotonic()
        return False

    async def _restart(self) -> None:
        self._state.engine_ended.set()
        if time.monotonic() - self._started_s > _STABLE_S:
            self._restarts = 0
        while True:
            self._restarts += 1
            if self._restarts > MAX_RESTARTS:
                raise EngineUnavailableError(f"the engine ended again after {MAX_RESTARTS} restarts")
            logger.warning("starting the engine again, try %d of %d", self._restarts, MAX_RESTARTS)
            self._state.metrics.count_restart()
            try:
                await self._state.engine.restart()
            except WispError:
                logger.exception("the engine did not start")
            else:
                break
        self._started_s = self._last_beat_s = time.monotonic()
        self._state.engine_ended = asyncio.Event()
