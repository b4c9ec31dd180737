"""The policy service's OpenTelemetry instruments, on a page of their own."""

from __future__ import annotations

from services.policy.process import Fault
from services.telemetry import Telemetry


class PolicyMetrics:
    """Counts decisions, plans and faults of one policy service."""

    def __init__(self) -> None:
        self._telemetry = Telemetry()
        meter = self._telemetry.meter("wisp.policy")
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
        return self._telemetry.scrape()

    def close(self) -> None:
        """Stop the provider."""
        self._telemetry.close()
