"""The ingress's OpenTelemetry instruments."""

from __future__ import annotations

from services.telemetry import Telemetry
from wisp_core.tenant_contracts import TurnRecord


class IngressMetrics:
    """Counts turns by tenant and status; nothing here carries a key, a prompt, a user or a session."""

    def __init__(self, telemetry: Telemetry) -> None:
        meter = telemetry.meter("wisp.ingress")
        self._turns = meter.create_counter("wisp.ingress.turns", description="Turns answered, by tenant and status.")
        self._ttft = meter.create_histogram(
            "wisp.ingress.ttft",
            unit="s",
            description="Time to first token of streams, from the whole request.",
        )
        self._duration = meter.create_histogram("wisp.ingress.turn_duration", unit="s", description="Time of a turn.")
        self._tokens = meter.create_counter("wisp.ingress.tokens", description="Tokens, by tenant and kind.")
        self._retries = meter.create_counter("wisp.ingress.retries", description="Attempts beyond a turn's first.")
        self._broken = meter.create_counter("wisp.ingress.broken_streams", description="Streams that ended early.")
        self._running = meter.create_up_down_counter("wisp.ingress.running_turns", description="Turns running now.")

    def begin_turn(self, tenant_id: str) -> None:
        """A turn was admitted."""
        self._running.add(1, {"tenant": tenant_id})

    def end_turn(self, tenant_id: str, status: int, turn: TurnRecord) -> None:
        """An admitted turn has ended; ``status`` 499 is a client that has gone."""
        self._running.add(-1, {"tenant": tenant_id})
        self._turns.add(1, {"tenant": tenant_id, "status": str(status)})
        self._duration.record(turn.duration_s, {"tenant": tenant_id})
        if turn.ttft_s is not None:
            self._ttft.record(turn.ttft_s, {"tenant": tenant_id})
        kinds = (
            ("prompt", turn.prompt_tokens),
            ("cached", turn.cached_tokens),
            ("completion", turn.completion_tokens),
        )
        for kind, tokens in kinds:
            self._tokens.add(tokens, {"tenant": tenant_id, "kind": kind})

    def count_refusal(self, tenant_id: str, status: int) -> None:
        """A turn was not admitted."""
        self._turns.add(1, {"tenant": tenant_id, "status": str(status)})

    def count_retry(self, tenant_id: str) -> None:
        """A turn needs one more attempt."""
        self._retries.add(1, {"tenant": tenant_id})

    def count_broken(self, tenant_id: str, reason: str) -> None:
        """A stream that had begun could not be finished."""
        self._broken.add(1, {"tenant": tenant_id, "reason": reason})
