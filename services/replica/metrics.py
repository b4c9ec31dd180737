"""A replica's series: its own OpenTelemetry instruments and vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation
from prometheus_client import REGISTRY, generate_latest

from services.telemetry import Telemetry
from wisp_core.contracts import Outcome, PagerCounts, ReplicaSnapshot, ResizeOutcome

Observer = Callable[[CallbackOptions], Iterable[Observation]]


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
        self._first_piece = meter.create_histogram(
            "wisp.replica.first_piece_duration", unit="s", description="Time from arrival to the first piece of body."
        )
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
        for name, unit, text in (
            ("cap", "", "Expert slots per layer."),
            ("kv_blocks", "", "Usable KV blocks."),
            ("budget", "By", "Budget that experts and KV share."),
            ("resident", "By", "Bytes of the pools' mappings that are resident."),
            ("healthy", "", "1 while the engine serves."),
            ("fetched_tokens", "1/s", "Prefix tokens that come back from host memory (kv_host_bytes)."),
        ):
            meter.create_observable_gauge(f"wisp.replica.{name}", [self._observer(name)], unit=unit, description=text)
        for name, unit, text in (
            ("expert_hits", "", "Distinct experts per layer and step that were resident."),
            ("expert_misses", "", "Expert copies from host memory to a slot."),
            ("expert_copied", "By", "Bytes of these copies."),
        ):
            meter.create_observable_counter(
                f"wisp.replica.{name}", [self._pager_observer(name)], unit=unit, description=text
            )

    def _observer(self, name: str) -> Observer:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            if self._snapshot is not None:
                yield Observation(_gauge(self._snapshot, name))

        return observe

    def _pager_observer(self, name: str) -> Observer:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            if self._snapshot is not None:
                yield Observation(_count(self._snapshot.decode, name), {"phase": "decode"})
                yield Observation(_count(self._snapshot.prefill, name), {"phase": "prefill"})

        return observe

    def observe_snapshot(self, snapshot: ReplicaSnapshot) -> None:
        """What the gauges show from now on."""
        self._snapshot = snapshot

    def count_turn(self, status: int, first_piece_s: float | None) -> None:
        """A request was answered with ``status``; 0: the engine was gone before anything was sent."""
        self._turns.add(1, {"status": f"{status // 100}xx" if status else "unavailable"})
        if first_piece_s is not None:
            self._first_piece.record(first_piece_s)

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


def _gauge(snapshot: ReplicaSnapshot, name: str) -> float:
    return {
        "cap": snapshot.split.cap,
        "kv_blocks": snapshot.split.kv_blocks,
        "budget": snapshot.budget_bytes,
        "resident": snapshot.resident_bytes,
        "healthy": int(snapshot.is_healthy),
        "fetched_tokens": snapshot.kv.fetched_tokens_per_s,
    }[name]


def _count(counts: PagerCounts, name: str) -> int:
    return {
        "expert_hits": counts.hits,
        "expert_misses": counts.misses,
        "expert_copied": counts.missed_bytes,
    }[name]
