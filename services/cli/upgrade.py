"""``wisp serve --upgrade``: a running service goes on with another configuration, without failing a turn."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from services.app import Service
from services.config import ServiceConfig
from services.preflight import check_settings, warnings_of
from services.service_file import is_owned, locked, read_service_file, upgrade_path
from wisp_core.errors import ConfigurationError, WispError

logger = logging.getLogger(__name__)

TIMEOUT_S = 900.0
"""Replicas are replaced one at a time, and each waits for its running turns."""


def request_upgrade(path: Path) -> None:
    """Have the service of ``path``'s state directory go on with ``path``; returns when it does.

    Raises ConfigurationError with the reason when it does not, and goes on as it was.
    """
    config = ServiceConfig.load(path)
    check_settings(config)
    facts = read_service_file(config.state_dir)
    if not is_owned(config.state_dir):
        # A service that was killed leaves its file behind, and its pid may be anybody's by now.
        raise ConfigurationError(f"no service runs with state_dir {config.state_dir}: start one with `wisp serve`")
    if "upgrade" not in facts:
        raise ConfigurationError(
            f"the service with state_dir {config.state_dir} takes no upgrade: it belongs to a demo, a benchmark or the "
            "like, or is still starting"
        )
    if running := facts["upgrade"].get("to"):
        raise ConfigurationError(f"another upgrade runs, to {running}: wait for its end")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(config.state_dir / "upgrade.lock", f"{path.resolve()} (pid {os.getpid()})"))
        except BlockingIOError as error:
            raise ConfigurationError(f"another upgrade runs, to {error.strerror}: wait for its end") from error
        for warning in warnings_of(config):
            typer.echo(f"wisp: warning: {warning}", err=True)
        try:
            _order(config.state_dir, path, int(facts["pid"]))
        except KeyboardInterrupt:
            typer.echo("wisp: the service goes on with the upgrade, and says how it ends", err=True)
            raise
    typer.echo("wisp: upgraded", err=True)


def _order(state_dir: Path, path: Path, pid: int) -> None:
    """Have the service ``pid`` go on with ``path``. Raises ConfigurationError unless it does, within ``TIMEOUT_S``."""
    order = secrets.token_hex(8)
    upgrade_path(state_dir).write_text(json.dumps({"id": order, "config": str(path.resolve())}))
    os.kill(pid, signal.SIGHUP)
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        done: dict[str, Any] = read_service_file(state_dir)["upgrade"]
        if done.get("id") == order:
            if done["error"] is not None:
                raise ConfigurationError(done["error"])
            return
        if not is_owned(state_dir):
            raise ConfigurationError("the service has ended before it was upgraded: start it again with `wisp serve`")
        time.sleep(0.2)
    raise ConfigurationError(f"the service was not upgraded within {TIMEOUT_S:g} s")


class Upgrades:
    """The running service's side: carries out what SIGHUP announces, one after the other, in a thread of its own.

    The main thread keeps tending the service meanwhile.
    """

    def __init__(self, service: Service, load: Callable[[Path], ServiceConfig]) -> None:
        """Takes over SIGHUP and says so; call in the main thread. ``load`` reads a file as ``service``'s start did."""
        self._service = service
        self._load = load
        self._is_asked = threading.Event()
        self._thread: threading.Thread | None = None
        signal.signal(signal.SIGHUP, self._on_signal)
        service.publish(upgrade={})

    def _on_signal(self, signum: int, _: FrameType | None) -> None:
        self._is_asked.set()

    def look(self) -> None:
        """Begin an upgrade that was asked for, unless one runs."""
        if self._is_asked.is_set() and (self._thread is None or not self._thread.is_alive()):
            self._is_asked.clear()
            self._thread = threading.Thread(target=self._carry_out, name="wisp-upgrade", daemon=True)
            self._thread.start()

    def _carry_out(self) -> None:
        path = upgrade_path(self._service.config.state_dir)
        if not path.exists():
            return  # A terminal that was closed sends SIGHUP too.
        order: dict[str, str] = {}
        error: str | None = None
        try:
            order = json.loads(path.read_text())
            path.unlink()
            typer.echo(f"wisp: upgrading to {order['config']}", err=True)
            self._service.publish(upgrade={"to": order["config"]})
            self._service.upgrade(self._load(Path(order["config"])))
        except (WispError, OSError, ValueError, KeyError) as caught:
            error = str(caught) or type(caught).__name__
        except Exception as caught:
            logger.exception("the upgrade failed")
            error = f"{type(caught).__name__}: {caught}"
        typer.echo("wisp: upgraded" if error is None else f"wisp: not upgraded: {error}", err=True)
        self._service.publish(upgrade={"id": order.get("id"), "error": error})
