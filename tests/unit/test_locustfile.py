"""Locust's own command line with WiSP's users: what is wrong is named before the first of them starts."""

import subprocess
import sys
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
