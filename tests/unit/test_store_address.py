"""A password of the store stays in its file: nothing that Serve keeps of a deployment holds it."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from services.app import Service
from services.config import HttpSettings, ModelSettings, RedisSettings, ReplicaSettings, ServiceConfig, TenantSettings
from services.free_port import free_port
from services.policy.deployment import build_policy_service
from services.ray_cluster import ray_cpus
from services.secret_files import secret_path
from services.store_address import StoreAddress, without_password
from wisp_core.errors import ConfigurationError, StoreUnavailableError
from wisp_core.store.connection import Connection
from wisp_core.tenant_contracts import Isolation

PASSWORD = "p:w/d@1"


@pytest.mark.parametrize(
    ("url", "shown", "password"),
    [
        ("redis://h:6379/0", "redis://h:6379/0", None),
        ("redis://:p%3Aw%2Fd%401@h:6379/0", "redis://h:6379/0", PASSWORD),
        ("rediss://me:p%3Aw%2Fd%401@[::1]:6379/2?a=b", "rediss://me@[::1]:6379/2?a=b", PASSWORD),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1", None),
    ],
)
def test_a_url_and_its_password_part(url: str, shown: str, password: str | None) -> None:
    assert without_password(url) == (shown, password)


def configured(tmp_path: Path, url: str | None) -> ServiceConfig:
    return ServiceConfig(
        state_dir=tmp_path,
        model=ModelSettings(path="models/tiny"),
        replica=ReplicaSettings(vram_budget_bytes=1 << 20),
        redis=RedisSettings(url=url),
        tenants=(TenantSettings(tenant_id="a", key_sha256="0" * 64),),
    )


def kept_by_serve(application: Any) -> str:
    """The arguments of a bound deployment, and of those bound into it."""
    bound = application._bound_deployment
    router = bound._deployment_config.request_router_config.request_router_kwargs
    return f"{bound.name} {router} " + "".join(map(_shown, [*bound.init_args, *bound.init_kwargs.values()]))


def _shown(argument: Any) -> str:
    if hasattr(argument, "_bound_deployment"):
        return kept_by_serve(argument)
    if isinstance(argument, dict):
        return "".join(f"{key}={_shown(value)} " for key, value in argument.items())
    return repr(argument)


def test_what_goes_to_the_parts_of_a_service_holds_no_password(tmp_path: Path) -> None:
    service = Service(configured(tmp_path, "redis://me:p%3Aw%2Fd%401@h:6379/0"))
    address = service._store_address
    assert address.password_file == secret_path(tmp_path, "redis-url")
    assert address.password_file.read_text().strip() == PASSWORD
    assert stat.S_IMODE(address.password_file.stat().st_mode) == 0o600
    secrets = (PASSWORD, "p%3Aw%2Fd%401", service.secrets.admin_key, service.secrets.cache_salt_key)
    deployed = kept_by_serve(service._application()) + kept_by_serve(
        build_policy_service(service.config, service._store_address)
    )
    assert "redis://me@h:6379/0" in deployed
    assert not any(secret in deployed for secret in secrets)
    # A URL that no longer has a password must not leave the old one behind.
    assert Service(configured(tmp_path, "redis://h:6379/0"))._store_address.password_file is None
    assert not secret_path(tmp_path, "redis-url").exists()


async def test_the_file_s_password_opens_the_store(tmp_path: Path) -> None:
    path = tmp_path / "redis.key"
    path.write_text(PASSWORD + "\n")
    store = StoreAddress(url="redis://me@h:6379/0", password_file=path, service="s").open()
    options = store._connection.client.connection_pool.connection_kwargs
    assert (options["username"], options["password"]) == ("me", PASSWORD)
    await store.close()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "HELLO must be called with the client already authenticated, otherwise",
            "ResponseError: it asks for a password",
        ),
        ("the password is not known.", "ResponseError: the password is not known"),
        ("word " * 99, f"ResponseError: {'word ' * 39}…"),
        ("", "ResponseError"),
    ],
)
async def test_what_redis_says_is_told_in_whole_words_without_a_stop(said: str, told: str) -> None:
    connection = Connection("redis://h:6379/0", None, 0.1)
    with pytest.raises(StoreUnavailableError) as caught:
        async with connection.guard():
            raise ResponseError(said)
    assert str(caught.value) == f"Redis at h:6379: {told}"


def test_a_store_that_cannot_be_used_ends_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started: list[ServiceConfig] = []
    monkeypatch.setattr("services.app.start_ray", started.append)
    # A Ray that runs in this process is somebody else's.
    stopped: list[str] = []
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.shutdown", lambda: stopped.append("ray"))
    monkeypatch.setattr("ray.serve.shutdown", lambda: stopped.append("serve"))
    http = HttpSettings(port=free_port())
    config = configured(tmp_path, "redis://:p%3Aw%2Fd%401@127.0.0.1:1/0").model_copy(update={"http": http})
    with (
        pytest.raises(ConfigurationError, match=r"^redis\.url: Redis at 127\.0\.0\.1:1: ConnectionError: ") as caught,
        Service(config),
    ):
        pass
    assert PASSWORD not in str(caught.value)
    assert ".. " not in str(caught.value)
    assert not started
    assert not stopped
    assert "going on without it" not in caplog.text


def test_a_dedicated_tenant_s_replicas_are_counted_where_replicas_are(tmp_path: Path) -> None:
    config = configured(tmp_path, None)
    own = TenantSettings(tenant_id="own", key_sha256="1" * 64, isolation=Isolation.DEDICATED, dedicated_replicas=40)
    more = config.model_copy(update={"tenants": (*config.tenants, own)})
    assert (config.num_replicas, more.num_replicas) == (2, 42)
    assert ray_cpus(more) >= 42
    assert "own=Replica-own " in kept_by_serve(Service(more)._application())
