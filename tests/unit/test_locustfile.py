"""Locust's own command line with WiSP's users: what is wrong is named before the first of them starts."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from services.cli.load import LOCUST_FILE


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("{}", "--wisp-keys {}: give a JSON object of key files by tenant"),
        ("acme.key", "--wisp-keys acme.key: give a JSON object"),
        ('{"acme": "/nowhere/acme.key"}', "--wisp-keys: there is no file /nowhere/acme.key"),
    ],
)
def test_keys_that_cannot_be_read_are_named(keys: str, said: str, tmp_path: Path) -> None:
    # A process of its own, as Locust patches the standard library.
    command = [sys.executable, "-m", "locust", "-f", str(LOCUST_FILE), "--headless", "--host", "http://127.0.0.1:1"]
    command += ["--users", "1", "--run-time", "1s", "--wisp-keys", keys]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode != 0


def test_the_users_of_all_worker_processes_are_different_sessions_and_go_by_no_proxy(tmp_path: Path) -> None:
    sessions = set[str]()

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sessions.add(self.headers["x-session-id"])
            self.send_error(503)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    (tmp_path / "acme.key").write_text("key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, "-m", "locust", "-f", str(LOCUST_FILE), "--headless", "--processes", "2"]
        command += ["--host", f"http://127.0.0.1:{server.server_port}", "--users", "4", "--spawn-rate", "4"]
        command += ["--run-time", "2s", "--wisp-keys", json.dumps({"acme": str(tmp_path / "acme.key")})]
        environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=False)
        server.shutdown()
    assert len(sessions) == 4
