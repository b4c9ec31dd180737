"""What a service that is starting says meanwhile: where its logs are, and how far it is."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ServeStatus

PERIOD_S = 15.0
_POLL_PERIOD_S = 0.5


@contextlib.contextmanager
def progress_to(say: Callable[[str], None], *, until: threading.Event | None = None) -> Iterator[None]:
    """Say where the logs are as soon as that is known, and what is ready every ``PERIOD_S``.

    Ends at exit, or once ``until`` is set.
    """
    ended = until or threading.Event()
    teller = threading.Thread(target=_tell, args=(say, ended), name="start-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        # Not longer: a question to a controller that ends may stay without an answer.
        teller.join(timeout=1.0)


def _tell(say: Callable[[str], None], ended: threading.Event) -> None:
    started_s = time.monotonic()
    # Whatever Ray raises while it stops again is told by who stops it.
    with contextlib.suppress(RayError, RuntimeError):
        while not ray.is_initialized():
            if ended.wait(_POLL_PERIOD_S):
                return
        if ended.is_set():
            return
        say(f"logs are in {log_directory()}")
        while not ended.wait(PERIOD_S) and ray.is_initialized():
            say(f"{time.monotonic() - started_s:.0f} s, ready: {what_is_ready(serve.status())}")


def log_directory() -> Path:
    """Where Ray keeps the output of replicas, their engines' included, and of all else it runs."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def what_is_ready(status: ServeStatus) -> str:
    """Each deployment of ``status`` with how many of its replicas run."""
    parts = [
        f"{name} {one.replica_states.get('RUNNING', 0)} of {sum(one.replica_states.values())}"
        for application in status.applications.values()
        for name, one in application.deployments.items()
    ]
    return ", ".join(parts) or "Ray"
