"""Keys: found by SHA-256, from a cache of bounded age, never written anywhere."""

from __future__ import annotations

import hashlib
import logging
import time

import pytest

from services.ingress.errors import ApiError
from services.ingress.tenants import TenantDirectory, bearer_sha256
from wisp_core.store.memory_store import MemoryStore
from wisp_core.tenant_contracts import TenantSpec, TurnRecord


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def spec(tenant_id: str, *keys: str) -> TenantSpec:
    return TenantSpec(
        tenant_id=tenant_id,
        key_sha256=tuple(sha256(key) for key in keys),
        requests_per_minute=10,
        tokens_per_minute=1000,
    )


async def status_of(directory: TenantDirectory, authorization: str | None) -> int:
    try:
        await directory.authenticate(authorization)
    except ApiError as error:
        return error.status
    return 200


async def test_a_tenant_that_the_file_has_dropped_is_locked_out() -> None:
    store = MemoryStore()
    dropped = spec("b", "kb").model_copy(update={"is_from_file": True})
    await TenantDirectory(store, lambda: [spec("a", "ka"), dropped]).refresh()
    await store.write_tenant(spec("c", "kc"))
    await store.record_turn(TurnRecord(session_key="b/u/s", replica_id="r"))
    after_restart = TenantDirectory(store, lambda: [spec("a", "ka")])
    await after_restart.refresh()
    assert [one.tenant_id for one in await store.list_tenants()] == ["a", "c"]
    assert await store.list_tenant_usage() == []
    assert await status_of(after_restart, "Bearer kb") == 401
    assert [await status_of(after_restart, f"Bearer {key}") for key in ("ka", "kc")] == [200, 200]


async def test_a_key_finds_its_tenant() -> None:
    directory = TenantDirectory(MemoryStore(), lambda: [spec("a", "ka"), spec("b", "kb", "kb2")])
    assert (await directory.authenticate("Bearer ka")).tenant_id == "a"
    assert (await directory.authenticate("bearer kb2")).tenant_id == "b"


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer ", "Basic ka", "ka", "Bearer wrong", f"Bearer {sha256('ka')}", "Bearer é"],
)
async def test_everything_else_is_401(authorization: str | None) -> None:
    directory = TenantDirectory(MemoryStore(), lambda: [spec("a", "ka")])
    assert await status_of(directory, authorization) == 401


async def test_declared_tenants_are_written_and_written_again_after_a_loss() -> None:
    store = MemoryStore()
    directory = TenantDirectory(store, lambda: [spec("a", "ka")])
    await directory.refresh()
    assert [t.tenant_id for t in await store.list_tenants()] == ["a"]
    emptied = MemoryStore()
    directory._store = emptied
    await directory.refresh()
    assert [t.tenant_id for t in await emptied.list_tenants()] == ["a"]


async def test_a_declaration_replaces_what_the_store_had_only_at_start() -> None:
    store = MemoryStore()
    await store.write_tenant(spec("a", "old"))
    directory = TenantDirectory(store, lambda: [spec("a", "new")])
    await directory.refresh()
    assert await status_of(directory, "Bearer old") == 401
    (declared,) = await store.list_tenants()
    await store.write_tenant(spec("a", "rotated"), replaces=declared)
    await directory.refresh()
    assert await status_of(directory, "Bearer rotated") == 200
    assert await status_of(directory, "Bearer new") == 401


async def test_a_new_key_works_without_waiting_for_the_refresh(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    directory = TenantDirectory(store, lambda: [spec("a", "ka")])
    await directory.refresh()
    await store.write_tenant(spec("b", "kb"))
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 1.5)
    assert await status_of(directory, "Bearer kb") == 200


async def test_unknown_keys_do_not_load_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    directory = TenantDirectory(store, lambda: [spec("a", "ka")])
    await directory.refresh()
    reads = 0
    list_tenants = store.list_tenants

    async def counted() -> list[TenantSpec]:
        nonlocal reads
        reads += 1
        return await list_tenants()

    monkeypatch.setattr(store, "list_tenants", counted)
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 1.5)
    for i in range(100):
        assert await status_of(directory, f"Bearer guess{i}") == 401
    assert reads == 1


async def test_keys_outlive_the_store_those_of_added_tenants_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    await store.write_tenant(spec("b", "kb"))
    directory = TenantDirectory(store, lambda: [spec("a", "ka").model_copy(update={"is_from_file": True})])
    await directory.refresh()
    store.is_available = False
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 599)
    await directory.refresh()
    assert await status_of(directory, "Bearer kb") == 200
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 601)
    assert await status_of(directory, "Bearer kb") == 503
    assert await status_of(directory, "Bearer ka") == 200
    store.is_available = True
    await directory.refresh()
    assert await status_of(directory, "Bearer kb") == 200


async def test_no_key_is_logged_or_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    directory = TenantDirectory(MemoryStore(), lambda: [spec("a", "ka")])
    with pytest.raises(ApiError) as caught:
        await directory.authenticate("Bearer sk-very-secret")
    assert "sk-very-secret" not in caplog.text
    assert b"sk-very-secret" not in caught.value.body()
    assert bearer_sha256("Bearer sk-very-secret") == sha256("sk-very-secret")
