"""What a router process knows, and where it sends a turn. No Ray: the router class only wires this to Serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from services.config import RoutingSettings, Section, ServiceConfig
from wisp_core.contracts import Placement, ReplicaSnapshot
from wisp_core.errors import StoreUnavailableError
from wisp_core.routing.pick import first
from wisp_core.routing.route import route
from wisp_core.routing.views import (
    ReplicaView,
    RoutingDecision,
    RoutingRequest,
    RoutingWeights,
    UseRates,
    use_rates,
    view_replica,
)
from wisp_core.store.interface import Store
from wisp_core.working_set.signature import unpack

logger = logging.getLogger(__name__)

MAX_SESSIONS = 100_000
MAX_RATES = 1024
"""Use rates kept in memory, of replicas, sessions, users and tenants; those used longest ago are dropped."""
RATES_AGE_S = 5.0
"""A session's use rates are read again when a turn needs them and they are older."""
MAX_CONFLICTS = 3
ValueT = TypeVar("ValueT")


class RouterConfig(Section):
    """Keyword arguments of the router class; JSON only, as Serve passes them on."""

    redis_url: str = Field(description="URL without a password.")
    redis_password_file: Path | None = Field(default=None, description="File that holds the password.")
    service: str
    timeout_s: float = Field(default=0.2, gt=0)
    stale_after_s: float = Field(default=10.0, gt=0)
    routing: RoutingSettings = RoutingSettings()

    @classmethod
    def of(cls, config: ServiceConfig, redis_url: str, redis_password_file: Path | None) -> RouterConfig:
        """The router's part of a service's configuration."""
        return cls(
            redis_url=redis_url,
            redis_password_file=redis_password_file,
            service=config.name,
            timeout_s=config.redis.timeout_s,
            stale_after_s=config.redis.stale_after_s,
            routing=config.routing,
        )

    def kwargs(self) -> dict[str, Any]:
        """For ``RequestRouterConfig(request_router_kwargs=...)``."""
        return self.model_dump(mode="json")


class Turn(Section):
    """What the ingress tells the router of a turn, by keyword arguments of the handle call."""

    turn_id: str = Field(default="", description="The same in each attempt of one turn.")
    session_key: str = ""
    user_key: str = ""
    tenant: str = ""
    prompt_tokens_estimate: int = 0
    max_tokens: int = 0
    pin: str | None = Field(default=None, description="The replica to use, if it exists.")

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> Turn:
        """Pick the fields out of a call's keyword arguments."""
        return cls(**{name: kwargs[name] for name in cls.model_fields if name in kwargs})


@dataclass(frozen=True)
class _Home:
    """Where a session lives as far as this process knows; ``version`` is None until the store has said so."""

    replica_id: str
    version: int | None


@dataclass(frozen=True)
class _Rates:
    """Use rates as they were read; None where nothing is known."""

    value: UseRates | None
    read_at_s: float


def _remember(cache: OrderedDict[str, ValueT], key: str, value: ValueT, limit: int) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > limit:
        cache.popitem(last=False)


class PlacementDirectory:
    """One router process's view of the service. All methods run in one event loop."""

    def __init__(self, store: Store, config: RouterConfig) -> None:
        """Nothing is read before ``refresh``."""
        self._store = store
        self._config = config
        self._weights = RoutingWeights(migrate_gain_s=config.routing.migrate_gain_s)
        self._has_read = False
        self._snapshots: dict[str, ReplicaSnapshot] = {}
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._rates: OrderedDict[str, _Rates] = OrderedDict()
        self._last_prompt_tokens: OrderedDict[str, int] = OrderedDict()
        self._own_turns: Counter[str] = Counter()
        self._mean_turn_s = 1.0

    async def rank(
        self, turn: Turn, replica_ids: Sequence[str], excluded: frozenset[str] = frozenset()
    ) -> RoutingDecision:
        """Order ``replica_ids`` for ``turn`` and settle with the other routers where its session lives.

        ``excluded`` are known to be lost, or have just failed this turn: they come last.

        Without the store the decision stands as it is: the session keeps the home this process knows, or gets the
        one its hash says.
        """
        if not self._has_read:
            with contextlib.suppress(StoreUnavailableError):
                await self.refresh()
        rates = await self._rates_of(turn)
        for _ in range(MAX_CONFLICTS):
            home = self._homes.get(turn.session_key)
            decision = self._decide(turn, home, rates, replica_ids, excluded)
            if turn.pin is not None or not turn.session_key:
                break
            settled = await self._settle(turn.session_key, home, decision)
            _remember(self._homes, turn.session_key, settled, MAX_SESSIONS)
            if settled.replica_id == decision.chosen:
                break
            # Another router was faster. Its word counts, unless it names a replica that cannot take the turn.
            if settled.replica_id in replica_ids and settled.replica_id not in excluded:
                decision = dataclasses.replace(
                    decision,
                    ranking=first(settled.replica_id, decision.ranking),
                    reason="another router has placed it",
                )
                break
        _remember(self._last_prompt_tokens, turn.session_key, turn.prompt_tokens_estimate, MAX_SESSIONS)
        return decision

    def _decide(
        self,
        turn: Turn,
        home: _Home | None,
        rates: UseRates | None,
        replica_ids: Sequence[str],
        excluded: frozenset[str],
    ) -> RoutingDecision:
        known_tokens = self._last_prompt_tokens.get(turn.session_key, turn.prompt_tokens_estimate)
        request = RoutingRequest(
            session_key=turn.session_key,
            prompt_tokens=turn.prompt_tokens_estimate,
            max_tokens=turn.max_tokens,
            home=None if home is None else home.replica_id,
            prefix_tokens=known_tokens if home is not None else 0,
            use_rates=rates,
            pin=turn.pin,
            excluded=excluded,
        )
        return route(request, [self._view(replica_id) for replica_id in replica_ids], self._weights)

    def _view(self, replica_id: str) -> ReplicaView:
        return view_replica(
            replica_id,
            self._snapshots.get(replica_id),
            self._known_rates(replica_id),
            own_turns=self._own_turns[replica_id],
            mean_turn_s=self._mean_turn_s,
            now_s=time.time(),
            stale_after_s=self._config.stale_after_s,
            weights=self._weights,
        )

    async def _settle(self, session_key: str, home: _Home | None, decision: RoutingDecision) -> _Home:
        """Propose the decision's first replica; the answer is where the session lives."""
        version = None if home is None else home.version
        proposal = Placement(
            session_key=session_key,
            replica_id=decision.chosen,
            version=1 if version is None else version + 1,
            reason=decision.reason,
        )
        try:
            winner = await self._store.place(session_key, version, proposal)
        except StoreUnavailableError:
            return _Home(decision.chosen, version)
        return _Home(winner.replica_id, winner.version)

    def _known_rates(self, key: str) -> UseRates | None:
        rates = self._rates.get(key)
        return None if rates is None else rates.value

    async def _rates_of(self, turn: Turn) -> UseRates | None:
        """The session's use rates, else its user's, else its tenant's."""
        keys = [key for key in (turn.session_key, turn.user_key, turn.tenant) if key]
        oldest_s = time.monotonic() - RATES_AGE_S
        if any(key not in self._rates or self._rates[key].read_at_s < oldest_s for key in keys):
            with contextlib.suppress(StoreUnavailableError):
                await self._read_rates(keys)
        return next((rates for key in keys if (rates := self._known_rates(key)) is not None), None)

    async def refresh(self) -> None:
        """Re-read the replicas' snapshots and use rates. Raises StoreUnavailableError."""
        self._has_read = True  # Before the answer: while the store is away, turns do not wait for it.
        self._snapshots = {snapshot.replica_id: snapshot for snapshot in await self._store.list_snapshots()}
        await self._read_rates(self._snapshots)

    async def _read_rates(self, keys: Collection[str]) -> None:
        top_k = next((snapshot.layout.top_k for snapshot in self._snapshots.values()), 1)
        signatures = await self._store.read_signatures(keys)
        now_s = time.monotonic()
        for key in keys:
            signature = signatures.get(key)
            value = None if signature is None else use_rates(signature, unpack(signature), top_k)
            _remember(self._rates, key, _Rates(value, now_s), MAX_RATES)

    async def refresh_forever(self) -> None:
        """Refresh each ``refresh_s``; what the store does not answer stays as it was and grows stale."""
        while True:
            try:
                await self.refresh()
            except StoreUnavailableError:
                logger.debug("store unavailable: routing by what is known")
            except Exception:  # the task must outlive one bad value
                logger.exception("refresh of routing views failed")
            await asyncio.sleep(self._config.routing.refresh_s)

    def begin_turn(self, replica_id: str) -> None:
        """A turn was sent to ``replica_id``."""
        self._own_turns[replica_id] += 1

    def end_turn(self, replica_id: str, duration_s: float) -> None:
        """A turn there has ended after ``duration_s``."""
        self._own_turns[replica_id] = max(0, self._own_turns[replica_id] - 1)
        self._mean_turn_s += 0.05 * (duration_s - self._mean_turn_s)

    def keep_replicas(self, present: Collection[str]) -> None:
        """Drop the counts of replicas that no longer exist."""
        for replica_id in self._own_turns.keys() - set(present):
            del self._own_turns[replica_id]
