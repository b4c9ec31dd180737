"""What must hold before a service starts: refused within a second and by name, not after a minute of Ray."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from pathlib import Path

from services.config import ModelSettings, PolicySettings, ServiceConfig
from services.policy.process import PolicyFaultError, PolicyProcess, PolicySpec
from services.preflight_engine import check_engine
from wisp_core.errors import ConfigurationError

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@contextlib.contextmanager
def checked_start(config: ServiceConfig) -> Iterator[None]:
    """Check ``config`` against this machine and own its state directory until exit. Raises ConfigurationError."""
    check_settings(config)
    with own_state_dir(config.state_dir):
        yield


def check_settings(config: ServiceConfig) -> None:
    """Check what does not depend on what runs now. Raises ConfigurationError."""
    check_model(config.model)
    check_engine(config.model, config.replica)
    check_policy(config.policy)


@contextlib.contextmanager
def own_state_dir(state_dir: Path) -> Iterator[None]:
    """Own ``state_dir`` until exit; the system frees it when the process ends, however that happens.

    Two services there would end each other's Valkey and share each other's keys. Raises ConfigurationError.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigurationError(f"state_dir {state_dir}: {error.strerror}") from error
    with os.fdopen(descriptor, "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = lock.read().strip() or "unknown"
            raise ConfigurationError(
                f"state_dir {state_dir}: another service runs there (pid {owner}): stop it, change it by `wisp serve "
                "--upgrade`, or give this one a state_dir of its own"
            ) from error
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
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
