"""The configured policy as the loop sees it: contained, damped, counted. A fault means no decision, never an error."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from policies.damping import Confirmation, Damping
from services.config import PolicySettings
from services.policy.metrics import PolicyMetrics
from services.policy.process import Fault, PolicyFaultError, PolicyProcess, PolicySpec
from wisp_core.contracts import Decision, ReplicaSnapshot
from wisp_core.errors import ConfigurationError

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_REPLICAS = 4096
"""Replicas whose confirmations are remembered; the one that asked longest ago is forgotten first."""


class PolicyRunner:
    """Asks the policy's process, and starts it again with back-off when it hung or died.

    Damping runs on this side: the raw decision is checked first, so a policy that asks for too much is a fault, not
    something that clamping hides.
    """

    def __init__(self, settings: PolicySettings, metrics: PolicyMetrics, *, memory_bytes: int = 2 << 30) -> None:
        """``memory_bytes`` bounds the address space of the policy's process."""
        self._settings = settings
        self._spec = PolicySpec(name=settings.name, settings=settings.settings, memory_bytes=memory_bytes)
        self._damping = Damping(**settings.damping.model_dump())
        self._metrics = metrics
        self._confirmations: OrderedDict[str, tuple[str, Confirmation]] = OrderedDict()
        self._process: PolicyProcess | None = None
        self._backoff_s = FIRST_BACKOFF_S
        self._start_at_s = 0.0
        self._logged: set[Fault] = set()
        # One thread: the process is asked by one caller at a time, and a slow policy blocks no event loop.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wisp-policy")

    async def start(self) -> None:
        """Load the policy. Raises ConfigurationError when it cannot be loaded, so that a service refuses to start."""
        try:
            self._process = await self._in_thread(lambda: PolicyProcess(self._spec))
        except PolicyFaultError as error:
            raise ConfigurationError(f"policy.name: {self._spec.name} did not start: {error}") from error

    async def decide(self, snapshot: ReplicaSnapshot) -> Decision | None:
        """The damped decision for one replica; None when the policy gave none and the last plan stays."""
        started_s = time.monotonic()
        try:
            wanted = await self._in_thread(lambda: self._ask(snapshot))
        except PolicyFaultError as error:
            self._note(error, snapshot.replica_id)
            return None
        if wanted is None:
            return None
        self._metrics.observe_decision(time.monotonic() - started_s)
        return self._damp(snapshot, wanted)

    async def close(self) -> None:
        """End the policy's process, also while it is being asked or started."""
        self._kill()
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
        self._kill()  # one that the thread was starting meanwhile

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _ask(self, snapshot: ReplicaSnapshot) -> Decision | None:
        """Ask the process, started again if it is dead; None while it waits for its next start."""
        if self._process is None or not self._process.is_alive:
            if time.monotonic() < self._start_at_s:
                return None
            self._restart()
        assert self._process is not None
        decision = self._process.ask(snapshot, self._settings.deadline_s)
        self._backoff_s = FIRST_BACKOFF_S
        return decision

    def _restart(self) -> None:
        self._start_at_s = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
        self._metrics.count_restart()
        logger.info("Starting policy %s again; the next restart waits %.1f s", self._spec.name, self._backoff_s)
        try:
            self._process = PolicyProcess(self._spec)
        except ConfigurationError as error:
            raise PolicyFaultError(Fault.EXITED, f"restart refused: {error}") from error

    def _damp(self, snapshot: ReplicaSnapshot, wanted: Decision) -> Decision:
        incarnation, confirmation = self._confirmations.get(snapshot.replica_id, ("", Confirmation()))
        if incarnation != snapshot.incarnation:
            confirmation = Confirmation()
        decision, confirmation = self._damping.apply(snapshot, wanted, confirmation)
        self._confirmations[snapshot.replica_id] = (snapshot.incarnation, confirmation)
        self._confirmations.move_to_end(snapshot.replica_id)
        if len(self._confirmations) > MAX_REPLICAS:
            self._confirmations.popitem(last=False)
        return decision

    def _note(self, error: PolicyFaultError, replica_id: str) -> None:
        """Count every fault; log the first of each kind."""
        self._metrics.count_fault(error.fault)
        if error.fault not in self._logged:
            self._logged.add(error.fault)
            logger.error(
                "Policy %s (%s) for replica %s: %s. The last plan stays; more of this kind are counted, not logged.",
                self._spec.name,
                error.fault.value,
                replica_id,
                error,
            )
