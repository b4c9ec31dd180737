"""One request, and, once it is admitted, its turn and what that is charged."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from services.ingress.errors import ApiError
from services.ingress.events import Usage
from services.ingress.request_fields import TurnFields
from services.ingress.sessions import Session
from wisp_core.contracts import Placement
from wisp_core.tenant_contracts import TenantSpec, TurnRecord

CLIENT_GONE = 499


def status_of(error: BaseException) -> int:
    """What a request that ended by ``error`` counts as; a cancelled one has lost its client."""
    if isinstance(error, ApiError):
        return error.status
    return CLIENT_GONE if isinstance(error, asyncio.CancelledError) else 500


@dataclass(frozen=True)
class Reply:
    """An answer to the client: a whole body, or a stream of pieces."""

    status: int
    headers: dict[str, str]
    body: bytes | AsyncGenerator[bytes, None]


@dataclass
class Arrival:
    """A request that is here, and how far it has come."""

    tenant: TenantSpec
    is_charged: bool = False
    """Whether one of its tenant's requests is taken, or about to be."""
    parsing: asyncio.Future[TurnFields] | None = None
    """A thread that parses its body."""

    def when_parsed(self, act: Callable[[], None]) -> None:
        """Call ``act`` as soon as no thread parses its body: now, perhaps."""
        if self.parsing is None or self.parsing.done():
            act()
        else:
            self.parsing.add_done_callback(lambda _: act())


class RunningTurn:
    """One admitted turn, from admission to its record."""

    def __init__(
        self,
        tenant: TenantSpec,
        session: Session,
        turn_id: str,
        fields: TurnFields,
        *,
        prompt_tokens: int,
        reserved_tokens: int,
        placement: Placement | None,
        began_s: float,
    ) -> None:
        """``prompt_tokens`` is an estimate; ``reserved_tokens`` were taken from the tenant's limits.

        ``began_s``: monotonic time at which its body was here. ``placement``: where the session lived when the turn was
        admitted.
        """
        self.tenant = tenant
        self.session = session
        self.turn_id = turn_id
        self.fields = fields
        self.prompt_tokens = prompt_tokens
        self.reserved_tokens = reserved_tokens
        self.placement = placement
        self.ttft_s: float | None = None
        self.replica_id = ""
        self.usage: Usage | None = None
        self.tokens_so_far = Usage()
        self.status = CLIENT_GONE
        self._began_s = began_s

    def mark_first_token(self) -> None:
        """The first token of a stream is here. A whole answer has no time of its first token that anybody sees."""
        self.ttft_s = time.monotonic() - self._began_s

    def mark_error(self, error: BaseException) -> None:
        """The turn was answered by an error."""
        self.status = status_of(error)

    def used(self) -> Usage:
        """Tokens used: as counted by the engine at the end, else by its last word before."""
        if self.usage is not None:
            return self.usage
        so_far = self.tokens_so_far
        if so_far.completion_tokens == 0 and self.status != CLIENT_GONE:
            return Usage()
        return Usage(max(self.prompt_tokens, so_far.prompt_tokens), 0, so_far.completion_tokens)

    def charged_tokens(self) -> int:
        """Tokens to keep from what was reserved."""
        if self.usage is None and self.status == CLIENT_GONE and not self.fields.is_stream:
            # How far the engine came is not known; leaving early must not be a way around the quota.
            return self.reserved_tokens
        usage = self.used()
        return usage.prompt_tokens + usage.completion_tokens

    def record(self) -> TurnRecord:
        """The turn as it goes to the store, once it has ended."""
        usage = self.used()
        return TurnRecord(
            session_key=self.session.session_key,
            replica_id=self.replica_id,
            is_failed=self.status >= 500,
            ttft_s=self.ttft_s,
            duration_s=time.monotonic() - self._began_s,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
        )
