"""What must hold before a service starts: refused within a second and by name, not after a minute of Ray."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil

from services.config import ModelSettings, PolicySettings, RouterName, ServiceConfig
from services.environment import joined_cluster
from services.policy.process import PolicyFaultError, PolicyProcess, PolicySpec
from services.preflight_engine import check_engine
from services.service_file import locked
from wisp_core.contracts import Barrier
from wisp_core.errors import ConfigurationError
from wisp_core.tenant_contracts import Isolation

_REPLICA_BYTES = 1 << 30
"""What the processes of a replica hold beside its budget, at least: vLLM itself, twice."""
_MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs", "hugetlbfs"}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@contextlib.contextmanager
def checked_start(config: ServiceConfig) -> Iterator[None]:
    """Check ``config`` against this machine and own its state directory until exit. Raises ConfigurationError."""
    check_settings(config)
    check_host(config)
    with own_state_dir(config.state_dir):
        yield


def check_settings(config: ServiceConfig) -> None:
    """Check what does not depend on what runs now. Raises ConfigurationError."""
    check_model(config.model)
    check_engine(config.model, config.replica, config.policy)
    check_policy(config.policy)


def check_host(config: ServiceConfig) -> None:
    """Check what depends on the host that replicas run on, unless Ray chooses it. Raises ConfigurationError."""
    if joined_cluster() is None:
        check_memory(config, psutil.virtual_memory().total)
        if config.replica.host_store_dir is not None:
            check_host_store(Path(config.replica.host_store_dir))


def check_memory(config: ServiceConfig, host_bytes: int) -> None:
    """Raises ConfigurationError for more replicas than ``host_bytes`` can hold."""
    replica, count = config.replica, config.most_replicas
    each_bytes = _REPLICA_BYTES + replica.kv_host_bytes + (0 if replica.num_gpus else replica.vram_budget_bytes)
    if count * each_bytes > host_bytes:
        raise ConfigurationError(
            f"replica.count: {count} replicas, those of dedicated tenants and of autoscaling included, take "
            f"{each_bytes / 1e9:.1f} GB of memory each, this host has {host_bytes / 1e9:.1f}: give "
            f"{host_bytes // each_bytes} or fewer, or join a cluster of several hosts by RAY_ADDRESS"
        )


def check_host_store(directory: Path) -> None:
    """Raises ConfigurationError unless ``directory`` lies in memory and a replica can write, or create, it there."""
    existing = directory if directory.exists() else directory.parent
    problem = None
    if not existing.is_dir():
        problem = "no such directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = "not writable"
    elif (kind := _file_system(existing)) not in _MEMORY_FILE_SYSTEMS:
        problem = f"lies on {kind}, no memory file system"
    if problem is not None:
        raise ConfigurationError(f"replica.host_store_dir {directory}: {problem}; give one such as /dev/shm")


def _file_system(path: Path) -> str:
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    resolved = path.resolve()
    return next((mounts[one] for one in (resolved, *resolved.parents) if one in mounts), "an unknown file system")


def warnings_of(config: ServiceConfig) -> list[str]:
    """What may be meant otherwise."""
    replica, routing, lines = config.replica, config.routing, []
    if routing.router is not RouterName.WORKING_SET:
        unused = sorted(routing.model_fields_set - {"router"})
        lines += [f"routing.{name}: only routing.router: working_set has use for it" for name in unused]
    if "drain_timeout_s" in replica.model_fields_set and replica.barrier is not Barrier.DRAINED:
        lines.append("replica.drain_timeout_s: only replica.barrier: drained has use for it")
    most = replica.count if replica.autoscaling is None else max(replica.count, replica.autoscaling.max_count)
    for index, tenant in enumerate(config.tenants):
        count = tenant.dedicated_replicas if tenant.isolation is Isolation.DEDICATED else most
        if tenant.max_concurrent_turns > count * replica.max_ongoing_turns:
            lines.append(
                f"tenants.{index}.max_concurrent_turns: {tenant.max_concurrent_turns} turns at once are more than "
                f"replica.max_ongoing_turns ({replica.max_ongoing_turns}) on each of {count} replicas: the others wait "
                "before the fair queue, in no fair order"
            )
    return lines


@contextlib.contextmanager
def own_state_dir(state_dir: Path) -> Iterator[None]:
    """Own ``state_dir`` until exit, or the end of this process.

    Two services there would end each other's Valkey and share each other's keys. Raises ConfigurationError.
    """
    with contextlib.ExitStack() as stack:
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(state_dir / "lock", str(os.getpid())))
        except BlockingIOError as error:
            raise ConfigurationError(
                f"state_dir {state_dir}: another service runs there (pid {error.strerror}): stop it, change it by "
                "`wisp serve --upgrade`, or give this one a state_dir of its own"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"state_dir {state_dir}: {error.strerror}; give a directory that exists or can be made"
            ) from error
        yield


def check_policy(policy: PolicySettings) -> None:
    """Load the policy in a process of its own and end it. Raises ConfigurationError when that fails."""
    try:
        process = PolicyProcess(PolicySpec(name=policy.name, settings=policy.settings))
    except PolicyFaultError as error:
        raise ConfigurationError(f"policy.name: {policy.name} did not start: {error}") from error
    process.kill()


def check_model(model: ModelSettings) -> None:
    """Raises ConfigurationError for a path where no checkpoint lies; names on the hub are left to vLLM."""
    path = Path(model.path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"model.path {path}: no config.json there, so it is no Hugging Face checkpoint")
    elif not _HUB_NAME.fullmatch(model.path):
        raise ConfigurationError(
            f"model.path {path}: no such directory; give a Hugging Face checkpoint, or write a small one with "
            f"`wisp model tiny {path}`"
        )
