"""What a router process knows, and where it sends a turn. No Ray: the router class only wires this to Serve."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import Field

from services.config import Section
from services.ingress.routers import RouterConfig
from services.ingress.working_sets import WorkingSets
from wisp_core.contracts import Placement, ReplicaSnapshot, Signature
from wisp_core.errors import StoreUnavailableError
from wisp_core.routing.fleet import Fleet
from wisp_core.routing.pick import first
from wisp_core.routing.route import route
from wisp_core.routing.views import RoutingDecision, RoutingRequest, RoutingWeights, Uses, figures_of
from wisp_core.store.interface import Store
from wisp_core.store.usage import is_single_turn
from wisp_core.working_set.signature import use_rates

logger = logging.getLogger(__name__)

MAX_SESSIONS = 100_000
MAX_CONFLICTS = 3
REPLICAS_PER_REFRESH = 64
"""Replicas whose snapshots and use rates are read in one refresh, those read longest ago: a thousand in 4 s."""
REPLICAS_AT_ONCE = 16
"""Replicas taken over before turns get their chance again."""
ValueT = TypeVar("ValueT")


class Turn(Section):
    """What the ingress tells the router of a turn, by keyword arguments of the handle call."""

    turn_id: str = Field(default="", description="The same in each attempt of one turn.")
    session_key: str = ""
    user_key: str = ""
    prompt_key: str = Field(default="", description="The same for all sessions of a tenant with one system prompt.")
    tenant: str = ""
    prompt_tokens_estimate: int = 0
    max_tokens: int = 0
    home: str | None = Field(default=None, description="Where the store said that the session lives.")
    home_version: int = Field(default=0, description="Version of that placement.")

    @classmethod
    def of(cls, kwargs: Mapping[str, Any]) -> Turn:
        """Pick the fields out of a call's keyword arguments."""
        return cls(**{name: kwargs[name] for name in cls.model_fields if name in kwargs})

    def without_home(self) -> Turn:
        """This turn when what was read of its home is no longer news."""
        return self if self.home is None else self.model_copy(update={"home": None})

    @property
    def is_of_session(self) -> bool:
        """Whether turns may follow, which should find what this one leaves."""
        return bool(self.session_key) and not is_single_turn(self.session_key)

    def signature_keys(self) -> list[str]:
        """Whose habits tell of this turn's, from the most general to its own."""
        keys = (self.tenant, self.prompt_key, self.user_key, self.session_key if self.is_of_session else "")
        return [key for key in dict.fromkeys(keys) if key]


@dataclass(frozen=True)
class _Home:
    """Where a session lives as far as this process knows; ``version`` is None until the store has said so."""

    replica_id: str
    version: int | None


@dataclass(frozen=True)
class _Report:
    """Which report of a replica was read, by the time that it was written, and when."""

    written_at_s: float
    read_at_s: float


def _newest_home(turn: Turn, known: _Home | None) -> tuple[_Home | None, bool]:
    """Where the turn's session lives, and whether the store has just said so."""
    if turn.home is None or (known is not None and (known.version or 0) > turn.home_version):
        return known, False
    return _Home(turn.home, turn.home_version), True


def _remember(cache: OrderedDict[str, ValueT], key: str, value: ValueT, limit: int) -> None:
    cache[key] = value
    cache.move_to_end(key)
    if len(cache) > limit:
        cache.popitem(last=False)


class PlacementDirectory:
    """One router process's view of the service. All methods run in one event loop."""

    def __init__(self, store: Store, config: RouterConfig) -> None:
        """Nothing is read before ``refresh``, and there are no replicas before ``keep_replicas``."""
        self._store = store
        self._fleet = Fleet(
            RoutingWeights(migrate_gain_s=config.routing.migrate_gain_s, stale_after_s=config.stale_after_s)
        )
        self._refresh_s = config.routing.refresh_s
        self._has_read = False
        self._top_k = 1
        self._reports: dict[str, _Report] = {}
        self._working_sets = WorkingSets(store)
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._last_prompt_tokens: OrderedDict[str, int] = OrderedDict()
        self._own_turns: Counter[str] = Counter()
        self._mean_turn_s = 1.0

    async def rank(self, turn: Turn, excluded: frozenset[str] = frozenset()) -> RoutingDecision:
        """Order the replicas for ``turn`` and settle with the other routers where its session lives, if it has one.

        ``excluded`` are known to be lost, or have just failed this turn: they come last.

        A session that stays at ``turn.home`` needs no word with the store: that is where it was a moment ago.
        Without the store the decision stands as it is: the session keeps the home this process knows, or gets the
        one its hash says. Raises ValueError when there are no replicas.
        """
        if not self._has_read:
            with contextlib.suppress(StoreUnavailableError):
                await self.refresh()
        uses = await self._working_sets.expect(turn.signature_keys(), self._top_k)
        for _ in range(MAX_CONFLICTS):
            known = self._homes.get(turn.session_key)
            home, is_read = _newest_home(turn, known)
            decision = self._decide(turn, home, uses, excluded)
            if not turn.is_of_session or decision.is_for_this_turn_only:
                break
            if is_read and home is not None and decision.chosen == home.replica_id:
                if known is None:  # Of a time before this router's: load reports count it already.
                    _remember(self._homes, turn.session_key, home, MAX_SESSIONS)
                else:
                    self._note_home(turn.session_key, known, home)
                break
            settled = await self._settle(turn.session_key, home, decision)
            self._note_home(turn.session_key, known, settled)
            if settled.replica_id == decision.chosen:
                break
            # Another router was faster. Its word counts, unless it names a replica that cannot take the turn.
            if settled.replica_id in self._fleet.position and settled.replica_id not in excluded:
                decision = dataclasses.replace(
                    decision,
                    ranking=first(settled.replica_id, decision.ranking),
                    reason="another router has placed it",
                )
                break
        if turn.is_of_session:
            _remember(self._last_prompt_tokens, turn.session_key, turn.prompt_tokens_estimate, MAX_SESSIONS)
        return decision

    def _decide(self, turn: Turn, home: _Home | None, uses: Uses | None, excluded: frozenset[str]) -> RoutingDecision:
        known_tokens = self._last_prompt_tokens.get(turn.session_key, turn.prompt_tokens_estimate)
        request = RoutingRequest(
            session_key=turn.session_key,
            prompt_tokens=turn.prompt_tokens_estimate,
            max_tokens=turn.max_tokens,
            home=None if home is None else home.replica_id,
            prefix_tokens=known_tokens if home is not None else 0,
            uses=uses,
            mean_turn_s=self._mean_turn_s,
            excluded=excluded,
        )
        return route(request, self._fleet, time.time())

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

    def _note_home(self, session_key: str, before: _Home | None, now: _Home) -> None:
        """Remember a home, and count it where it is new: no replica shows it in its figures yet."""
        _remember(self._homes, session_key, now, MAX_SESSIONS)
        if before is None or before.replica_id != now.replica_id:
            self._fleet.note_placed(now.replica_id, 1)
            if before is not None:
                self._fleet.note_placed(before.replica_id, -1)

    async def refresh(self) -> None:
        """Re-read the replicas' snapshots and use rates. Raises StoreUnavailableError."""
        self._has_read = True  # Before the answer: while the store is away, turns do not wait for it.
        reports = await self._store.list_reports()
        due = self._due(reports)
        snapshots = await self._store.read_snapshots(due)
        signatures = await self._store.read_signatures(due)
        now_s = time.monotonic()
        self._reports |= {replica_id: _Report(reports[replica_id], now_s) for replica_id in due}
        for number, snapshot in enumerate(snapshots, start=1):
            self._take_over(snapshot, signatures.get(snapshot.replica_id))
            if number % REPLICAS_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _due(self, written_at_s: Mapping[str, float]) -> list[str]:
        """Replicas with news, those read longest ago first, so that any number of them costs a bounded amount."""
        # The store remembers replicas for a while that Serve has stopped.
        present = {name: at_s for name, at_s in written_at_s.items() if name in self._fleet.position}
        never = _Report(0.0, 0.0)
        news = [name for name, at_s in present.items() if self._reports.get(name, never).written_at_s != at_s]
        news.sort(key=lambda name: self._reports.get(name, never).read_at_s)
        return news[:REPLICAS_PER_REFRESH]

    def _take_over(self, snapshot: ReplicaSnapshot, signature: Signature | None) -> None:
        replica_id = snapshot.replica_id
        if replica_id in self._fleet.position:  # It may have gone while the store was asked.
            self._top_k = snapshot.layout.top_k
            self._fleet.update(
                replica_id, figures_of(snapshot, self._fleet.weights), own_turns=self._own_turns[replica_id]
            )
            self._fleet.set_rates(replica_id, None if signature is None else use_rates(signature, self._top_k))

    async def refresh_forever(self) -> None:
        """Refresh each ``refresh_s``; what the store does not answer stays as it was and grows stale."""
        while True:
            try:
                await self.refresh()
            except StoreUnavailableError:
                logger.debug("store unavailable: routing by what is known")
            except Exception:  # the task must outlive one bad value
                logger.exception("refresh of routing views failed")
            await asyncio.sleep(self._refresh_s)

    def begin_turn(self, replica_id: str) -> None:
        """A turn was sent to ``replica_id``."""
        self._own_turns[replica_id] += 1
        self._fleet.add_turns(replica_id, 1)

    def end_turn(self, replica_id: str, duration_s: float) -> None:
        """A turn there has ended after ``duration_s``."""
        self._own_turns[replica_id] = max(0, self._own_turns[replica_id] - 1)
        self._fleet.add_turns(replica_id, -1)
        self._mean_turn_s += 0.05 * (duration_s - self._mean_turn_s)

    def keep_replicas(self, present: Collection[str]) -> None:
        """These replicas exist now; forget the others."""
        self._fleet.keep(present)
        for replica_id in self._own_turns.keys() - set(present):
            del self._own_turns[replica_id]
        for replica_id in self._reports.keys() - set(present):
            del self._reports[replica_id]
