"""The whole service: embedded Valkey, Ray, and the Serve applications, started and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
import ray
from ray import serve

from services.config import ServiceConfig
from services.embedded_valkey import EmbeddedValkey
from services.ingress.app import build_ingress
from services.ingress.listener import Listener
from services.ingress.routers import router_of
from services.policy.deployment import build_policy_service
from services.preflight import check_host, check_policy
from services.ray_cluster import (
    LOGGING,
    WithoutShutdownNoise,
    ended,
    own_processes,
    refuse_too_many_replicas,
    start_ray,
    stop_serve,
    this_host,
)
from services.replica.code_version import code_version, driver_code
from services.replica.deployment import build_replica
from services.secret_files import ServiceSecrets, replace_secret, secret_path, tenant_specs
from services.service_file import remove_service_file, write_service_file
from services.start_progress import log_directory
from services.store_address import StoreAddress, without_password
from wisp_core.errors import ConfigurationError, EngineUnavailableError
from wisp_core.store.redis_store import RedisStore
from wisp_core.tenant_contracts import Isolation

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 300.0
UPGRADE_END_S = 10.0
"""How long an upgrade may take to notice that the service stops."""
FIXED = ("name", "state_dir", "http.host", "http.port", "redis")
"""Settings that no upgrade changes."""

_OF_PYDANTIC = (
    (r"\n +For further information visit https://errors\.pydantic\.dev.*| \[type=.*", ""),
    (r" ?\d+ validation errors? for \w+$", ""),
    (r"^([\w.]+)\n  (?=\S)", r"  replica.engine.\1: "),
    (r"^  (?:Value|Assertion) error, ", "  replica.engine: "),
)
"""Pydantic's words on an engine's arguments, and what becomes of them: a line for each setting."""


class Service:
    """Starts everything on entry and stops everything on exit, in reverse order. Use it in the main thread."""

    def __init__(self, config: ServiceConfig, *, on_checked: Callable[[], None] | None = None) -> None:
        """Nothing is started yet; secrets and tenant keys that do not exist are created. Raises ConfigurationError.

        ``on_checked`` is called when port and store are there, before what takes a minute.
        """
        self.config, self._redis_password = _without_redis_password(config)
        self._redis_password_file = _keep_redis_password(self.config, self._redis_password)
        self.secrets = ServiceSecrets.load(config.state_dir)
        tenant_specs(config)
        self._code, self._driver_code = code_version(), driver_code()
        self._on_checked = on_checked
        self._stops = contextlib.ExitStack()
        """What ends each part that was started, in the order of their starts."""
        self._is_stopping = False
        self._upgrading = threading.Lock()
        self._host: str | None = None
        self._ray_processes = dict[str, psutil.Process]()
        self._log_directory = Path()
        self.valkey: EmbeddedValkey | None = None
        self._redis_url = self.config.redis.url or ""
        self._began_s = self._started_s = time.time()

    @property
    def url(self) -> str:
        """Where clients connect."""
        host = self.config.http.host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.config.http.port}"

    def store(self) -> RedisStore:
        """A new client of the service's store, for the event loop that uses it."""
        return self._store_address.open()

    def __enter__(self) -> Self:
        """Return when every replica serves. Raises ConfigurationError."""
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop what runs, the rest of it too if one part fails to stop or this is interrupted; safe to call twice.

        An upgrade that runs in another thread ends by an error.
        """
        self._is_stopping = True
        with contextlib.redirect_stdout(WithoutShutdownNoise(sys.stdout)):
            self._stops.close()

    async def broadcast(self, method: str, timeout_s: float = 10.0) -> list[Any]:
        """What every replica answers to ``method``, in no order."""
        handle = serve.get_deployment_handle("Replica", self.config.name)
        answers: list[Any] = await handle.broadcast(method).results_async(timeout_s=timeout_s)
        return answers

    def upgrade(self, config: ServiceConfig) -> None:
        """Go on with ``config`` and the code that is installed now, without failing a turn.

        Parts that differ are replaced one at a time, and drained before.

        Blocks until the new ones serve. Raises ConfigurationError: what cannot change is refused before anything does,
        and if the new parts do not start, whatever the reason, the old settings are back. Code that was edited stays
        edited: replicas that were replaced already run it, the others go on with theirs.
        """
        config, password = _without_redis_password(config)
        changed = [name for name in FIXED if attrgetter(name)(config) != attrgetter(name)(self.config)]
        if password != self._redis_password and "redis" not in changed:
            changed.append("redis.url's password")
        if changed:
            names = ", ".join(changed)
            raise ConfigurationError(f"{names}: cannot change while the service runs: stop it and start it again")
        if driver_code() != self._driver_code:
            raise ConfigurationError("the code of `wisp serve` itself has changed: stop the service and start it again")
        _check_policy_here(config)
        check_host(config)
        refuse_too_many_replicas(config)
        tenant_specs(config)
        with self._upgrading:
            before = self.config, self._code, self._began_s
            try:
                self._deploy(config, code_version(), time.time())
            except Exception:
                self._refuse_if_stopping()
                self._deploy(*before)
                raise

    def _deploy(self, config: ServiceConfig, code: str, began_s: float) -> None:
        """Deploy both applications; Serve replaces what differs. Tenants written after ``began_s`` stay as they are."""
        self.config, self._code, self._began_s = config, code, began_s
        self._run_all()

    def tend(self) -> None:
        """Restart the embedded Valkey if it has died; call this again and again.

        Raises EngineUnavailableError when Ray has died: it would take a minute to say so itself.
        """
        if names := ended(self._ray_processes):
            raise EngineUnavailableError(
                f"Ray has ended ({', '.join(names)}; logs: {self._log_directory}): start the service again"
            )
        if self.valkey is not None:
            self.valkey.ensure_running()

    @property
    def _store_address(self) -> StoreAddress:
        """Where the parts of the service find the store."""
        return StoreAddress(
            url=self._redis_url,
            password_file=self._redis_password_file,
            service=self.config.name,
            timeout_s=self.config.redis.timeout_s,
        )

    def _start(self) -> None:
        remove_service_file(self.config.state_dir)
        listener = Listener(self.config.http, self.config.state_dir)
        self._stops.callback(listener.close)
        if self.config.redis.url is None:
            self.valkey = EmbeddedValkey(self.config.state_dir, self.secrets.redis_password)
            self._stops.callback(self.valkey.stop)
            self.valkey.start()
            self._redis_url = self.valkey.url
        asyncio.run(self._store_address.check())
        if self._on_checked is not None:
            self._on_checked()
        # Before the start, whose second half may fail.
        self._stops.callback(ray.shutdown)  # Leaves one that was joined.
        self._stops.callback(self._await_upgrade)
        self._stops.callback(self._stop_serve)
        start_ray(self.config)
        self._ray_processes, self._log_directory = own_processes(), log_directory()
        self._host = this_host()
        self._run_all()
        self._stops.callback(remove_service_file, self.config.state_dir)
        self.publish()

    def _stop_serve(self) -> None:
        """Serve waits for minutes for a Ray that has died."""
        if not ended(self._ray_processes):
            stop_serve()

    def _await_upgrade(self) -> None:
        """Serve, asked by an upgrade that goes on without Ray, would start another one."""
        if self._upgrading.acquire(timeout=UPGRADE_END_S):
            self._upgrading.release()

    def _run_all(self) -> None:
        self.run_policy()
        self._run(self._application(), self.config.name)
        self._wait_ready()

    def run_policy(self) -> None:
        """Deploy the policy service, an application of its own: it may stop and change while turns go on."""
        policy = build_policy_service(self.config, self._store_address)
        self._run(policy, self.policy_app)

    @property
    def policy_app(self) -> str:
        """Name of the policy service's application."""
        return f"{self.config.name}-policy"

    def _application(self) -> serve.Application:
        dedicated = [tenant for tenant in self.config.tenants if tenant.isolation is Isolation.DEDICATED]
        return build_ingress(
            self.config,
            self._store_address,
            self._replicas(),
            {one.tenant_id: self._replicas(f"Replica-{one.tenant_id}", one.dedicated_replicas) for one in dedicated},
            host=self._host,
            policy_app=self.policy_app,
            service_began_s=self._began_s,
            service_started_s=self._started_s,
        )

    def _replicas(self, name: str = "Replica", count: int | None = None) -> serve.Application:
        """A deployment of replicas with a router of its own."""
        router_class, router_kwargs = router_of(self.config, self._store_address)
        return build_replica(
            self.config,
            self._store_address,
            name=name,
            count=count or self.config.replica.count,
            code=self._code,
            request_router_class=router_class,
            request_router_kwargs=router_kwargs,
        )

    def _run(self, application: serve.Application, name: str) -> None:
        """Deploy one application. Raises ConfigurationError with what its parts say."""
        self._refuse_if_stopping()
        try:
            # The ingress listens by itself.
            serve.run(application, name=name, route_prefix=None, logging_config=LOGGING)
        except RuntimeError as error:
            self._refuse_if_stopping()  # Asked without Ray, Serve would start one.
            # Serve says only which deployment failed; why is in its status.
            deployments = serve.status().applications[name].deployments
            reasons = [reason_in(one.message) for one in deployments.values() if one.message.strip()] or [str(error)]
            raise ConfigurationError(
                f"a part of the service did not start (logs: {log_directory()}):\n" + "\n".join(reasons)
            ) from error

    def _refuse_if_stopping(self) -> None:
        if self._is_stopping:
            raise ConfigurationError("the service is stopping")

    def _wait_ready(self) -> None:
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while True:
            self._refuse_if_stopping()
            try:
                response = httpx.get(f"{self.url}/readyz", timeout=5, trust_env=False)  # no proxy
            except httpx.TransportError as error:
                last = str(error)
            else:
                if response.status_code == 200:
                    return
                last = response.text
            if time.monotonic() > deadline_s:
                raise EngineUnavailableError(f"not ready after {READY_TIMEOUT_S:g} s: {last}")
            time.sleep(0.2)

    def publish(self, **more: Any) -> None:
        """Tell ``wisp status`` and ``wisp load`` where the service is, unless it is stopping."""
        if self._is_stopping:
            return
        facts = {
            **more,
            "url": self.url,
            "pid": os.getpid(),
            "model": self.config.model.name,
            "key_files": {
                one.tenant_id: str(one.key_file.resolve()) for one in self.config.tenants if one.key_file is not None
            },
        }
        write_service_file(self.config.state_dir, facts)


def reason_in(message: str) -> str:
    """What an operator can mend, from Serve's message on a deployment: of a traceback only the error that ends it."""
    _, is_own, error = message.rpartition("wisp_core.errors.")
    if is_own:
        text = error.partition(": ")[2]
    elif '\n  File "' in message:
        last_frame = message.rpartition('\n  File "')[2].splitlines()[1:]  # Its source is indented, the error not.
        text = "\n".join(itertools.dropwhile(lambda line: line[:1].isspace(), last_frame))
    else:
        text = message
    if "validation error" in text:
        for pattern, words in _OF_PYDANTIC:
            text = re.sub(pattern, words, text, flags=re.MULTILINE)
    return text.strip().replace("engine arguments: ", "replica.engine: ")


def _check_policy_here(config: ServiceConfig) -> None:
    """Raises ConfigurationError for a policy that this process cannot load, whatever that of the upgrade can."""
    try:
        check_policy(config.policy)
    except ConfigurationError as error:
        hint = ", here that of the running service: start it again with it" if "PYTHONPATH" in str(error) else ""
        raise ConfigurationError(f"{error}{hint}") from error


def _without_redis_password(config: ServiceConfig) -> tuple[ServiceConfig, str | None]:
    """``config`` as the parts of the service see it, and the password that its store's URL held."""
    config = config.model_copy(update={"state_dir": config.state_dir.resolve()})
    if config.redis.url is None:
        return config, None
    url, password = without_password(config.redis.url)
    redis = config.redis.model_copy(update={"url": url})
    return config.model_copy(update={"redis": redis}), password


def _keep_redis_password(config: ServiceConfig, password: str | None) -> Path | None:
    """The file that holds the password of the service's store, for its parts; none, if there is none."""
    if config.redis.url is None:
        return secret_path(config.state_dir, "redis")
    path = secret_path(config.state_dir, "redis-url")
    if password is None:
        path.unlink(missing_ok=True)
        return None
    replace_secret(path, password)
    return path
