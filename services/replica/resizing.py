"""Carries out the plans that the policy service writes for a replica."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from services.replica.state import ReplicaState
from wisp_core.contracts import Barrier, ResizeOutcome, SplitPlan
from wisp_core.errors import EngineUnavailableError, StoreUnavailableError

logger = logging.getLogger(__name__)

_OUTCOME_RETRY_S = 1.0


class PlanFollower:
    """Takes plans from the store, one after the other, and logs what became of each."""

    def __init__(self, state: ReplicaState) -> None:
        self._state = state

    async def run(self) -> None:
        """Follow plans until cancelled. A plan that meets no engine is dropped: the next incarnation gets its own."""
        plans = self._state.store.watch_plans(self._state.replica_id)
        async with contextlib.aclosing(plans):
            async for plan in plans:
                outcome = await self._apply(plan)
                if outcome is not None:
                    self._state.metrics.count_resize(outcome)
                    await self._log(outcome)

    async def _apply(self, plan: SplitPlan) -> ResizeOutcome | None:
        """Resize, and let routers know at once when a drain begins and when it ends."""
        try:
            resize = asyncio.ensure_future(self._state.engine.resize(plan))
            if plan.barrier is Barrier.DRAINED:
                await asyncio.sleep(0)  # until the engine says that it drains
                self._state.report_soon.set()
            outcome = await resize
            self._state.report_soon.set()
            return outcome
        except EngineUnavailableError:
            logger.warning("plan %d found no engine", plan.revision)
        except Exception:  # one bad plan must not end all resizing
            logger.exception("plan %d raised", plan.revision)
        return None

    async def _log(self, outcome: ResizeOutcome) -> None:
        """Log the outcome, however long the store takes to come back: it is the record of what happened."""
        logger.info("plan %d: %s, %s", outcome.revision, outcome.outcome.value, outcome.reason)
        while True:
            try:
                await self._state.store.append_outcome(outcome)
            except StoreUnavailableError:
                self._state.metrics.count_outage()
                await asyncio.sleep(_OUTCOME_RETRY_S)
            else:
                return
