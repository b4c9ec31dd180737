"""The store in memory: one process, nothing kept. Same contract as Redis, and the same tests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from typing import TYPE_CHECKING

from wisp_core import contracts as c
from wisp_core.errors import StoreUnavailableError
from wisp_core.store import keys as k
from wisp_core.store import signature_parts
from wisp_core.store.interface import Admission, Limit, Store, TurnRequest, is_news
from wisp_core.store.usage import (
    is_single_turn,
    tenant_of,
    tenant_usage_fields,
    tenant_usage_from_fields,
    usage_fields,
    usage_from_fields,
)
from wisp_core.tenant_contracts import SessionUsage, TenantSpec, TenantUsage, TurnRecord


class MemoryStore:
    """``Store`` in memory, for one event loop. ``is_available`` False makes every method raise."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives Unix seconds; TTLs follow it."""
        self.is_available = True
        self._clock = clock
        self._snapshots: dict[str, tuple[float, c.ReplicaSnapshot]] = {}
        self._plans: dict[str, c.SplitPlan] = {}
        self._plan_written = asyncio.Condition()
        self._outcomes: defaultdict[str, deque[c.ResizeOutcome]] = defaultdict(lambda: deque(maxlen=k.LOG_LENGTH))
        self._decisions: defaultdict[str, deque[c.DecisionRecord]] = defaultdict(lambda: deque(maxlen=k.LOG_LENGTH))
        self._signatures: defaultdict[str, dict[str, c.Signature]] = defaultdict(dict)
        self._placements: OrderedDict[str, tuple[float, c.Placement]] = OrderedDict()
        self._turn_log: deque[TurnRecord] = deque(maxlen=k.TURN_LOG_LENGTH)
        self._usage: OrderedDict[str, tuple[float, dict[str, str | float]]] = OrderedDict()
        self._tenants: dict[str, TenantSpec] = {}
        self._tenant_usage: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._full_at_s: dict[tuple[str, Limit], float] = {}
        self._turns: defaultdict[str, dict[str, float]] = defaultdict(dict)
        self._leases: dict[str, tuple[float, str]] = {}

    async def ping(self) -> None:
        """See Store."""
        if not self.is_available:
            raise StoreUnavailableError("the in-memory store is switched off")

    async def close(self) -> None:
        """See Store."""

    async def write_snapshot(self, snapshot: c.ReplicaSnapshot) -> None:
        """See Store."""
        await self.ping()
        self._snapshots[snapshot.replica_id] = (self._clock() + k.SNAPSHOT_TTL_S, snapshot)

    async def list_snapshots(self) -> list[c.ReplicaSnapshot]:
        """See Store."""
        await self.ping()
        return await self.read_snapshots(sorted(self._snapshots))

    async def list_reports(self) -> dict[str, float]:
        """See Store."""
        await self.ping()
        now_s = self._clock()
        until = {replica_id: until_s for replica_id, (until_s, _) in self._snapshots.items()}
        return {replica_id: until_s - k.SNAPSHOT_TTL_S for replica_id, until_s in until.items() if until_s > now_s}

    async def read_snapshots(self, replica_ids: Collection[str]) -> list[c.ReplicaSnapshot]:
        """See Store."""
        await self.ping()
        now_s = self._clock()
        found = [self._snapshots[replica_id] for replica_id in replica_ids if replica_id in self._snapshots]
        return [snapshot for until_s, snapshot in found if until_s > now_s]

    async def delete_snapshot(self, replica_id: str) -> None:
        """See Store."""
        await self.ping()
        self._snapshots.pop(replica_id, None)

    async def write_plan(self, plan: c.SplitPlan) -> bool:
        """See Store."""
        await self.ping()
        current = self._plans.get(plan.replica_id)
        if current is not None and plan.revision <= current.revision:
            return False
        async with self._plan_written:
            self._plans[plan.replica_id] = plan
            self._plan_written.notify_all()
        return True

    async def read_plan(self, replica_id: str) -> c.SplitPlan | None:
        """See Store."""
        await self.ping()
        return self._plans.get(replica_id)

    async def watch_plans(self, replica_id: str, period_s: float = 1.0) -> AsyncGenerator[c.SplitPlan, None]:
        """See Store."""
        last: c.SplitPlan | None = None
        while True:
            plan = self._plans.get(replica_id) if self.is_available else None
            if plan is not None and is_news(plan, last):
                last = plan
                yield plan
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(period_s), self._plan_written:
                    await self._plan_written.wait()

    async def append_outcome(self, outcome: c.ResizeOutcome) -> None:
        """See Store."""
        await self.ping()
        self._outcomes[outcome.replica_id].appendleft(outcome)

    async def list_outcomes(self, replica_id: str, n: int) -> list[c.ResizeOutcome]:
        """See Store."""
        await self.ping()
        return list(self._outcomes[replica_id])[: max(0, n)]

    async def append_decision(self, record: c.DecisionRecord) -> None:
        """See Store."""
        await self.ping()
        self._decisions[record.replica_id].appendleft(record)

    async def list_decisions(self, replica_id: str, n: int) -> list[c.DecisionRecord]:
        """See Store."""
        await self.ping()
        return list(self._decisions[replica_id])[: max(0, n)]

    async def write_signatures(self, replica_id: str, signatures: Iterable[c.Signature]) -> None:
        """See Store."""
        await self.ping()
        for signature in signatures:
            parts = self._signatures[signature.key]
            parts[replica_id] = signature
            while len(parts) > signature_parts.MAX_PARTS:
                del parts[min(parts.keys() - {replica_id}, key=lambda one: parts[one].at_s)]

    async def read_signatures(self, keys: Iterable[str]) -> dict[str, c.Signature]:
        """See Store."""
        await self.ping()
        oldest_s = self._clock() - k.SIGNATURE_TTL_S
        found = {key: [one for one in self._signatures.get(key, {}).values() if one.at_s >= oldest_s] for key in keys}
        return {key: signature_parts.total(parts) for key, parts in found.items() if parts}

    async def place(self, session_key: str, expected_version: int | None, placement: c.Placement) -> c.Placement:
        """See Store."""
        current = await self._placement(session_key)
        until_s = self._clock() + k.SESSION_TTL_S
        if current is not None and (current.version != expected_version or current.replica_id == placement.replica_id):
            self._placements[session_key] = (until_s, current)
            return current
        self._placements.pop(session_key, None)
        self._placements[session_key] = (until_s, placement)
        if len(self._placements) > k.INDEX_LENGTH:
            self._placements.popitem(last=False)
        return placement

    async def read_placements(self, session_keys: Iterable[str]) -> dict[str, c.Placement]:
        """See Store."""
        await self.ping()
        now_s = self._clock()
        found = {key: self._placements[key] for key in session_keys if key in self._placements}
        return {key: placement for key, (until_s, placement) in found.items() if until_s > now_s}

    async def _placement(self, session_key: str) -> c.Placement | None:
        return (await self.read_placements([session_key])).get(session_key)

    async def list_placements(self, n: int) -> list[c.Placement]:
        """See Store."""
        newest = list(reversed(self._placements))[: max(0, n)]
        return list((await self.read_placements(newest)).values())

    async def record_turn(self, turn: TurnRecord) -> None:
        """See Store."""
        await self.ping()
        if (tenant_id := tenant_of(turn.session_key)) in self._tenants:
            self._tenant_usage[tenant_id].update(tenant_usage_fields(turn))
        self._turn_log.appendleft(turn)
        if not is_single_turn(turn.session_key):
            self._record_session(turn, await self._placement(turn.session_key))

    def _record_session(self, turn: TurnRecord, placement: c.Placement | None) -> None:
        now_s = self._clock()
        until_s, usage = self._usage.pop(turn.session_key, (0.0, {}))
        usage = usage if until_s > now_s else {}
        for field, amount in usage_fields(turn).items():
            usage[field] = float(usage.get(field, 0)) + amount
        usage["replica_id"], usage["last_turn_at_s"] = turn.replica_id, turn.at_s
        self._usage[turn.session_key] = (now_s + k.SESSION_TTL_S, usage)
        if len(self._usage) > k.INDEX_LENGTH:
            self._usage.popitem(last=False)
        if placement is not None:
            self._placements[turn.session_key] = (now_s + k.SESSION_TTL_S, placement)

    async def list_turns(self, n: int) -> list[TurnRecord]:
        """See Store."""
        await self.ping()
        return list(self._turn_log)[: max(0, n)]

    async def list_sessions(self, n: int) -> list[SessionUsage]:
        """See Store."""
        await self.ping()
        now_s = self._clock()
        kept = {key: usage for key, (until_s, usage) in self._usage.items() if until_s > now_s}
        newest = sorted(kept.items(), key=lambda item: float(item[1]["last_turn_at_s"]), reverse=True)
        return [usage_from_fields(key, fields) for key, fields in newest[: max(0, n)]]

    async def write_tenant(self, tenant: TenantSpec, replaces: TenantSpec | None = None) -> bool:
        """See Store."""
        await self.ping()
        stored = self._tenants.get(tenant.tenant_id)
        if (stored and stored.at_s) != (replaces and replaces.at_s):
            return False
        self._tenants[tenant.tenant_id] = tenant
        return True

    async def delete_tenant(self, tenant_id: str) -> None:
        """See Store."""
        await self.ping()
        self._tenants.pop(tenant_id, None)
        self._tenant_usage.pop(tenant_id, None)

    async def list_tenant_usage(self) -> list[TenantUsage]:
        """See Store."""
        await self.ping()
        known = sorted(self._tenants.keys() & self._tenant_usage.keys())
        return [tenant_usage_from_fields(tenant_id, self._tenant_usage[tenant_id]) for tenant_id in known]

    async def list_tenants(self) -> list[TenantSpec]:
        """See Store."""
        await self.ping()
        return [self._tenants[tenant_id] for tenant_id in sorted(self._tenants)]

    async def admit(self, turn: TurnRequest, now_s: float) -> Admission:
        """See Store."""
        await self.ping()
        turns = self._turns[turn.tenant_id]
        for turn_id in [turn_id for turn_id, until_s in turns.items() if until_s <= now_s]:
            del turns[turn_id]
        if turn.turn_id in turns:
            return Admission(True, placement=await self._placement(turn.session_key))
        full_s = self._full_after(turn, Limit.REQUESTS, turn.num_requests, turn.requests_per_minute, now_s)
        if full_s - now_s - 60 > 1e-6:
            return Admission(False, full_s - now_s - 60, Limit.REQUESTS)
        self._full_at_s[turn.tenant_id, Limit.REQUESTS] = full_s
        if not turn.places:
            return Admission(True)
        next_request_s = full_s + 60 / turn.requests_per_minute - now_s - 60
        if len(turns) + turn.num_choices > turn.max_concurrent_turns:
            can_ever = turn.num_choices <= turn.max_concurrent_turns
            return Admission(False, max(1.0, next_request_s) if can_ever else None, Limit.TURNS)
        if turn.tokens > turn.tokens_per_minute:
            return Admission(False, None, Limit.TOKENS)
        full_s = self._full_after(turn, Limit.TOKENS, turn.tokens, turn.tokens_per_minute, now_s)
        if full_s - now_s - 60 > 1e-6:
            return Admission(False, max(full_s - now_s - 60, next_request_s), Limit.TOKENS)
        self._full_at_s[turn.tenant_id, Limit.TOKENS] = full_s
        turns.update(dict.fromkeys(turn.places, now_s + turn.lease_s))
        return Admission(True, placement=await self._placement(turn.session_key))

    def _full_after(self, turn: TurnRequest, which: Limit, amount: int, per_minute: int, now_s: float) -> float:
        """When a tenant's bucket will be full again, once ``amount`` is taken from it."""
        return max(now_s, self._full_at_s.get((turn.tenant_id, which), 0.0)) + amount * 60 / per_minute

    async def renew_turn(self, turn: TurnRequest, now_s: float) -> None:
        """See Store."""
        await self.ping()
        turns = self._turns[turn.tenant_id]
        turns.update({place: now_s + turn.lease_s for place in turn.places if place in turns})

    async def settle(self, turn: TurnRequest, used_tokens: int, now_s: float) -> None:
        """See Store."""
        await self.ping()
        bucket, turns = (turn.tenant_id, Limit.TOKENS), self._turns[turn.tenant_id]
        was_counted = [turns.pop(place, None) is not None for place in turn.places]
        if any(was_counted):
            overuse_s = (used_tokens - turn.tokens) * 60 / turn.tokens_per_minute
            self._full_at_s[bucket] = max(now_s, self._full_at_s.get(bucket, 0.0)) + overuse_s

    async def acquire_lease(self, name: str, holder: str, ttl_s: float) -> bool:
        """See Store."""
        await self.ping()
        until_s, current = self._leases.get(name, (0.0, holder))
        if current != holder and until_s > self._clock():
            return False
        self._leases[name] = (self._clock() + ttl_s, holder)
        return True

    async def release_lease(self, name: str, holder: str) -> None:
        """See Store."""
        await self.ping()
        if self._leases.get(name, (0.0, ""))[1] == holder:
            del self._leases[name]


if TYPE_CHECKING:
    _store: type[Store] = MemoryStore
