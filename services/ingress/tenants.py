"""API keys: from a key to its tenant, by SHA-256 only, from memory."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from services.ingress.errors import invalid_key, unavailable
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.interface import TenantStore
from wisp_core.tenant_contracts import TenantSpec

logger = logging.getLogger(__name__)

REFRESH_S = 2.0
"""How often the store is read."""
MAX_AGE_S = 600.0
"""How long tenants that only the store has are served without it: they may have been removed meanwhile."""


def bearer_sha256(authorization: str | None) -> str:
    """SHA-256 of the key in an Authorization header. Raises ApiError (401) when there is none."""
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise invalid_key()
    return hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).hexdigest()


class TenantDirectory:
    """All tenants in memory, re-read from the store: a change there takes effect within ``REFRESH_S``.

    Declared tenants are written to the store at the first contact. If the store has lost them it was emptied, and all
    that this process knows is written again. When it is away, the last list serves: declared tenants from the start and
    as long as it takes, others for ``MAX_AGE_S``.
    """

    def __init__(
        self,
        store: TenantStore,
        declare: Callable[[], Sequence[TenantSpec]],
        *,
        service_began_s: float = math.inf,
    ) -> None:
        """Nothing is read yet.

        Args:
            store: Where all ingresses find the tenants.
            declare: Gives the tenants of the service's file, with the keys that their files hold now.
            service_began_s: Unix time. What was written to the store later stands, also when this process is a new
                one of a service that runs: an operator has set it.
        """
        self._store = store
        self._declare = declare
        self._service_began_s = service_began_s
        self._is_declared = False
        self._read_at_s = time.monotonic()
        self._tenants: dict[str, TenantSpec] = {}
        self._by_key: dict[str, TenantSpec] = {}
        self._lock = asyncio.Lock()
        self._index(declare())
        self._declared = frozenset(self._tenants)

    def _index(self, tenants: Iterable[TenantSpec]) -> None:
        self._tenants = {tenant.tenant_id: tenant for tenant in tenants}
        self._by_key = {key: tenant for tenant in self._tenants.values() for key in tenant.key_sha256}

    async def authenticate(self, authorization: str | None) -> TenantSpec:
        """The tenant of an Authorization header. Raises ApiError: 401, or 503 when it may have been removed."""
        key_sha256 = bearer_sha256(authorization)
        tenant = self._find(key_sha256)
        if tenant is None and time.monotonic() - self._read_at_s > 1.0:
            # Perhaps a new key: look once, at most once a second.
            await self.refresh(unless_younger_than_s=1.0)
            tenant = self._find(key_sha256)
        if tenant is None:
            raise invalid_key()
        if not tenant.is_from_file and time.monotonic() - self._read_at_s > MAX_AGE_S:
            raise unavailable("Keys cannot be verified at the moment.")
        return tenant

    def _find(self, key_sha256: str) -> TenantSpec | None:
        tenant = self._by_key.get(key_sha256)
        if tenant is None or not any(hmac.compare_digest(key_sha256, known) for known in tenant.key_sha256):
            return None
        return tenant

    def is_dropped(self, tenant: TenantSpec) -> bool:
        """Whether the service's file once declared a tenant of the store, and does no longer: there is none, then.

        Beside a process from before an upgrade, which declares it still, one may stay in the store for a while.
        """
        return tenant.is_from_file and tenant.tenant_id not in self._declared

    async def refresh(self, *, unless_younger_than_s: float = 0.0) -> None:
        """Re-read the store; an outage leaves everything as it was."""
        async with self._lock:
            if time.monotonic() - self._read_at_s < unless_younger_than_s:
                return
            try:
                tenants = await self._read()
            except StoreUnavailableError:
                return
            self._is_declared = True
            self._read_at_s = time.monotonic()
            self._index(tenants)

    async def know(self, tenant_id: str, tenant: TenantSpec | None) -> None:
        """A tenant as it was just written to the store; None: it was removed. In time also if the store goes now."""
        async with self._lock:  # A refresh that is on its way may have read what was there before.
            others = (one for one in self._tenants.values() if one.tenant_id != tenant_id)
            self._index(others if tenant is None else (*others, tenant))

    async def _read(self) -> list[TenantSpec]:
        stored = {tenant.tenant_id: tenant for tenant in await self._store.list_tenants()}
        tenants = {name: tenant for name, tenant in stored.items() if not self.is_dropped(tenant)}
        if not self._is_declared:
            for name in stored.keys() - tenants.keys():
                if stored[name].at_s < self._service_began_s:
                    await self._store.delete_tenant(name)
        if self._is_declared and self._declared <= tenants.keys():
            return list(tenants.values())
        for tenant in self._to_write(tenants):
            # Whoever was faster, an operator or another ingress, is seen at the next refresh.
            await self._store.write_tenant(tenant, replaces=stored.get(tenant.tenant_id))
            tenants[tenant.tenant_id] = tenant
        return list(tenants.values())

    def _to_write(self, stored: Mapping[str, TenantSpec]) -> list[TenantSpec]:
        declared = {tenant.tenant_id: tenant for tenant in self._declare()}
        if self._is_declared:
            return [tenant for name, tenant in (declared | self._tenants).items() if name not in stored]
        return [
            _with_kept_keys(tenant, stored.get(name))
            for name, tenant in declared.items()
            if name not in stored or stored[name].at_s < self._service_began_s
        ]

    async def refresh_forever(self) -> None:
        """Refresh each ``REFRESH_S``."""
        while True:
            try:
                await self.refresh()
            except Exception:  # the task must outlive one bad value
                logger.exception("refresh of tenants failed")
            await asyncio.sleep(REFRESH_S)


def _with_kept_keys(declared: TenantSpec, stored: TenantSpec | None) -> TenantSpec:
    """``declared`` with all the stored keys if its own is among them: a rotation has kept the others."""
    if stored is None or not set(declared.key_sha256) <= set(stored.key_sha256):
        return declared
    return declared.model_copy(update={"key_sha256": stored.key_sha256})
