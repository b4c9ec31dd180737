"""Every Redis key and channel of a service, in one place.

All keys start with ``wisp:{service}:``. The braces are literal: they make the service one hash slot, which scripts
over several keys need behind a proxy of a cluster. The client itself talks to one server, and follows no MOVED.

| key | type | TTL | writer | reader |
|---|---|---|---|---|
| ``snapshot:REPLICA`` | string, ReplicaSnapshot | ``snapshot_ttl_s`` | replica | router, policy, status |
| ``replicas`` | zset, REPLICA by ``at_s`` | none, aged members removed | replica | router, policy, status |
| ``plan:REPLICA`` | hash, revision and SplitPlan | ``PLAN_TTL_S`` | policy | replica |
| ``plan-wakeup:REPLICA`` | channel, revision | | policy | replica |
| ``outcomes:REPLICA`` | list, newest first, ``LOG_LENGTH`` | ``LOG_TTL_S`` | replica | policy, status |
| ``decisions:REPLICA`` | list, newest first, ``LOG_LENGTH`` | ``LOG_TTL_S`` | policy | status |
| ``signatures:KEY`` | hash, REPLICA to Signature, ``MAX_PARTS`` | ``SIGNATURE_TTL_S`` | replica | router, policy |
| ``placement:SESSION`` | hash with Placement | ``SESSION_TTL_S`` after a turn | router | ingress, router, status |
| ``placements`` | zset, SESSION by time placed, ``INDEX_LENGTH`` | none, oldest removed | router | status |
| ``session:SESSION`` | hash, counters of SessionUsage | ``SESSION_TTL_S`` after a turn | ingress | status |
| ``turn-log`` | list of TurnRecord, newest first, ``TURN_LOG_LENGTH`` | ``LOG_TTL_S`` | ingress | trace record |
| ``sessions`` | zset, SESSION by last turn, ``INDEX_LENGTH`` | none, oldest removed | ingress | status |
| ``tenants`` | hash, TENANT to TenantSpec | none | start-up, admin | ingress |
| ``tenant-usage:TENANT`` | hash, counters of TenantUsage | none, ends with the tenant | ingress | ingress |
| ``limit:TENANT:WHICH`` | string, time when the bucket is full, s | until full | ingress | ingress |
| ``turns:TENANT`` | zset, places taken by the end of their lease, s | the longest lease | ingress | ingress |
| ``lease:NAME`` | string, holder | the lease's | holder | holder |
"""

from __future__ import annotations

from dataclasses import dataclass

SNAPSHOT_TTL_S = 30.0
PLAN_TTL_S = 24 * 3600
LOG_TTL_S = 24 * 3600
LOG_LENGTH = 200
TURN_LOG_LENGTH = 10_000
SIGNATURE_TTL_S = 2 * 3600
SESSION_TTL_S = 2 * 3600
INDEX_LENGTH = 100_000


@dataclass(frozen=True)
class Keys:
    """The keys of one service."""

    service: str

    @property
    def prefix(self) -> str:
        """What every key of the service starts with, colon included."""
        return f"wisp:{{{self.service}}}:"

    def snapshot(self, replica_id: str) -> str:
        """Last snapshot of a replica."""
        return f"{self.prefix}snapshot:{replica_id}"

    @property
    def replicas(self) -> str:
        """Index of replicas by the time of their last snapshot."""
        return f"{self.prefix}replicas"

    def plan(self, replica_id: str) -> str:
        """Last plan for a replica."""
        return f"{self.prefix}plan:{replica_id}"

    def plan_wakeup(self, replica_id: str) -> str:
        """Channel that says that a replica has a new plan."""
        return f"{self.prefix}plan-wakeup:{replica_id}"

    def outcomes(self, replica_id: str) -> str:
        """What became of a replica's plans."""
        return f"{self.prefix}outcomes:{replica_id}"

    def decisions(self, replica_id: str) -> str:
        """What the policy service decided for a replica."""
        return f"{self.prefix}decisions:{replica_id}"

    def signature(self, key: str) -> str:
        """Parts of the signature of a tenant, user, session or replica, by the replica that wrote them."""
        return f"{self.prefix}signatures:{key}"

    def placement(self, session_key: str) -> str:
        """Where a session lives."""
        return f"{self.prefix}placement:{session_key}"

    @property
    def placements(self) -> str:
        """Index of placed sessions by the time of their last move."""
        return f"{self.prefix}placements"

    def session(self, session_key: str) -> str:
        """Usage counters of a session."""
        return f"{self.prefix}session:{session_key}"

    @property
    def sessions(self) -> str:
        """Index of sessions by their last turn."""
        return f"{self.prefix}sessions"

    @property
    def turn_log(self) -> str:
        """Turns that ended last."""
        return f"{self.prefix}turn-log"

    @property
    def tenants(self) -> str:
        """All tenants."""
        return f"{self.prefix}tenants"

    def tenant_usage(self, tenant_id: str) -> str:
        """Usage counters of a tenant."""
        return f"{self.prefix}tenant-usage:{tenant_id}"

    def limit(self, tenant_id: str, which: str) -> str:
        """Rate bucket of a tenant; ``which`` is ``requests`` or ``tokens``."""
        return f"{self.prefix}limit:{tenant_id}:{which}"

    def turns(self, tenant_id: str) -> str:
        """Places that a tenant's running turns take."""
        return f"{self.prefix}turns:{tenant_id}"

    def lease(self, name: str) -> str:
        """A named lease."""
        return f"{self.prefix}lease:{name}"
