"""The policy service's OpenTelemetry instruments, with a Prometheus registry of their own."""

from __future__ import annotations

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from prometheus_client import CollectorRegistry, generate_latest

from services.policy.process import Fault

_SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class PolicyMetrics:
    """Counts decisions, plans and faults of one policy service."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=self._registry)
        view = View(
            instrument_name="wisp.policy.decide_duration",
            aggregation=ExplicitBucketHistogramAggregation(_SECONDS_BOUNDS),
        )
        self._provider = MeterProvider(metric_readers=[reader], views=[view], shutdown_on_exit=False)
        meter = self._provider.get_meter("wisp.policy")
        self._faults = meter.create_counter("wisp.policy.faults", description="Decisions that a policy failed to give.")
        self._epochs = meter.create_counter("wisp.policy.decisions", description="Epochs of one replica, by action.")
        self._restarts = meter.create_counter("wisp.policy.restarts", description="Restarts of the policy's process.")
        self._outages = meter.create_counter("wisp.policy.store_outages", description="Epochs without the store.")
        self._duration = meter.create_histogram(
            "wisp.policy.decide_duration", unit="s", description="Time of one decision, its process included."
        )
        for fault in Fault:  # a series that exists at 0 can be alerted on
            self._faults.add(0, {"kind": fault.value})

    def count_fault(self, fault: Fault) -> None:
        """A policy gave no usable decision."""
        self._faults.add(1, {"kind": fault.value})

    def count_action(self, action: str) -> None:
        """One replica was looked at: ``plan``, ``hold``, ``fault``, ``stale``, ``pending`` or ``fenced``."""
        self._epochs.add(1, {"action": action})

    def count_restart(self) -> None:
        """The policy's process was started again."""
        self._restarts.add(1)

    def count_outage(self) -> None:
        """An epoch was skipped because the store did not answer."""
        self._outages.add(1)

    def observe_decision(self, seconds: float) -> None:
        """A policy decided in ``seconds``."""
        self._duration.record(seconds)

    def scrape(self) -> str:
        """All series in Prometheus text format."""
        return generate_latest(self._registry).decode()

    def close(self) -> None:
        """Stop the provider."""
        self._provider.shutdown()
