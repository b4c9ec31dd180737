"""A tenant's limits: taken before a turn, settled after it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict

from services.ingress.errors import rate_limited
from services.ingress.request_fields import TurnFields
from wisp_core.contracts import Placement, TenantSpec
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.interface import Admission, Limit, TenantStore, TurnRequest
from wisp_core.store.memory_store import MemoryStore

LEASE_S = 60.0
"""A running turn counts for this long after its ingress was last heard of."""
RENEW_S = 20.0
FIRST_BYTES_PER_TOKEN = 3.0


class PromptEstimator:
    """How many tokens a prompt has, before it is tokenized: learned from what the engine counted.

    Each tenant's own, so that nobody's odd prompts change what others are charged in advance.
    """

    def __init__(self) -> None:
        self._bytes_per_token: defaultdict[str, float] = defaultdict(lambda: FIRST_BYTES_PER_TOKEN)

    def tokens(self, tenant_id: str, fields: TurnFields) -> int:
        """Prompt tokens of a request; exact for token ids."""
        return fields.token_ids + math.ceil(fields.text_bytes / self._bytes_per_token[tenant_id])

    def learn(self, tenant_id: str, fields: TurnFields, prompt_tokens: int) -> None:
        """The engine counted ``prompt_tokens`` for this request."""
        counted = prompt_tokens - fields.token_ids
        if counted > 0 and fields.text_bytes > 0:
            known = self._bytes_per_token[tenant_id]
            self._bytes_per_token[tenant_id] = known + 0.05 * (fields.text_bytes / counted - known)


class TurnLimiter:
    """Admits turns by the store's word; while it is away, by this process's own count."""

    def __init__(self, store: TenantStore) -> None:
        self._store = store
        self._fallback = MemoryStore()
        self._running: dict[str, tuple[TurnRequest, TenantStore]] = {}
        self._ended: dict[str, int] = {}
        """Tokens used by turns that have ended, but are still counted as running."""

    async def admit(self, tenant: TenantSpec, turn_id: str, tokens: int, session_key: str = "") -> Placement | None:
        """Take one request, ``tokens`` and one running turn. Raises ApiError (429).

        Returns where the session lives, if it is placed: known by the same exchange. Whoever cancels this has to settle
        the turn: it may be counted already.
        """
        request = TurnRequest(
            tenant_id=tenant.tenant_id,
            turn_id=turn_id,
            tokens=tokens,
            requests_per_minute=tenant.requests_per_minute,
            tokens_per_minute=tenant.tokens_per_minute,
            max_concurrent_turns=tenant.max_concurrent_turns,
            lease_s=LEASE_S,
            session_key=session_key,
        )
        admission = await self._ask(request)
        if not admission.allowed and await self._settle_ended(tenant.tenant_id):
            admission = await self._ask(request)
        if admission.allowed:
            return admission.placement
        del self._running[turn_id]
        limits = {
            Limit.REQUESTS: (tenant.requests_per_minute, 1),
            Limit.TOKENS: (tenant.tokens_per_minute, tokens),
            Limit.TURNS: (tenant.max_concurrent_turns, 1),
        }
        assert admission.which is not None
        raise rate_limited(admission, *limits[admission.which])

    async def _ask(self, request: TurnRequest) -> Admission:
        self._running[request.turn_id] = (request, self._store)
        try:
            return await self._store.admit(request, time.time())
        except StoreUnavailableError:
            self._running[request.turn_id] = (request, self._fallback)
            return await self._fallback.admit(request, time.time())

    async def settle(self, turn_id: str, used_tokens: int, *, delay_s: float = 0.0) -> None:
        """End a turn that was admitted; its lease ends by itself if the store is away.

        Within ``delay_s`` it is counted as running, except where that would refuse another turn of its tenant.
        """
        self._ended[turn_id] = used_tokens
        await asyncio.sleep(delay_s)
        await self._settle(turn_id)

    async def _settle(self, turn_id: str) -> None:
        if turn_id not in self._ended:
            return  # An admission was faster.
        request, store = self._running[turn_id]
        try:
            with contextlib.suppress(StoreUnavailableError):
                await store.settle(request, self._ended[turn_id], time.time())
        finally:
            # Only now: until then whoever is refused has to wait for it. To settle twice changes nothing.
            self._ended.pop(turn_id, None)
            self._running.pop(turn_id, None)

    async def _settle_ended(self, tenant_id: str) -> bool:
        """Settle the tenant's turns that have ended; False if there are none."""
        ended = [turn_id for turn_id in self._ended if self._running[turn_id][0].tenant_id == tenant_id]
        # Whoever was refused may leave now: that must not undo the end of turns of others.
        await asyncio.shield(asyncio.gather(*map(self._settle, ended)))
        return bool(ended)

    async def renew_forever(self) -> None:
        """Keep the turns of this process counted as running."""
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Extend the lease of every running turn, in whichever store it is counted."""
        for request, store in list(self._running.values()):
            # One store being away says nothing of the other; the calls after the first fail at once.
            with contextlib.suppress(StoreUnavailableError):
                await store.renew_turn(request.tenant_id, request.turn_id, LEASE_S, time.time())
