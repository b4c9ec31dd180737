"""What the parts of a service share: the ``Store`` protocol, kept by Redis and by an in-memory twin.

Every method raises StoreUnavailableError when the store does not answer, and nothing else of its own; callers
degrade. Values of another schema version count as missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from wisp_core.contracts import DecisionRecord, Placement, ReplicaSnapshot, ResizeOutcome, Signature, SplitPlan
from wisp_core.tenant_contracts import SessionUsage, TenantSpec, TenantUsage, TurnRecord


class Limit(StrEnum):
    """Which of a tenant's limits refused a turn."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    TURNS = "turns"


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """A turn that asks to be admitted against its tenant's limits."""

    tenant_id: str
    turn_id: str
    tokens: int
    requests_per_minute: int
    tokens_per_minute: int
    max_concurrent_turns: int
    lease_s: float
    num_choices: int = 1
    """Answers that are generated at once: each takes a place of ``max_concurrent_turns``.

    0: no turn, only a request that was refused, and takes neither tokens nor a place.
    """
    num_requests: int = 1
    """What it takes of ``requests_per_minute``; 0 for a turn that was refused just now and asks again."""
    session_key: str = ""
    """The session whose placement is read in the same exchange."""

    @property
    def places(self) -> list[str]:
        """The names of its places among the tenant's running turns; the first is the turn's own."""
        return [self.turn_id, *(f"{self.turn_id}#{number}" for number in range(1, self.num_choices))][
            : self.num_choices
        ]


@dataclass(frozen=True)
class Admission:
    """Whether a turn may run. ``retry_after_s`` is None when allowed, and when it could never be."""

    allowed: bool
    retry_after_s: float | None = None
    which: Limit | None = None
    placement: Placement | None = None
    """Where the session lives of a turn that may run, if it has been placed."""


def is_news(plan: SplitPlan, last: SplitPlan | None) -> bool:
    """Whether ``plan`` follows ``last``. Revisions begin again when both the store and the engine lost theirs."""
    return last is None or plan.incarnation != last.incarnation or plan.revision > last.revision


class ReplicaStore(Protocol):
    """Snapshots, plans, outcomes, decisions and signatures of replicas."""

    async def write_snapshot(self, snapshot: ReplicaSnapshot) -> None:
        """Publish a replica's state; it disappears after ``SNAPSHOT_TTL_S`` without another."""
        ...

    async def list_snapshots(self) -> list[ReplicaSnapshot]:
        """The last snapshot of every replica that still reports, ordered by ``replica_id``."""
        ...

    async def list_reports(self) -> dict[str, float]:
        """When each replica that still reports wrote its snapshot, Unix time by its clock."""
        ...

    async def read_snapshots(self, replica_ids: Collection[str]) -> list[ReplicaSnapshot]:
        """The last snapshots of these replicas, of those that still report."""
        ...

    async def delete_snapshot(self, replica_id: str) -> None:
        """Forget a replica that stops in an orderly way."""
        ...

    async def write_plan(self, plan: SplitPlan) -> bool:
        """Store ``plan`` if its revision is higher than the stored one, wake the replica, and say whether it was."""
        ...

    async def read_plan(self, replica_id: str) -> SplitPlan | None:
        """The plan with the highest revision."""
        ...

    def watch_plans(self, replica_id: str, period_s: float = 1.0) -> AsyncGenerator[SplitPlan, None]:
        """Yield the current plan and each newer one, at once when woken, else within ``period_s``.

        Never raises StoreUnavailableError: an outage is waited out.
        """
        ...

    async def append_outcome(self, outcome: ResizeOutcome) -> None:
        """Log what became of a plan; the log keeps the last ``LOG_LENGTH``."""
        ...

    async def list_outcomes(self, replica_id: str, n: int) -> list[ResizeOutcome]:
        """The last ``n`` outcomes, newest first."""
        ...

    async def append_decision(self, record: DecisionRecord) -> None:
        """Log a decision; the log keeps the last ``LOG_LENGTH``."""
        ...

    async def list_decisions(self, replica_id: str, n: int) -> list[DecisionRecord]:
        """The last ``n`` decisions, newest first."""
        ...

    async def write_signatures(self, replica_id: str, signatures: Iterable[Signature]) -> None:
        """Store a replica's part of the signatures of some keys for ``SIGNATURE_TTL_S``, in place of the one before.

        Of the parts of one key the ``MAX_PARTS`` newest are kept.
        """
        ...

    async def read_signatures(self, keys: Iterable[str]) -> dict[str, Signature]:
        """The signatures that exist, by key, each the sum of its replicas' parts."""
        ...


class SessionStore(Protocol):
    """Where sessions live and what they used."""

    async def place(self, session_key: str, expected_version: int | None, placement: Placement) -> Placement:
        """Compare and set: store ``placement`` if the session's version is still ``expected_version``.

        Returns the placement that holds afterwards, which is another caller's when that one was faster. A session
        that is not stored (never placed, or lost) takes any proposal. Proposing the replica where it already is
        changes nothing but keeps it alive for another ``SESSION_TTL_S``.
        """
        ...

    async def read_placements(self, session_keys: Iterable[str]) -> dict[str, Placement]:
        """Where sessions live, of those that are placed."""
        ...

    async def list_placements(self, n: int) -> list[Placement]:
        """The ``n`` sessions placed or moved last, newest first."""
        ...

    async def record_turn(self, turn: TurnRecord) -> None:
        """Add a finished turn to its session's and its tenant's usage and keep the session's placement alive."""
        ...

    async def list_turns(self, n: int) -> list[TurnRecord]:
        """The ``n`` turns that were recorded last, newest first; ``TURN_LOG_LENGTH`` of them are kept."""
        ...

    async def list_sessions(self, n: int) -> list[SessionUsage]:
        """Usage of the ``n`` sessions that were active last, newest first."""
        ...


class TenantStore(Protocol):
    """Tenants, their keys (hashed) and their limits."""

    async def write_tenant(self, tenant: TenantSpec, replaces: TenantSpec | None = None) -> bool:
        """Compare and set: store ``tenant`` if what is stored is still what was read as ``replaces``, None for nobody.

        What tells one from another is when it was written, ``at_s``. Keys it no longer lists stop working. False, and
        nothing is changed, when somebody else was faster.
        """
        ...

    async def delete_tenant(self, tenant_id: str) -> None:
        """Remove a tenant, its keys and its usage, if there is one."""
        ...

    async def list_tenant_usage(self) -> list[TenantUsage]:
        """What each tenant has used, of those that have had a turn; ordered by id."""
        ...

    async def list_tenants(self) -> list[TenantSpec]:
        """Every tenant, ordered by id."""
        ...

    async def admit(self, turn: TurnRequest, now_s: float) -> Admission:
        """Take one request, ``turn.tokens`` tokens and the turn's places from the tenant's limits.

        A turn that is refused takes the request only, or nothing if none is left.
        A turn that is admitted already stays so and takes nothing: whoever got no answer may ask again. Rates are token
        buckets that hold one minute's worth and refill evenly. ``now_s`` is Unix time.
        """
        ...

    async def renew_turn(self, turn: TurnRequest, now_s: float) -> None:
        """Keep a turn counted as running for another ``turn.lease_s`` seconds; a turn not counted stays so."""
        ...

    async def settle(self, turn: TurnRequest, used_tokens: int, now_s: float) -> None:
        """End a turn: free its places, and give back the tokens it did not use or take those it used beyond them."""
        ...


class Store(ReplicaStore, SessionStore, TenantStore, Protocol):
    """Everything that a service shares."""

    async def acquire_lease(self, name: str, holder: str, ttl_s: float) -> bool:
        """Take or renew the named lease; False while another holder has it."""
        ...

    async def release_lease(self, name: str, holder: str) -> None:
        """Give the lease back if ``holder`` has it."""
        ...

    async def ping(self) -> None:
        """Return if the store answers, takes writes and runs scripts."""
        ...

    async def close(self) -> None:
        """Close connections. The store is not usable afterwards."""
        ...
