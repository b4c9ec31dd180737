"""``service.json`` in the state directory: how the command line finds a running service."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wisp_core.errors import ConfigurationError

_NAME = "service.json"


def read_service_file(state_dir: Path) -> dict[str, Any]:
    """What a running service has published. Raises ConfigurationError when none runs there, or not yet."""
    try:
        facts: dict[str, Any] = json.loads((state_dir / _NAME).read_text())
    except OSError as error:
        if is_owned(state_dir):
            raise ConfigurationError(f"the service with state_dir {state_dir} is starting, or stopping") from error
        raise ConfigurationError(
            f"no service runs with state_dir {state_dir}: start one with `wisp serve`, or name another by --state-dir"
        ) from error
    return facts


def is_owned(state_dir: Path) -> bool:
    """Whether a service owns ``state_dir`` now."""
    try:
        with (state_dir / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextlib.contextmanager
def locked(path: Path, note: str) -> Iterator[None]:
    """Hold the lock ``path`` until exit; the system frees it when the process ends, however that happens.

    Raises BlockingIOError, the other's note as its ``strerror``, if another has it, else OSError for no such file.
    """
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(error.errno, lock.read().strip() or "unknown") from error
        lock.truncate()
        lock.write(f"{note}\n")
        lock.flush()
        yield


def write_service_file(state_dir: Path, facts: Mapping[str, Any]) -> None:
    """Publish ``facts``; a reader sees the old ones or all of these."""
    draft = state_dir / f"{_NAME}.new"
    draft.write_text(json.dumps(facts) + "\n")
    draft.replace(state_dir / _NAME)


def upgrade_path(state_dir: Path) -> Path:
    """Where an upgrade is ordered."""
    return state_dir / "upgrade.json"


def remove_service_file(state_dir: Path) -> None:
    """No service runs there any more, or not yet: one that was killed leaves its file, and an order, behind."""
    for path in (state_dir / _NAME, upgrade_path(state_dir)):
        path.unlink(missing_ok=True)
