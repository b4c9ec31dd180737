"""A replica's series: its own OpenTelemetry instruments and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from opentelemetry.metrics import CallbackOptions, Observation
from prometheus_client import REGISTRY, generate_latest

from services.telemetry import Telemetry
from wisp_core.contracts import Outcome, PagerCounts, ReplicaSnapshot, ResizeOutcome

_GAUGES: tuple[tuple[str, str, str, Callable[[ReplicaSnapshot], float]], ...] = (
    ("cap", "", "Expert slots per layer.", lambda one: one.split.cap),
    ("kv_blocks", "", "Usable KV blocks.", lambda one: one.split.kv_blocks),
    ("budget", "By", "Budget that experts and KV share.", lambda one: one.budget_bytes),
    ("resident", "By", "Bytes of the pools' mappings that are resident.", lambda one: one.resident_bytes),
    ("healthy", "", "1 while the engine serves.", lambda one: int(one.is_healthy)),
    (
        "fetched_tokens",
        "1/s",
        "Prefix tokens that come back from host memory (kv_host_bytes).",
        lambda one: one.kv.fetched_tokens_per_s,
    ),
)
"""Name, unit, what it tells, and where a snapshot has it."""
_PAGER_COUNTERS: tuple[tuple[str, str, str, Callable[[PagerCounts], int]], ...] = (
    ("expert_hits", "", "Distinct experts per layer and step that were resident.", lambda counts: counts.hits),
    ("expert_misses", "", "Expert copies from host memory to a slot.", lambda counts: counts.misses),
    ("expert_copied", "By", "Bytes of these copies.", lambda counts: counts.missed_bytes),
)


class ReplicaMetrics:
    """Counts what one replica does; gauges read the last snapshot."""

    def __init__(self) -> None:
        self._snapshot: ReplicaSnapshot | None = None
        self._telemetry = Telemetry()
        self._create_counters()
        self._create_gauges()
        for outcome in Outcome:  # A series that exists at 0 can be alerted on.
            self._resizes.add(0, {"outcome": outcome.value})

    def _create_counters(self) -> None:
        meter = self._telemetry.meter("wisp.replica")
        self._turns = meter.create_counter("wisp.replica.turns", description="HTTP requests, by status class.")
        self._resizes = meter.create_counter("wisp.replica.resizes", description="Plans handled, by outcome.")
        self._moved = meter.create_counter(
            "wisp.replica.resized", unit="By", description="Bytes that moved between experts and KV."
        )
        self._pause = meter.create_histogram(
            "wisp.replica.resize_pause_duration", unit="s", description="Time of one resize in which no step ran."
        )
        self._restarts = meter.create_counter("wisp.replica.engine_restarts", description="Restarts of the engine.")
        self._outages = meter.create_counter("wisp.replica.store_outages", description="Reports that were not stored.")

    def _create_gauges(self) -> None:
        meter = self._telemetry.meter("wisp.replica")
        for name, unit, text, read in _GAUGES:
            callback = partial(self._observe, read)
            meter.create_observable_gauge(f"wisp.replica.{name}", [callback], unit=unit, description=text)
        for name, unit, text, count in _PAGER_COUNTERS:
            callback = partial(self._observe_pager, count)
            meter.create_observable_counter(f"wisp.replica.{name}", [callback], unit=unit, description=text)

    def _observe(self, read: Callable[[ReplicaSnapshot], float], _: CallbackOptions) -> Iterable[Observation]:
        if self._snapshot is not None:
            yield Observation(read(self._snapshot))

    def _observe_pager(self, count: Callable[[PagerCounts], int], _: CallbackOptions) -> Iterable[Observation]:
        if self._snapshot is not None:
            yield Observation(count(self._snapshot.decode), {"phase": "decode"})
            yield Observation(count(self._snapshot.prefill), {"phase": "prefill"})

    def observe_snapshot(self, snapshot: ReplicaSnapshot) -> None:
        """What the gauges show from now on."""
        self._snapshot = snapshot

    def count_turn(self, status: int) -> None:
        """A request was answered with ``status``; 0: the engine was gone before anything was sent."""
        self._turns.add(1, {"status": f"{status // 100}xx" if status else "unavailable"})

    def count_resize(self, outcome: ResizeOutcome) -> None:
        """A plan was handled."""
        self._resizes.add(1, {"outcome": outcome.outcome.value})
        self._moved.add(outcome.bytes_moved)
        if outcome.outcome is Outcome.APPLIED:
            self._pause.record(outcome.pause_ms / 1000)

    def count_restart(self) -> None:
        """The engine is being started again."""
        self._restarts.add(1)

    def count_outage(self) -> None:
        """Something could not be written to the store."""
        self._outages.add(1)

    def scrape(self) -> str:
        """Own series and vLLM's in Prometheus text format."""
        return self._telemetry.scrape() + generate_latest(REGISTRY).decode()

    def close(self) -> None:
        """Stop the provider."""
        self._telemetry.close()
