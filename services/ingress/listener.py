"""The public port: held by ``wisp serve``, served by every ingress.

An ingress that starts is handed the listening socket itself. So a connection that is made while one takes over from
another, or is started again, waits in the socket's queue for the next one; none is refused. Who comes before the first
one, which takes a minute, is told so.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from services.config import HttpSettings
from services.ingress.errors import unavailable
from wisp_core.errors import ConfigurationError

BACKLOG = 2048
"""Connections that may wait for an ingress."""
_TAKE_TIMEOUT_S = 10.0
_EARLY_TIMEOUT_S = 1.0
"""How long a client that comes too early may take for its request, and for the rest of it: others wait meanwhile."""
_RECEIVE_BYTES = 64 << 10
_RETRY_AFTER_S = 5.0
_HANDOFF = "socket"


class Listener:
    """Listens at the service's address, and hands the socket to its owner's processes that ask in ``state_dir``."""

    def __init__(self, http: HttpSettings, state_dir: Path) -> None:
        """Nobody accepts yet. Raises ConfigurationError when nothing can listen there."""
        self.state_dir = state_dir
        self._socket = _listen(http)
        self._handoff = socket.socket(socket.AF_UNIX)
        try:
            handoff_directory(state_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._remove_handoff()  # Of a service that was killed; state_dir has one at a time.
            with _handoff_name(state_dir) as name:
                self._handoff.bind(name)
        except OSError as error:
            self._handoff.close()
            self._socket.close()
            raise ConfigurationError(f"state_dir {state_dir}: {error}") from error
        self._handoff.listen()
        self._thread = threading.Thread(target=self._hand_out, name="wisp-listener", daemon=True)
        self._thread.start()

    def _hand_out(self) -> None:
        is_starting = True
        with selectors.DefaultSelector() as selector:
            selector.register(self._handoff, selectors.EVENT_READ)
            selector.register(self._socket, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._handoff not in ready:
                    _answer_early(self._socket)
                    continue
                try:
                    asker, _ = self._handoff.accept()
                except OSError:  # Closed.
                    return
                if is_starting:
                    selector.unregister(self._socket)
                    is_starting = False
                with asker, contextlib.suppress(OSError):
                    socket.send_fds(asker, [b"\0"], [self._socket.fileno()])

    def close(self) -> None:
        """Hand out no more; the port is free once no ingress has it."""
        self._remove_handoff()
        self._handoff.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._handoff.close()
        self._socket.close()

    def _remove_handoff(self) -> None:
        with contextlib.suppress(OSError):
            (handoff_directory(self.state_dir) / _HANDOFF).unlink()


def _answer_early(listener: socket.socket) -> None:
    """Answer the next client of a service that starts: 503, whatever it asks."""
    with contextlib.suppress(OSError):
        client, _ = listener.accept()
        with client:
            client.settimeout(_EARLY_TIMEOUT_S)
            client.recv(_RECEIVE_BYTES)
            client.sendall(_early_answer())
            client.shutdown(socket.SHUT_WR)
            until_s = time.monotonic() + _EARLY_TIMEOUT_S
            while client.recv(_RECEIVE_BYTES) and time.monotonic() < until_s:
                pass  # What is closed unread cuts the answer off.


def _early_answer() -> bytes:
    error = unavailable("The service is starting.", _RETRY_AFTER_S)
    body = error.body()
    headers = {"content-type": "application/json", "content-length": len(body), "connection": "close", **error.headers}
    lines = [f"HTTP/1.1 {error.status} Service Unavailable", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def take_listener(state_dir: Path) -> socket.socket:
    """The listening socket that the `Listener` of this ``state_dir`` holds. Raises OSError when there is none."""
    with socket.socket(socket.AF_UNIX) as handoff:
        handoff.settimeout(_TAKE_TIMEOUT_S)
        with _handoff_name(state_dir) as name:
            handoff.connect(name)
        _, descriptors, _, _ = socket.recv_fds(handoff, 1, 1)
    if not descriptors:
        raise ConnectionError(f"{state_dir}: the public port is closed")
    return socket.socket(fileno=descriptors[0])


def handoff_directory(state_dir: Path) -> Path:
    """Where the socket is handed over: only the owner gets there, since who has it gets the service's clients."""
    return state_dir / "port"


@contextlib.contextmanager
def _handoff_name(state_dir: Path) -> Iterator[str]:
    """A name of the hand-over socket that is short: one's may have 107 bytes, whatever the directory's is."""
    descriptor = os.open(handoff_directory(state_dir), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_HANDOFF}"
    finally:
        os.close(descriptor)


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
