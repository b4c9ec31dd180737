"""Tenants of a running service: the admin API, and what keys and limits do afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import json
import stat
from pathlib import Path

import pytest
from ingress_in_process import ADMIN_KEY, ANSWER, HEAD, KEY, OTHER_KEY, Service, declare

from services.ingress.admin import NewTenant, Rotation, TenantAdmin
from services.ingress.errors import ApiError
from services.ingress.tenants import TenantDirectory
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.memory_store import MemoryStore
from wisp_core.tenant_contracts import Isolation, TenantLimits, TenantSpec

TENANTS = "/wisp/tenants"


@pytest.fixture
async def service() -> Service:
    service = Service()
    await service.tenants.refresh()
    return service


async def status_with(service: Service, key: str) -> int:
    service.handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    return (await service.chat(headers={"authorization": f"Bearer {key}"})).status


async def test_a_tenant_is_added_used_listed_and_removed(service: Service) -> None:
    added = await service.admin(TENANTS, "POST", tenant_id="new", weight=2.0, tokens_per_minute=50_000)
    assert added.status == 201
    tenant = json.loads(added.body)
    key = tenant.pop("key")
    assert (tenant["weight"], tenant["kv_share"], tenant["isolation"]) == (2.0, 1.0, "shared")
    assert tenant["keys"] == [hashlib.sha256(key.encode()).hexdigest()[:8]]
    assert await status_with(service, key) == 200
    listed = {one["tenant_id"]: one for one in json.loads((await service.admin(TENANTS)).body)["tenants"]}
    assert set(listed) == {"a", "b", "new"}
    assert listed["new"]["usage"] == {
        "turns": 1,
        "failed_turns": 0,
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "completion_tokens": 3,
    }
    assert listed["a"]["usage"]["turns"] == 0
    assert key not in (await service.admin(TENANTS)).body.decode()
    assert (await service.admin(f"{TENANTS}/new", "DELETE")).status == 204
    assert await status_with(service, key) == 401
    assert (await service.admin(f"{TENANTS}/new", "DELETE")).status == 404


async def test_rotating_ends_the_old_key_or_keeps_it_for_a_while(service: Service) -> None:
    first = json.loads((await service.admin(TENANTS, "POST", tenant_id="new")).body)["key"]
    second = json.loads((await service.admin(f"{TENANTS}/new/rotate", "POST", keep_old=True)).body)["key"]
    assert [await status_with(service, key) for key in (first, second)] == [200, 200]
    third = json.loads((await service.admin(f"{TENANTS}/new/rotate", "POST")).body)["key"]
    assert [await status_with(service, key) for key in (first, second, third)] == [401, 401, 200]


async def test_a_name_that_the_file_has_dropped_is_free(service: Service) -> None:
    # Written again by an ingress from before an upgrade, which declares it still.
    old = TenantSpec(tenant_id="old", key_sha256=(), is_from_file=True)
    assert await service.store.write_tenant(old)
    await service.tenants.refresh()
    assert '"old"' not in (await service.admin(TENANTS)).body.decode()
    assert (await service.admin(f"{TENANTS}/old", "PATCH", weight=2.0)).status == 404
    assert (await service.admin(f"{TENANTS}/old", "DELETE")).status == 404
    key = json.loads((await service.admin(TENANTS, "POST", tenant_id="old")).body)["key"]
    assert await status_with(service, key) == 200
    assert (await service.admin(TENANTS, "POST", tenant_id="old")).status == 409
    assert (await service.admin(f"{TENANTS}/old", "DELETE")).status == 204


async def test_the_file_s_tenants_get_new_keys_in_their_files(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    path.write_text(KEY)
    service = Service(key_file=path)
    await service.tenants.refresh()
    rotated = json.loads((await service.admin(f"{TENANTS}/a/rotate", "POST")).body)["key"]
    assert path.read_text().strip() == rotated
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [await status_with(service, key) for key in (KEY, rotated)] == [401, 200]
    # Of b the file has only the hash, and neither can be removed while the file declares it.
    assert (await service.admin(f"{TENANTS}/b/rotate", "POST")).status == 409
    assert (await service.admin(f"{TENANTS}/a", "DELETE")).status == 409
    assert await status_with(service, OTHER_KEY) == 200


async def test_limits_change_while_the_service_runs(service: Service) -> None:
    reply = await service.admin(f"{TENANTS}/a", "PATCH", requests_per_minute=1, weight=0.5)
    limits = json.loads(reply.body)
    assert (limits["requests_per_minute"], limits["weight"], limits["tokens_per_minute"]) == (1, 0.5, 10_000)
    assert await status_with(service, KEY) == 200
    assert json.loads(service.handle.calls[-1].arguments["body"])["vllm_xargs"]["wisp_weight"] == 0.5
    assert (await service.chat()).status == 429
    assert await status_with(service, OTHER_KEY) == 200


async def test_what_two_ingresses_change_at_once_is_changed_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    path.write_text(KEY)
    store = RacedStore()
    declared = [declare("a", KEY), declare("b", "kb")]
    directories = [TenantDirectory(store, lambda: declared) for _ in range(2)]
    for directory in directories:
        await directory.refresh()
    admins = [TenantAdmin(store, directory, {"a": path, "b": None}) for directory in directories]
    await asyncio.gather(
        admins[0].limit("a", TenantLimits(weight=3.0)), admins[1].limit("a", TenantLimits(kv_share=0.5))
    )
    changed = (await store.list_tenants())[0]
    assert (changed.weight, changed.kv_share, store.num_conflicts) == (3.0, 0.5, 1)
    rotated = await asyncio.gather(*(admin.rotate("a", Rotation(keep_old=True)) for admin in admins))
    keys = [hashlib.sha256(one["key"].encode()).hexdigest() for one in rotated]
    # Both keys work, and the file has the one that was written last.
    assert set(keys) <= set((await store.list_tenants())[0].key_sha256)
    assert (
        hashlib.sha256(path.read_text().strip().encode()).hexdigest() == (await store.list_tenants())[0].key_sha256[0]
    )
    added = await asyncio.gather(*(admin.add(NewTenant(tenant_id="new")) for admin in admins), return_exceptions=True)
    assert sorted(isinstance(one, ApiError) for one in added) == [False, True]


class RacedStore(MemoryStore):
    """Two read before either writes, as two processes may."""

    def __init__(self) -> None:
        super().__init__()
        self.num_conflicts = 0

    async def list_tenants(self) -> list[TenantSpec]:
        tenants = await super().list_tenants()
        await asyncio.sleep(0.02)
        return tenants

    async def write_tenant(self, tenant: TenantSpec, replaces: TenantSpec | None = None) -> bool:
        is_written = await super().write_tenant(tenant, replaces)
        self.num_conflicts += not is_written
        return is_written


@pytest.mark.parametrize(
    "fields",
    [
        {"tenant_id": "A B"},
        {},
        {"tenant_id": "x", "weight": 0.0},
        {"tenant_id": "x", "kv_share": 1.5},
        {"tenant_id": "x", "requests_per_minute": "5"},
        {"tenant_id": "x", "isolation": "dedicated"},
        {"tenant_id": "x", "key_sha256": ["0"]},
    ],
)
async def test_what_cannot_be_set_is_refused(service: Service, fields: dict[str, object]) -> None:
    reply = await service.admin(TENANTS, "POST", **fields)
    assert reply.status == 400
    assert reply.error["type"] == "invalid_request_error"


async def test_a_tenant_cannot_be_added_twice(service: Service) -> None:
    assert (await service.admin(TENANTS, "POST", tenant_id="b")).status == 409
    assert (await service.admin(f"{TENANTS}/nobody", "PATCH", weight=2.0)).status == 404


async def test_nothing_is_changed_without_the_store(service: Service) -> None:
    service.store.is_available = False
    assert (await service.admin(TENANTS)).status == 503
    assert (await service.admin(TENANTS, "POST", tenant_id="new")).status == 503


@pytest.mark.parametrize("key", [None, KEY, "", f"{ADMIN_KEY}x"])
async def test_every_door_of_the_operator_takes_the_admin_key(service: Service, key: str | None) -> None:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    doors = [("GET", TENANTS), ("POST", TENANTS), ("PATCH", f"{TENANTS}/a"), ("DELETE", f"{TENANTS}/a")]
    for method, path in [*doors, ("POST", f"{TENANTS}/a/rotate"), ("GET", "/wisp/status")]:
        body = json.dumps({"tenant_id": "evil"}).encode()
        assert (await service.request(path, body, method=method, headers=headers)).status == 401
    assert [tenant.tenant_id for tenant in await service.store.list_tenants()] == ["a", "b"]


async def test_tenants_added_at_runtime_come_back_when_the_store_was_emptied() -> None:
    store = MemoryStore()
    directory = TenantDirectory(store, lambda: [declare("a", "ka")])
    await directory.refresh()
    await store.write_tenant(declare("new", "kn").model_copy(update={"is_from_file": False}))
    await directory.refresh()
    directory._store = emptied = MemoryStore()
    await directory.refresh()
    assert [tenant.tenant_id for tenant in await emptied.list_tenants()] == ["a", "new"]


async def test_an_ingress_that_starts_again_keeps_what_an_operator_has_set() -> None:
    store = MemoryStore()
    began_s = declare("a", "ka").at_s
    first = TenantDirectory(store, lambda: [declare("a", "ka")], service_began_s=began_s)
    await first.refresh()
    (stored,) = await store.list_tenants()
    await store.write_tenant(stored.model_copy(update={"requests_per_minute": 7}), replaces=stored)
    again = TenantDirectory(store, lambda: [declare("a", "ka")], service_began_s=began_s)
    await again.refresh()
    assert (await again.authenticate("Bearer ka")).requests_per_minute == 7
    new_service = TenantDirectory(store, lambda: [declare("a", "ka")], service_began_s=stored.at_s + 1)
    await new_service.refresh()
    assert (await new_service.authenticate("Bearer ka")).requests_per_minute == 100


async def test_keys_that_a_rotation_has_kept_outlive_a_restart_until_the_file_has_another_key() -> None:
    store = MemoryStore()

    async def restart(key: str) -> TenantDirectory:
        directory = TenantDirectory(store, lambda: [declare("a", key)])
        await directory.refresh()
        return directory

    first = await restart("old")
    (stored,) = await store.list_tenants()
    keys = (*declare("a", "new").key_sha256, *stored.key_sha256)
    await store.write_tenant(stored.model_copy(update={"key_sha256": keys, "weight": 3.0}), replaces=stored)
    again = await restart("new")
    for directory in (first, again):
        await directory.refresh()
        for key in ("old", "new"):
            tenant = await directory.authenticate(f"Bearer {key}")
            assert (tenant.key_sha256, tenant.weight) == (keys, 1.0), "limits are the file's again"
    replaced = await restart("other")
    assert (await replaced.authenticate("Bearer other")).tenant_id == "a"
    for key in ("old", "new"):
        with pytest.raises(ApiError):
            await replaced.authenticate(f"Bearer {key}")


async def test_a_dedicated_tenant_reaches_its_own_replicas_only(service: Service) -> None:
    own = declare("own", "sk-own").model_copy(update={"isolation": Isolation.DEDICATED, "is_from_file": False})
    await service.store.write_tenant(own)
    await service.store.write_tenant(
        declare("lost", "sk-lost").model_copy(update={"isolation": Isolation.DEDICATED, "is_from_file": False})
    )
    await service.tenants.refresh()
    service.own_handle.scripts = [[HEAD, json.dumps(ANSWER).encode()]]
    assert (await service.chat(headers={"authorization": "Bearer sk-own"})).status == 200
    assert (len(service.own_handle.calls), len(service.handle.calls)) == (1, 0)
    assert await status_with(service, KEY) == 200
    assert (len(service.own_handle.calls), len(service.handle.calls)) == (1, 1)
    # Rather no answer than one from a replica that others use.
    assert await status_with(service, "sk-lost") == 503
    assert len(service.handle.calls) == 1


async def test_what_was_written_holds_here_though_the_store_goes_at_once() -> None:
    store = GoingStore()
    directory = TenantDirectory(store, lambda: [declare("a", KEY)])
    await directory.refresh()
    admin = TenantAdmin(store, directory, {})
    for change in (admin.add(NewTenant(tenant_id="new")), admin.rotate("new", Rotation())):
        key = (await change)["key"]
        assert not store.is_available
        assert (await directory.authenticate(f"Bearer {key}")).tenant_id == "new"
        store.is_available = True
    await admin.limit("new", TenantLimits(weight=3.0))
    assert (await directory.authenticate(f"Bearer {key}")).weight == 3.0
    store.is_available = True
    await admin.remove("new")
    with pytest.raises(ApiError) as caught:
        await directory.authenticate(f"Bearer {key}")
    assert (caught.value.status, store.is_available) == (401, False)


class LostStore(MemoryStore):
    """Takes no change; ``may_have_run``: nor says so."""

    may_have_run = False

    async def write_tenant(self, tenant: TenantSpec, replaces: TenantSpec | None = None) -> bool:
        if replaces is None:
            return await super().write_tenant(tenant, replaces)
        raise StoreUnavailableError("no answer", may_have_run=self.may_have_run)


async def test_a_rotation_that_changed_nothing_leaves_the_key_file(tmp_path: Path) -> None:
    path = tmp_path / "a.key"
    path.write_text(KEY + "\n")
    store = LostStore()
    directory = TenantDirectory(store, lambda: [declare("a", KEY)])
    await directory.refresh()
    admin = TenantAdmin(store, directory, {"a": path})
    with pytest.raises(StoreUnavailableError):
        await admin.rotate("a", Rotation())
    assert path.read_text().strip() == KEY
    assert (await directory.authenticate(f"Bearer {KEY}")).tenant_id == "a"
    store.may_have_run = True
    with pytest.raises(StoreUnavailableError):
        await admin.rotate("a", Rotation())
    assert path.read_text().strip() != KEY, "the store may have only the new one"


class GoingStore(MemoryStore):
    """Away as soon as an operator has changed something."""

    async def write_tenant(self, tenant: TenantSpec, replaces: TenantSpec | None = None) -> bool:
        written = await super().write_tenant(tenant, replaces)
        self.is_available = tenant.is_from_file
        return written

    async def delete_tenant(self, tenant_id: str) -> None:
        await super().delete_tenant(tenant_id)
        self.is_available = False
