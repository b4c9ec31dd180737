"""What the command line asks of a running service: with the admin key, and every failure is one message."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from services.cli.load import Counters
from services.cli.operator import Operator
from services.cli.tenant import _call
from services.secret_files import read_or_create, secret_path
from services.service_file import write_service_file
from wisp_core.errors import ConfigurationError, EngineUnavailableError

ANSWERS = {
    "/wisp/recording?turns=3": (200, b'{"turns": []}'),
    "/metrics": (200, b'# TYPE a counter\na_total{x="1"} 2.0\na_total{x="2"} 3.0\n'),
    "/wisp/status": (503, b"{}"),
    "/wisp/tenants/acme": (409, b'{"error": {"message": "The service\'s file declares this tenant."}}'),
}


class Service(BaseHTTPRequestHandler):
    """Answers as the table says, whoever has the key."""

    key = ""

    def do_GET(self) -> None:
        status, body = ANSWERS[self.path] if self.headers["authorization"] == f"Bearer {self.key}" else (401, b"{}")
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def do_DELETE(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(Service, "key", read_or_create(secret_path(tmp_path, "admin")))
    with HTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        write_service_file(tmp_path, {"url": f"http://127.0.0.1:{server.server_port}"})
        yield tmp_path
        server.shutdown()


def test_an_operator_reads_pages_with_the_admin_key(state_dir: Path) -> None:
    service = Operator(state_dir)
    assert service.read("/wisp/recording", turns=3).json() == {"turns": []}
    assert Counters.read(service).values == {"a_total": 5.0}
    with pytest.raises(EngineUnavailableError, match=r"does not answer: .*503"):
        service.read("/wisp/status")


def test_what_the_service_refuses_is_said_in_its_words(state_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^The service's file declares this tenant"):
        _call(state_dir, "DELETE", "/acme")


def test_a_service_that_does_not_answer_is_named(state_dir: Path) -> None:
    facts = json.loads((state_dir / "service.json").read_text())
    write_service_file(state_dir, {**facts, "url": "http://127.0.0.1:1"})
    with pytest.raises(EngineUnavailableError, match=r"127\.0\.0\.1:1 does not answer: .*refused.*: no service runs"):
        Operator(state_dir).read("/metrics")
