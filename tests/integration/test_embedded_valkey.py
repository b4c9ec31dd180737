"""The Valkey that a service runs for itself: its end, and what keeps it from starting again, end no service."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.embedded_valkey import EmbeddedValkey


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path, "secret")
    server.start()
    yield server
    server.stop()


def kill(server: EmbeddedValkey) -> None:
    assert server._process is not None
    os.kill(server.pid, signal.SIGKILL)
    server._process.wait(5)


def test_a_server_that_ended_is_started_again_at_its_address(valkey: EmbeddedValkey) -> None:
    url, pid = valkey.url, valkey.pid
    assert not valkey.ensure_running()
    kill(valkey)
    assert valkey.ensure_running()
    assert (valkey.url, valkey.pid != pid) == (url, True)


def test_a_port_that_is_taken_meanwhile_is_waited_for(
    valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = int(valkey.url.rpartition(":")[2].partition("/")[0])
    kill(valkey)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        assert not valkey.ensure_running()
        assert not valkey.ensure_running(), "not again at once"
    assert len([line for line in caplog.messages if "Valkey did not start" in line]) == 1
    monkeypatch.setattr(valkey, "_next_try_s", 0.0)
    assert valkey.ensure_running()


def test_a_stale_pid_may_belong_to_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: psutil.Process) -> list[str]:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "cmdline", denied)
    (tmp_path / "valkey").mkdir()
    (tmp_path / "valkey" / "valkey.pid").write_text(str(os.getppid()))
    server = EmbeddedValkey(tmp_path, "secret")
    server.start()
    server.stop()
