"""Tenants of a running service: added, listed, limited, given new keys and removed. No HTTP in here."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from services.ingress.errors import ApiError, bad_request
from services.ingress.tenants import TenantDirectory
from services.secret_files import replace_secret
from services.setting_errors import what_is_wrong
from wisp_core.contracts import Value
from wisp_core.errors import ConfigurationError, StoreUnavailableError
from wisp_core.store.interface import TenantStore
from wisp_core.tenant_contracts import TenantId, TenantLimits, TenantSpec, TenantUsage

MAX_KEYS = 8
"""Keys that one tenant may have at once."""
MAX_TRIES = 20
"""Of a change that others are faster with, each time."""


class NewTenant(TenantLimits):
    """A tenant to add."""

    tenant_id: TenantId


class Rotation(Value):
    """How to change a tenant's key."""

    keep_old: bool = False


def parse(model: type[BaseModel], raw: bytes) -> Any:
    """The body of an admin request. Raises ApiError (400)."""
    try:
        return model.model_validate_json(raw or b"{}", strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = ".".join(str(part) for part in first["loc"])[:64]
        if first["type"] == "extra_forbidden":
            raise bad_request(f"There is no '{param}' to set.", param=param) from error
        name = f"'{param}'" if param else "The body"
        raise bad_request(f"{name} {what_is_wrong(first)[:256]}.", param=param or None) from error


class TenantAdmin:
    """Changes take effect here at once, and in other ingresses when they next read the store.

    Each method raises ApiError, and StoreUnavailableError: nothing was changed, unless that ``may_have_run``.
    """

    def __init__(self, store: TenantStore, directory: TenantDirectory, key_files: Mapping[str, Path | None]) -> None:
        """``key_files``: of each tenant that the service's file declares, where its key is; None: only its hash."""
        self._store = store
        self._directory = directory
        self._key_files = key_files
        self._lock = asyncio.Lock()

    async def list(self) -> list[dict[str, Any]]:
        """Every tenant with its limits and usage; of keys only the first eight digits of their SHA-256."""
        usages = {usage.tenant_id: usage for usage in await self._store.list_tenant_usage()}
        rows = []
        for tenant in await self._store.list_tenants():
            if self._directory.is_dropped(tenant):
                continue
            usage = usages.get(tenant.tenant_id, TenantUsage(tenant_id=tenant.tenant_id))
            rows.append({**show(tenant), "usage": usage.model_dump(exclude={"tenant_id"})})
        return rows

    async def add(self, new: NewTenant) -> dict[str, Any]:
        """A new tenant and its first key, which is shown only now."""
        async with self._lock:
            stored = await self._find(new.tenant_id)
            if stored is not None and not self._directory.is_dropped(stored):
                raise _conflict(f"There is a tenant '{new.tenant_id}' already.")
            key = _new_key()
            tenant = TenantSpec(key_sha256=(_sha256(key),), **new.model_dump())
            if not await self._store.write_tenant(tenant, replaces=stored):
                raise _conflict(f"There is a tenant '{new.tenant_id}' already.")
            await self._directory.know(tenant.tenant_id, tenant)
        return {**show(tenant), "key": key}

    async def limit(self, tenant_id: str, limits: TenantLimits) -> dict[str, Any]:
        """Other limits, where they are given; of a tenant that the file declares until the service starts again."""
        async with self._lock:
            return show(await self._change(tenant_id, lambda _: limits.model_dump(exclude_unset=True)))

    async def rotate(self, tenant_id: str, rotation: Rotation) -> dict[str, Any]:
        """A new key. The old ones end, or with ``keep_old`` go on until the next rotation without it."""
        key = _new_key()
        key_file = self._key_files.get(tenant_id)

        def with_new_key(tenant: TenantSpec) -> dict[str, Any]:
            if key_file is not None:
                # Before the store has it: a service that starts again reads the key from there. And with every try:
                # whoever rotates last has the file too.
                _write_key_file(key_file, key)
            elif tenant.is_from_file:
                raise _conflict("The service's file holds only the hash of this tenant's key: change it there.")
            kept = tenant.key_sha256[: MAX_KEYS - 1] if rotation.keep_old else ()
            return {"key_sha256": (_sha256(key), *kept)}

        async with self._lock:
            old_key = None if key_file is None else await asyncio.to_thread(_read_key_file, key_file)
            try:
                tenant = await self._change(tenant_id, with_new_key)
            except StoreUnavailableError as error:
                if key_file is not None and old_key and not error.may_have_run:
                    await asyncio.to_thread(_put_back, key_file, key, old_key)
                raise
        return {**show(tenant), "key": key}

    async def remove(self, tenant_id: str) -> None:
        """End a tenant and its keys; its running turns finish."""
        async with self._lock:
            if (await self._get(tenant_id)).is_from_file:
                raise _conflict("The service's file declares this tenant: remove it there.")
            await self._store.delete_tenant(tenant_id)
            await self._directory.know(tenant_id, None)

    async def _change(self, tenant_id: str, edit: Callable[[TenantSpec], dict[str, Any]]) -> TenantSpec:
        """Read, edit and write, from the beginning whenever another ingress was faster."""
        for _ in range(MAX_TRIES):
            tenant = await self._get(tenant_id)
            update = await asyncio.to_thread(edit, tenant)
            changed = tenant.model_copy(update={**update, "at_s": time.time()})
            if await self._store.write_tenant(changed, replaces=tenant):
                await self._directory.know(tenant_id, changed)
                return changed
        raise _conflict("Others keep changing this tenant. Please retry.")

    async def _find(self, tenant_id: str) -> TenantSpec | None:
        return next((one for one in await self._store.list_tenants() if one.tenant_id == tenant_id), None)

    async def _get(self, tenant_id: str) -> TenantSpec:
        tenant = await self._find(tenant_id)
        if tenant is None or self._directory.is_dropped(tenant):
            raise ApiError(404, f"There is no tenant '{tenant_id[:64]}'.", code="tenant_not_found")
        return tenant


def show(tenant: TenantSpec) -> dict[str, Any]:
    """A tenant as an operator sees it."""
    fields = tenant.model_dump(mode="json", exclude={"schema_version", "at_s", "key_sha256"})
    return {**fields, "keys": [key[:8] for key in tenant.key_sha256]}


def _conflict(message: str) -> ApiError:
    return ApiError(409, message, code="conflict")


def _write_key_file(path: Path, key: str) -> None:
    try:
        replace_secret(path, key)
    except ConfigurationError as error:
        raise ApiError(500, "The tenant's key file cannot be written.", kind="server_error") from error


def _read_key_file(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # Whoever writes it will say why.
        return ""


def _put_back(path: Path, key: str, old_key: str) -> None:
    if _read_key_file(path) == key:  # else another ingress was faster
        _write_key_file(path, old_key)


def _new_key() -> str:
    return f"sk-wisp-{secrets.token_urlsafe(32)}"


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
