"""The store on Redis (or Valkey)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError
from redis.asyncio.client import PubSub

from wisp_core import contracts as c
from wisp_core.errors import StoreUnavailableError
from wisp_core.store import keys as k
from wisp_core.store import scripts, signature_parts
from wisp_core.store.connection import FAILURES, Connection
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

SNAPSHOTS_AT_ONCE = 8
"""Snapshots that are parsed before other tasks get their chance: 0.1 ms each for a model of 48 layers."""

ContractT = TypeVar("ContractT", bound=c.Contract)


def _parse(cls: type[ContractT], text: str | None) -> ContractT | None:
    """Read a contract; None if there is none or it is of another schema."""
    if text is None:
        return None
    try:
        return cls.model_validate_json(text)
    except ValidationError:
        return None


def _parse_all(cls: type[ContractT], texts: Iterable[str | None]) -> list[ContractT]:
    return [value for text in texts if (value := _parse(cls, text)) is not None]


class RedisStore:
    """``Store`` on Redis. Belongs to the event loop that first uses it."""

    def __init__(
        self,
        url: str,
        service: str,
        *,
        password: str | None = None,
        timeout_s: float = 0.2,
        is_needed: bool = False,
    ) -> None:
        """Nothing is connected yet.

        Args:
            url: ``redis://``, ``rediss://`` or ``unix://`` URL.
            service: Name of the service, part of every key.
            password: Overrides the URL's, so that the URL may be logged.
            timeout_s: Longest wait for a connection and for a reply, seconds.
            is_needed: The caller ends where Redis fails, and says so; otherwise failures are logged.
        """
        self._keys = k.Keys(service)
        self._connection = Connection(url, password, timeout_s, is_needed=is_needed)

    @property
    def round_trips(self) -> int:
        """Exchanges with Redis so far."""
        return self._connection.round_trips

    async def write_snapshot(self, snapshot: c.ReplicaSnapshot) -> None:
        """See Store."""
        async with self._connection.guard() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.set(
                self._keys.snapshot(snapshot.replica_id), snapshot.model_dump_json(), px=int(k.SNAPSHOT_TTL_S * 1000)
            )
            pipe.zadd(self._keys.replicas, {snapshot.replica_id: time.time()})
            pipe.zremrangebyscore(self._keys.replicas, "-inf", time.time() - k.SNAPSHOT_TTL_S)
            await pipe.execute()

    async def list_snapshots(self) -> list[c.ReplicaSnapshot]:
        """See Store."""
        async with self._connection.guard(writes=False) as redis:
            replica_ids = sorted(await redis.zrange(self._keys.replicas, 0, -1))
        return await self.read_snapshots(replica_ids)

    async def list_reports(self) -> dict[str, float]:
        """See Store."""
        async with self._connection.guard(writes=False) as redis:
            oldest_s = time.time() - k.SNAPSHOT_TTL_S
            rows: list[tuple[str, float]] = await redis.zrangebyscore(
                self._keys.replicas, oldest_s, "+inf", withscores=True
            )
        return dict(rows)

    async def read_snapshots(self, replica_ids: Collection[str]) -> list[c.ReplicaSnapshot]:
        """See Store."""
        if not replica_ids:
            return []
        async with self._connection.guard(writes=False) as redis:
            texts = await redis.mget([self._keys.snapshot(replica_id) for replica_id in replica_ids])
        snapshots: list[c.ReplicaSnapshot] = []
        for at in range(0, len(texts), SNAPSHOTS_AT_ONCE):
            snapshots += _parse_all(c.ReplicaSnapshot, texts[at : at + SNAPSHOTS_AT_ONCE])
            await asyncio.sleep(0)
        return snapshots

    async def delete_snapshot(self, replica_id: str) -> None:
        """See Store."""
        async with self._connection.guard() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.delete(self._keys.snapshot(replica_id))
            pipe.zrem(self._keys.replicas, replica_id)
            await pipe.execute()

    async def write_plan(self, plan: c.SplitPlan) -> bool:
        """See Store."""
        keys = [self._keys.plan(plan.replica_id), self._keys.plan_wakeup(plan.replica_id)]
        args: list[str | int | float] = [plan.revision, plan.model_dump_json(), k.PLAN_TTL_S * 1000]
        return bool(await self._connection.run(scripts.WRITE_PLAN, keys, args))

    async def read_plan(self, replica_id: str) -> c.SplitPlan | None:
        """See Store."""
        async with self._connection.guard(writes=False) as redis:
            return _parse(c.SplitPlan, await redis.hget(self._keys.plan(replica_id), "plan"))

    async def watch_plans(self, replica_id: str, period_s: float = 1.0) -> AsyncGenerator[c.SplitPlan, None]:
        """See Store. Messages lost while Redis was away do not matter: the key is re-read each period."""
        last: c.SplitPlan | None = None
        async with self._connection.client.pubsub(ignore_subscribe_messages=True) as wakeups:
            while True:
                with contextlib.suppress(StoreUnavailableError):
                    plan = await self.read_plan(replica_id)
                    if plan is not None and is_news(plan, last):
                        last = plan
                        yield plan
                await _wait_for_wakeup(wakeups, self._keys.plan_wakeup(replica_id), period_s)

    async def append_outcome(self, outcome: c.ResizeOutcome) -> None:
        """See Store."""
        await self._append(self._keys.outcomes(outcome.replica_id), outcome)

    async def list_outcomes(self, replica_id: str, n: int) -> list[c.ResizeOutcome]:
        """See Store."""
        return _parse_all(c.ResizeOutcome, await self._read_log(self._keys.outcomes(replica_id), n))

    async def append_decision(self, record: c.DecisionRecord) -> None:
        """See Store."""
        await self._append(self._keys.decisions(record.replica_id), record)

    async def list_decisions(self, replica_id: str, n: int) -> list[c.DecisionRecord]:
        """See Store."""
        return _parse_all(c.DecisionRecord, await self._read_log(self._keys.decisions(replica_id), n))

    async def write_signatures(self, replica_id: str, signatures: Iterable[c.Signature]) -> None:
        """See Store."""
        parts = list(signatures)
        if not parts:
            return
        args: list[str | int | float] = [replica_id, k.SIGNATURE_TTL_S * 1000, signature_parts.MAX_PARTS]
        await self._connection.run(
            scripts.WRITE_SIGNATURES,
            [self._keys.signature(part.key) for part in parts],
            [*args, *map(signature_parts.to_text, parts)],
        )

    async def read_signatures(self, keys: Iterable[str]) -> dict[str, c.Signature]:
        """See Store."""
        wanted = list(dict.fromkeys(keys))
        if not wanted:
            return {}
        async with self._connection.guard(writes=False) as redis, redis.pipeline(transaction=False) as pipe:
            for key in wanted:
                pipe.hvals(self._keys.signature(key))
            found = await pipe.execute()
        oldest_s = time.time() - k.SIGNATURE_TTL_S
        totals = {key: signature_parts.from_texts(texts, oldest_s) for key, texts in zip(wanted, found, strict=True)}
        return {key: signature for key, signature in totals.items() if signature is not None}

    async def place(self, session_key: str, expected_version: int | None, placement: c.Placement) -> c.Placement:
        """See Store."""
        args: list[str | int | float] = [
            "" if expected_version is None else expected_version,
            placement.version,
            placement.replica_id,
            placement.model_dump_json(),
            placement.at_s,
            session_key,
            k.SESSION_TTL_S * 1000,
            k.INDEX_LENGTH,
        ]
        keys = [self._keys.placement(session_key), self._keys.placements]
        winner = _parse(c.Placement, await self._connection.run(scripts.PLACE, keys, args))
        return placement if winner is None else winner

    async def read_placements(self, session_keys: Iterable[str]) -> dict[str, c.Placement]:
        """See Store."""
        async with self._connection.guard(writes=False) as redis, redis.pipeline(transaction=False) as pipe:
            for session_key in session_keys:
                pipe.hget(self._keys.placement(session_key), "placement")
            texts = await pipe.execute()
        return {placement.session_key: placement for placement in _parse_all(c.Placement, texts)}

    async def list_placements(self, n: int) -> list[c.Placement]:
        """See Store."""
        async with self._connection.guard(writes=False) as redis:
            session_keys = await redis.zrange(self._keys.placements, 0, n - 1, desc=True) if n > 0 else []
        return list((await self.read_placements(session_keys)).values())

    async def record_turn(self, turn: TurnRecord) -> None:
        """See Store."""
        session = {} if is_single_turn(turn.session_key) else usage_fields(turn)
        tenant_id, tenant = tenant_of(turn.session_key), tenant_usage_fields(turn)
        keys = [
            self._keys.session(turn.session_key),
            self._keys.tenant_usage(tenant_id),
            self._keys.placement(turn.session_key),
            self._keys.sessions,
            self._keys.turn_log,
            self._keys.tenants,
        ]
        args: list[str | int | float] = [
            turn.session_key,
            turn.at_s,
            turn.replica_id,
            k.SESSION_TTL_S,
            k.INDEX_LENGTH,
            turn.model_dump_json(),
            k.TURN_LOG_LENGTH,
            k.LOG_TTL_S,
            len(session),
            tenant_id,
        ]
        for field, amount in (*session.items(), *tenant.items()):
            args += [field, amount]
        await self._connection.run(scripts.RECORD_TURN, keys, args)

    async def list_turns(self, n: int) -> list[TurnRecord]:
        """See Store."""
        return _parse_all(TurnRecord, await self._read_log(self._keys.turn_log, n))

    async def list_sessions(self, n: int) -> list[SessionUsage]:
        """See Store."""
        async with self._connection.guard(writes=False) as redis, redis.pipeline(transaction=False) as pipe:
            session_keys = await redis.zrange(self._keys.sessions, 0, n - 1, desc=True) if n > 0 else []
            for session_key in session_keys:
                pipe.hgetall(self._keys.session(session_key))
            rows = await pipe.execute()
        return [usage_from_fields(key, row) for key, row in zip(session_keys, rows, strict=True) if row]

    async def write_tenant(self, tenant: TenantSpec, replaces: TenantSpec | None = None) -> bool:
        """See Store."""
        expected = "" if replaces is None else repr(replaces.at_s)
        args: list[str | int | float] = [tenant.tenant_id, expected, tenant.model_dump_json()]
        return bool(await self._connection.run(scripts.WRITE_TENANT, [self._keys.tenants], args))

    async def delete_tenant(self, tenant_id: str) -> None:
        """See Store."""
        async with self._connection.guard() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.hdel(self._keys.tenants, tenant_id)
            pipe.delete(self._keys.tenant_usage(tenant_id))
            await pipe.execute()

    async def list_tenant_usage(self) -> list[TenantUsage]:
        """See Store."""
        async with self._connection.guard(writes=False) as redis, redis.pipeline(transaction=False) as pipe:
            tenant_ids = sorted(await redis.hkeys(self._keys.tenants))
            for tenant_id in tenant_ids:
                pipe.hgetall(self._keys.tenant_usage(tenant_id))
            rows = await pipe.execute()
        pairs = zip(tenant_ids, rows, strict=True)
        return [tenant_usage_from_fields(tenant_id, row) for tenant_id, row in pairs if row]

    async def list_tenants(self) -> list[TenantSpec]:
        """See Store."""
        async with self._connection.guard(writes=False) as redis:
            rows: dict[str, str] = await redis.hgetall(self._keys.tenants)
        return _parse_all(TenantSpec, [rows[tenant_id] for tenant_id in sorted(rows)])

    async def admit(self, turn: TurnRequest, now_s: float) -> Admission:
        """See Store."""
        keys = [
            self._keys.limit(turn.tenant_id, Limit.REQUESTS),
            self._keys.limit(turn.tenant_id, Limit.TOKENS),
            self._keys.turns(turn.tenant_id),
            self._keys.placement(turn.session_key),
        ]
        args: list[str | int | float] = [
            f"{now_s:.6f}",
            turn.requests_per_minute,
            turn.tokens_per_minute,
            turn.tokens,
            turn.max_concurrent_turns,
            turn.lease_s,
            turn.num_requests,
            *turn.places,
        ]
        which, *rest = await self._connection.run(scripts.ADMIT, keys, args)
        if not which:
            return Admission(True, placement=_parse(c.Placement, rest[1]))
        return Admission(False, float(rest[0]) if rest[0] else None, Limit(which))

    async def renew_turn(self, turn: TurnRequest, now_s: float) -> None:
        """See Store."""
        key = self._keys.turns(turn.tenant_id)
        async with self._connection.guard() as redis, redis.pipeline(transaction=False) as pipe:
            pipe.zadd(key, dict.fromkeys(turn.places, now_s + turn.lease_s), xx=True)
            pipe.pexpire(key, int(turn.lease_s * 1000) + 1000)
            await pipe.execute()

    async def settle(self, turn: TurnRequest, used_tokens: int, now_s: float) -> None:
        """See Store."""
        keys = [self._keys.limit(turn.tenant_id, Limit.TOKENS), self._keys.turns(turn.tenant_id)]
        overuse_s = (used_tokens - turn.tokens) * 60 / turn.tokens_per_minute
        await self._connection.run(scripts.SETTLE, keys, [f"{now_s:.6f}", f"{overuse_s:.6f}", *turn.places])

    async def acquire_lease(self, name: str, holder: str, ttl_s: float) -> bool:
        """See Store."""
        return bool(
            await self._connection.run(scripts.ACQUIRE_LEASE, [self._keys.lease(name)], [holder, int(ttl_s * 1000)])
        )

    async def release_lease(self, name: str, holder: str) -> None:
        """See Store."""
        await self._connection.run(scripts.RELEASE_LEASE, [self._keys.lease(name)], [holder])

    async def ping(self) -> None:
        """See Store. A lease that nobody else wants: a PING is answered by a server that can do neither, too."""
        await self.acquire_lease(f"ping-{id(self):x}", "ping", 1.0)

    async def close(self) -> None:
        """See Store."""
        await self._connection.close()

    async def _append(self, key: str, record: c.Contract) -> None:
        async with self._connection.guard() as redis, redis.pipeline(transaction=True) as pipe:
            pipe.lpush(key, record.model_dump_json())
            pipe.ltrim(key, 0, k.LOG_LENGTH - 1)
            pipe.expire(key, k.LOG_TTL_S)
            await pipe.execute()

    async def _read_log(self, key: str, n: int) -> Sequence[str]:
        if n <= 0:
            return []
        async with self._connection.guard(writes=False) as redis:
            texts: list[str] = await redis.lrange(key, 0, n - 1)
        return texts


async def _wait_for_wakeup(wakeups: PubSub, channel: str, period_s: float) -> None:
    """Return when a message came or after ``period_s``, whatever the state of the connection."""
    deadline_s = time.monotonic() + period_s
    try:
        if not wakeups.subscribed:
            await wakeups.subscribe(channel)
        while (left_s := deadline_s - time.monotonic()) > 0:
            if await wakeups.get_message(timeout=left_s) is not None:
                return
    except FAILURES:
        await asyncio.sleep(max(0.0, deadline_s - time.monotonic()))


if TYPE_CHECKING:
    _store: type[Store] = RedisStore
