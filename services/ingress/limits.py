"""A tenant's limits: taken before a turn, settled after it."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from services.ingress.errors import ApiError, rate_limited
from services.ingress.request_fields import TurnFields
from wisp_core.contracts import Placement
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.interface import Admission, Limit, TenantStore, TurnRequest
from wisp_core.store.memory_store import MemoryStore
from wisp_core.tenant_contracts import TenantSpec

LEASE_S = 60.0
"""A running turn counts for this long after its ingress was last heard of."""
RENEW_S = 20.0
SETTLE_RETRY_S = 1.0
"""How often turns are settled that ended while the store was away: until then they take their tenant's places."""
FIRST_BYTES_PER_TOKEN = 3.0
MOST_BYTES_PER_TOKEN = 8.0
"""Text has 2 to 6. What a client that leaves early is charged is an estimate, which must not be taught with blanks."""


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
            found = min(fields.text_bytes / counted, MOST_BYTES_PER_TOKEN)
            self._bytes_per_token[tenant_id] = known + 0.05 * (found - known)


def _request(
    tenant: TenantSpec, turn_id: str, tokens: int, *, num_choices: int = 1, session_key: str = ""
) -> TurnRequest:
    return TurnRequest(
        tenant_id=tenant.tenant_id,
        turn_id=turn_id,
        tokens=tokens,
        requests_per_minute=tenant.requests_per_minute,
        tokens_per_minute=tenant.tokens_per_minute,
        max_concurrent_turns=tenant.max_concurrent_turns,
        lease_s=LEASE_S,
        num_choices=num_choices,
        session_key=session_key,
    )


@dataclass
class _Turn:
    """A turn of this process that may be counted as running."""

    request: TurnRequest
    counted_in: list[TenantStore]
    """Where; a store that did not answer in time may have counted it all the same."""
    until_s: float
    """When its lease ends by itself, Unix time."""
    used_tokens: int = 0
    """Known when the turn has ended."""


class TurnLimiter:
    """Admits turns by the store's word; while it is away, by this process's own count."""

    def __init__(self, store: TenantStore) -> None:
        self._store = store
        self._fallback = MemoryStore()
        self._running: dict[str, _Turn] = {}
        self._ended: dict[str, _Turn] = {}
        """Turns that have ended, but may still be counted as running."""
        self._arriving: Counter[str] = Counter()
        self._next_request_s: dict[str, tuple[int, float]] = {}
        """Until when a tenant has no request left, Unix time, and of how many per minute."""

    async def arrive(self, tenant: TenantSpec) -> None:
        """Let a request in, before its body is read; ``leave`` when its answer is here. Raises ApiError (429).

        Decided by what this process knows: no more of a tenant's requests are here at once than it may have turns, for
        which a request is taken, and none while it is known to have none left, which costs nothing.
        """
        tenant_id, now_s = tenant.tenant_id, time.time()
        per_minute, next_s = self._next_request_s.get(tenant_id, (0, 0.0))
        if now_s < next_s and per_minute == tenant.requests_per_minute:
            raise rate_limited(Admission(False, next_s - now_s, Limit.REQUESTS), per_minute, 1)
        if self._arriving[tenant_id] >= tenant.max_concurrent_turns:
            await self.charge(tenant)
            raise rate_limited(Admission(False, 1.0, Limit.TURNS), tenant.max_concurrent_turns, 1)
        self._arriving[tenant_id] += 1

    def leave(self, tenant: TenantSpec) -> None:
        """A request that was let in has its answer, or the beginning of it."""
        self._arriving[tenant.tenant_id] -= 1

    async def admit(
        self, tenant: TenantSpec, turn_id: str, tokens: int, session_key: str = "", *, num_choices: int = 1
    ) -> Placement | None:
        """Take one request, ``tokens`` and a running turn's place for each choice. Raises ApiError (429).

        Returns where the session lives, if it is placed: known by the same exchange. Whoever cancels this has to settle
        the turn: it may be counted already.
        """
        request = _request(tenant, turn_id, tokens, num_choices=num_choices, session_key=session_key)
        admission = await self._ask(request)
        if admission.which in (Limit.TOKENS, Limit.TURNS) and await self._settle_ended(tenant.tenant_id):
            admission = await self._ask(replace(request, num_requests=0))
        if admission.allowed:
            return admission.placement
        await self.settle(turn_id, 0)
        raise self._refusal(tenant, request, admission)

    async def charge(self, tenant: TenantSpec) -> None:
        """Take one request, and nothing else, for one that is no turn. Raises ApiError (429) if none is left."""
        request, now_s = _request(tenant, "", 0, num_choices=0), time.time()
        try:
            admission = await self._store.admit(request, now_s)
        except StoreUnavailableError:
            admission = await self._fallback.admit(request, now_s)
        if not admission.allowed:
            raise self._refusal(tenant, request, admission)

    def _refusal(self, tenant: TenantSpec, request: TurnRequest, admission: Admission) -> ApiError:
        limits = {
            Limit.REQUESTS: (tenant.requests_per_minute, 1),
            Limit.TOKENS: (tenant.tokens_per_minute, request.tokens),
            Limit.TURNS: (tenant.max_concurrent_turns, request.num_choices),
        }
        assert admission.which is not None
        if admission.which is Limit.REQUESTS and admission.retry_after_s is not None:
            next_s = time.time() + admission.retry_after_s
            self._next_request_s[tenant.tenant_id] = (tenant.requests_per_minute, next_s)
        return rate_limited(admission, *limits[admission.which])

    async def _ask(self, request: TurnRequest) -> Admission:
        now_s = time.time()
        turn = self._running[request.turn_id] = _Turn(request, [self._store], now_s + LEASE_S)
        try:
            admission = await self._store.admit(request, now_s)
        except StoreUnavailableError as error:
            turn.counted_in = [self._fallback, self._store] if error.may_have_run else [self._fallback]
            return await self._fallback.admit(request, now_s)
        if not admission.allowed:
            turn.counted_in = []
        return admission

    async def settle(self, turn_id: str, used_tokens: int, *, delay_s: float = 0.0) -> None:
        """End a turn that was admitted; where the store is away, as soon as it is back or its lease has ended.

        Within ``delay_s`` it is counted as running, except where that would refuse another turn of its tenant.
        """
        turn = self._running.pop(turn_id, None)
        if turn is None:
            return  # It was refused.
        turn.used_tokens = used_tokens
        self._ended[turn_id] = turn
        await asyncio.sleep(delay_s)
        await self._settle(turn_id)

    async def _settle(self, turn_id: str) -> bool:
        """Settle a turn that has ended, wherever it may be counted; False while a store is away."""
        turn = self._ended.get(turn_id)
        if turn is None:
            return True  # An admission was faster.
        left: list[TenantStore] = []
        for store in turn.counted_in:
            try:
                # An admission may be at it as well: to settle twice changes nothing.
                await store.settle(turn.request, turn.used_tokens, time.time())
            except StoreUnavailableError:
                if time.time() < turn.until_s:
                    left.append(store)
        turn.counted_in = left
        if not left:
            self._ended.pop(turn_id, None)
        return not left

    async def _settle_ended(self, tenant_id: str | None = None) -> bool:
        """Settle turns that have ended, a tenant's or all; False if there are none, or a store is away."""
        ended = [name for name, turn in self._ended.items() if tenant_id in (None, turn.request.tenant_id)]
        for turn_id in ended:
            if not await self._settle(turn_id):
                return False
        return bool(ended)

    async def renew_forever(self) -> None:
        """Keep the turns of this process counted as running, and no longer than they run."""
        renewed_s = time.monotonic()
        while True:
            await asyncio.sleep(SETTLE_RETRY_S)
            await self._settle_ended()
            if time.monotonic() - renewed_s >= RENEW_S:
                renewed_s = time.monotonic()
                await self.renew()

    async def renew(self) -> None:
        """Extend the lease of every running turn, in whichever store it is counted."""
        for turn in list(self._running.values()):
            for store in turn.counted_in:
                # One store being away says nothing of the other; the calls after the first fail at once.
                with contextlib.suppress(StoreUnavailableError):
                    now_s = time.time()
                    await store.renew_turn(turn.request, now_s)
                    turn.until_s = now_s + LEASE_S
