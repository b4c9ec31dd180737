"""Ray under a service: a cluster of its own on this host, or the one that ``RAY_ADDRESS`` names."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import TextIO
from urllib.parse import urlsplit

import psutil
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.exceptions import RayServeException

from services.config import ServiceConfig
from services.environment import joined_cluster, serve_environment
from wisp_core.errors import ConfigurationError

logger = logging.getLogger(__name__)

LOGGING = {"log_level": "WARNING", "enable_access_log": False}
_OBJECT_STORE_BYTES = 100 << 20
"""Bodies and chunks travel inside messages; Ray's default is a third of the machine's memory."""
_SPARE_CPUS = 1
"""For a replica that an upgrade adds."""
_PROBE_TIMEOUT_S = 3.0
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def start_ray(config: ServiceConfig) -> None:
    """Start or join Ray, and start Serve on it. Raises ConfigurationError."""
    # From the first moment: a start that ends before Serve's need not say that there is no Serve.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    address = joined_cluster()
    if address is None:
        with _signals_wait():
            ray.init(
                address="local",
                num_cpus=ray_cpus(config),
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    else:
        _join(address, config)
    refuse_too_many_replicas(config)
    serve.start(proxy_location="Disabled", logging_config=LOGGING)


def own_processes() -> dict[str, psutil.Process]:
    """By name what must run of the Ray that this process has started; empty for a cluster that it has joined."""
    found = dict[str, psutil.Process]()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if (name := child.name()) in ("gcs_server", "raylet") and _runs(child):
                found[name] = child
    return found


def ended(processes: Mapping[str, psutil.Process]) -> list[str]:
    """Names of those that run no more."""
    return [name for name, process in processes.items() if not _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def stop_serve() -> None:
    """Stop all that Serve runs, if it has started; what it says of its end keeps nobody from ending Ray."""
    if not ray.is_initialized():
        return
    try:
        serve.shutdown()
    except (RayError, RayServeException) as error:
        logger.warning("Serve did not stop: %s", error)


def check_cluster(address: str) -> None:
    """Raises ConfigurationError where nobody listens: Ray itself would try for minutes, deaf to signals."""
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    if address == "auto" or parts.scheme != "ray":
        return  # Ray finds these by itself.
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        raise ConfigurationError(
            f"RAY_ADDRESS {address}: give HOST:PORT of a Ray cluster's head, such as 10.0.0.1:6379"
        )
    # Of a loopback address Ray makes this host's own one.
    hosts = [host, ray.util.get_node_ip_address()] if host in _LOOPBACK else [host]
    failures = [failure for one in hosts if (failure := _connect_failure(one, port)) is not None]
    if len(failures) == len(hosts):
        raise ConfigurationError(
            f"RAY_ADDRESS {address}: no Ray there ({failures[0]}); start one by `ray start --head`, or unset "
            "RAY_ADDRESS for a cluster of the service's own"
        )


def _connect_failure(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _join(address: str, config: ServiceConfig) -> None:
    check_cluster(address)
    try:
        # At once: Ray runs no handler while it waits for what is no Ray.
        with _signals_do(signal.SIG_DFL):
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": serve_environment()},
            )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigurationError(f"RAY_ADDRESS {address}: {error}") from error
    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        pass
    else:
        ray.shutdown()  # Serve there is somebody else's: it must not be stopped with this service.
        raise ConfigurationError(
            f"RAY_ADDRESS {address}: Serve runs there already, with settings of its own; stop it "
            "(serve shutdown) or take a cluster for each service"
        )
    hosts = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if len(hosts) > 1 and config.redis.url is None:
        raise ConfigurationError(
            f"redis.url: the {len(hosts)} hosts of the Ray cluster at {address} cannot reach an embedded Valkey on "
            "loopback; give the URL of a Redis that they reach"
        )


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Have SIGINT and SIGTERM wait until exit: a start of Ray that is interrupted crashes or leaves processes."""
    waiting = list[int]()

    def wait(number: int, _: FrameType | None) -> None:
        waiting.append(number)
        logger.warning("interrupted: Ray is being started, and stops then")

    with _signals_do(wait):
        yield
    for number in waiting[:1]:
        signal.raise_signal(number)


@contextlib.contextmanager
def _signals_do(action: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Have SIGINT and SIGTERM do ``action`` until exit, and then what they did before, whatever Ray has them do."""
    handlers = {number: signal.signal(number, action) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def this_host() -> str:
    """Ray's resource that this host has and no other."""
    node_id = ray.get_runtime_context().get_node_id()
    (address,) = (node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == node_id)
    return f"node:{address}"


def refuse_too_many_replicas(config: ServiceConfig) -> None:
    """Raises ConfigurationError if Ray cannot place the replicas of ``config``, which Serve would wait for."""
    count = config.num_replicas
    for name, needed in (("CPU", needed_cpus(config)), ("GPU", count * config.replica.num_gpus)):
        found = ray.cluster_resources().get(name, 0.0)
        if needed > found:
            raise ConfigurationError(
                f"replica.count: {count} replicas need {needed:g} {name}s, Ray has {found:g}; give fewer replicas, a "
                f"part of one to each (replica.num_{name.lower()}s: 0.5), or hosts to a cluster that RAY_ADDRESS "
                "names. A cluster of the service's own counts once, at its start"
            )


def ray_cpus(config: ServiceConfig) -> int:
    """CPUs that Ray is told of, so that every replica and whatever else runs finds its own: bookkeeping, no limit."""
    return max(os.cpu_count() or 1, math.ceil(needed_cpus(config) + _SPARE_CPUS))


def needed_cpus(config: ServiceConfig) -> float:
    """CPUs that the parts of a service ask Ray for, ingresses twice: old and new ones overlap in an upgrade."""
    return config.most_replicas * config.replica.num_cpus + 0.2 * config.http.num_ingresses + 0.2


class WithoutShutdownNoise(io.TextIOBase):
    """Standard output less Ray's lines on calls to Serve's controller that failed because it was told to end."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_after_noise = False

    def write(self, text: str) -> int:
        """Pass on everything else."""
        is_its_end = self._is_after_noise and text == "\n"
        self._is_after_noise = "Task ServeController." in text and " failed" in text
        return len(text) if self._is_after_noise or is_its_end else self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream behind."""
        self._stream.flush()
