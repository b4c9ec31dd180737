"""The public port: held by ``wisp serve``, served by every ingress.

An ingress that starts is handed the listening socket itself. So a connection that is made while no ingress runs, or
while one takes over from another, waits in the socket's queue for the next one; none is refused.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import threading
from pathlib import Path

from services.config import HttpSettings
from wisp_core.errors import ConfigurationError

BACKLOG = 2048
"""Connections that may wait for an ingress."""
_TAKE_TIMEOUT_S = 10.0


class Listener:
    """Listens at the service's address, and hands the socket to whoever asks at ``path``, which only its owner can."""

    def __init__(self, http: HttpSettings) -> None:
        """Nobody accepts yet. Raises ConfigurationError when nothing can listen there."""
        self._socket = _listen(http)
        self._directory = Path(tempfile.mkdtemp(prefix="wisp-"))  # For the owner only.
        self.path = str(self._directory / "port")
        self._door = socket.socket(socket.AF_UNIX)
        self._door.bind(self.path)
        self._door.listen()
        self._thread = threading.Thread(target=self._hand_out, name="wisp-listener", daemon=True)
        self._thread.start()

    def _hand_out(self) -> None:
        while True:
            try:
                asker, _ = self._door.accept()
            except OSError:  # Closed.
                return
            with asker, contextlib.suppress(OSError):
                socket.send_fds(asker, [b"\0"], [self._socket.fileno()])

    def close(self) -> None:
        """Hand out no more; the port is free once no ingress has it."""
        self._door.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._door.close()
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)


def take_listener(path: str) -> socket.socket:
    """The listening socket that a `Listener` of this host holds. Raises OSError when there is none."""
    with socket.socket(socket.AF_UNIX) as door:
        door.settimeout(_TAKE_TIMEOUT_S)
        door.connect(path)
        _, descriptors, _, _ = socket.recv_fds(door, 1, 1)
    if not descriptors:
        raise ConnectionError(f"{path}: the public port is closed")
    return socket.socket(fileno=descriptors[0])


def _listen(http: HttpSettings) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            http.host, http.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Connections that linger from an earlier run are no obstacle: create_server sets SO_REUSEADDR.
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"http.host {http.host}, http.port {http.port}: {error.strerror}; give a free port and an address of "
            "this machine"
        ) from error
