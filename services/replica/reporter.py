"""Publishes what a replica is and which experts its sessions use. Without the store it only counts the outage."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from services.replica.state import ReplicaState
from wisp_core.contracts import ReplicaSnapshot, Signature
from wisp_core.errors import EngineUnavailableError, StoreUnavailableError
from wisp_core.store.usage import is_single_turn

logger = logging.getLogger(__name__)


class Reporter:
    """Writes a snapshot and the signatures of the keys that decoded, each period."""

    def __init__(self, state: ReplicaState, period_s: float) -> None:
        self._state = state
        self._period_s = period_s
        self._unsent: list[Signature] = []

    async def run(self) -> None:
        """Report each period, and at once when ``report_soon`` is set, until cancelled; then withdraw the snapshot."""
        try:
            while True:
                await self._report_or_count()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._state.report_soon.wait(), self._period_s)
                self._state.report_soon.clear()
        finally:
            await self._withdraw()

    async def report(self) -> None:
        """Report once. Raises StoreUnavailableError."""
        snapshot = await self._snapshot()
        if snapshot is None:
            return
        self._state.metrics.observe_snapshot(snapshot)
        self._state.last_snapshot = snapshot
        await self._state.store.write_snapshot(snapshot)
        if snapshot.is_healthy:
            await self._report_signatures()

    async def _report_signatures(self) -> None:
        """Send what the engine tells, which it does once: what the store does not take is sent again before more."""
        signatures = self._unsent or await self._new_signatures()
        self._unsent = []
        try:
            await self._state.store.write_signatures(self._state.replica_id, signatures)
        except StoreUnavailableError:
            self._unsent = signatures
            raise
        await self._state.engine.expect(signatures)

    async def _new_signatures(self) -> list[Signature]:
        signatures = await self._state.engine.signatures()
        prompts = self._state.prompt_groups.take_up(signatures)
        return [*(one for one in signatures if not is_single_turn(one.key)), *prompts]

    async def _report_or_count(self) -> None:
        try:
            await self.report()
        except StoreUnavailableError:
            self._state.metrics.count_outage()
        except EngineUnavailableError:
            logger.debug("the engine went away while its signatures were reported")
        except Exception:  # a value that cannot be reported must not end all reports
            logger.exception("report failed")
            self._state.metrics.count_outage()

    async def _snapshot(self) -> ReplicaSnapshot | None:
        """The present snapshot; while the engine is away the last one, marked, so that routers pass it by."""
        if self._state.can_serve:
            try:
                return await self._state.engine.snapshot()
            except EngineUnavailableError:
                logger.info("the engine did not answer")
        if self._state.last_snapshot is None:
            return None
        return self._state.last_snapshot.model_copy(update={"is_healthy": False, "at_s": time.time()})

    async def _withdraw(self) -> None:
        try:
            await self._state.store.delete_snapshot(self._state.replica_id)
        except StoreUnavailableError:
            logger.info("snapshot not withdrawn, it ends by itself: the store is unavailable")
