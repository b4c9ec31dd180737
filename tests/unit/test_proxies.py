"""A proxy that the environment names is not for a service on this host."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.cli.operator import Operator
from services.config import ServiceConfig
from services.demo.connected import tenant_clients
from services.secret_files import read_or_create
from services.service_file import write_service_file

ROOT = Path(__file__).parents[2]
CALLS = {"get", "post", "put", "patch", "delete", "request", "stream", "Client", "AsyncClient"}
"""Of httpx."""


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"object": "list", "data": []}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server on this host, beside a proxy that nobody serves."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_operator_reaches_the_service(url: str, tmp_path: Path) -> None:
    write_service_file(tmp_path, {"url": url})
    assert Operator(tmp_path).read("/wisp/status").status_code == 200


async def test_tenants_clients_reach_the_service(url: str, tmp_path: Path) -> None:
    key_file = tmp_path / "a.key"
    read_or_create(key_file)
    config = ServiceConfig.model_validate(
        {
            "state_dir": tmp_path,
            "model": {"path": "m"},
            "replica": {"vram_budget_bytes": 1000},
            "tenants": [{"tenant_id": "a", "key_file": key_file}],
        }
    )
    async with tenant_clients(config, url) as clients:
        assert (await clients["a"].models.list()).data == []


@pytest.mark.parametrize("package", ["services", "loadtests"])
def test_every_client_says_so(package: str) -> None:
    calls = [
        (path.relative_to(ROOT), node)
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _is_http(node.func)
    ]
    assert len(calls) >= 3
    silent = [(path, call) for path, call in calls if "trust_env" not in {one.arg for one in call.keywords}]
    assert [f"{path}:{call.lineno}" for path, call in silent] == []


def _is_http(function: ast.expr) -> bool:
    if isinstance(function, ast.Name):
        return function.id == "DefaultAsyncHttpxClient"
    is_httpx = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    return is_httpx and function.value.id == "httpx" and function.attr in CALLS
