"""Real servers for integration tests: Valkey with a password, and Ray Serve. None outlives the test process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from live_service import LiveService, run_live_service
from store_values import open_redis_store
from valkey_process import ValkeyProcess

from services.free_port import free_port
from wisp_core.store.interface import Store
from wisp_core.store.memory_store import MemoryStore
from wisp_core.store.redis_store import RedisStore


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyProcess]:
    """One server for the session. A test that stops it starts it again."""
    server = ValkeyProcess(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def valkey(valkey_server: ValkeyProcess) -> ValkeyProcess:
    """The session's server, running and empty."""
    with valkey_server.client() as client:
        client.flushall()
    return valkey_server


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """Each of the two stores, empty."""
    opened: Store = MemoryStore() if request.param == "memory" else open_redis_store(request.getfixturevalue("valkey"))
    yield opened
    await opened.close()


@pytest.fixture
async def redis_store(valkey: ValkeyProcess) -> AsyncIterator[RedisStore]:
    """The store on the session's Valkey."""
    opened = open_redis_store(valkey)
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def ray_serve() -> Iterator[None]:
    """Ray with Serve, as `wisp serve` has it: without a proxy."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray
    from ray import serve

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level="ERROR",
        namespace="wisp-tests",
        # Deployment classes of test modules travel by name.
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
    )
    serve.start(
        proxy_location="Disabled",
        logging_config={"log_level": "WARNING", "enable_access_log": False},
    )
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="session")
def live_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """A whole service by ``wisp serve``, one for the session; a test that breaks a part waits until it is back."""
    yield from run_live_service(tmp_path_factory.mktemp("live"), free_port())
