"""A whole service started by ``wisp serve``, as an operator would, and the processes that it consists of."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import yaml

from services.free_port import free_port
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

START_TIMEOUT_S = 240.0
SMALL_MODEL = TinyModelConfig(layers=2, experts=16, moe_intermediate=128)
_TITLES = [re.compile(text) for text in (r"ServeReplica:[^:]+:(\w+)", r"^ray::(\w+)", r"^(VLLM::\w+)")]


class RunningService:
    """Starts with the constructor, serves once ``wait_ready`` returns. As a context: ready, and stopped at exit."""

    def __init__(self, directory: Path, config: dict[str, Any], environment: Mapping[str, str] | None = None) -> None:
        """``config`` is a service's file; it and the log of ``wisp serve`` lie in ``directory``."""
        self.config = config
        self.url = f"http://127.0.0.1:{config['http']['port']}"
        self.state_dir = Path(config["state_dir"])
        self.config_path = directory / "service.yaml"
        self.config_path.write_text(yaml.safe_dump(config))
        self._log = (directory / "serve.log").open("w+")
        command = [sys.executable, "-m", "services.cli.main", "serve", "--config", str(self.config_path)]
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
        )

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def key(self, tenant: str) -> str:
        """API key of a tenant whose key is in a file."""
        path = next(one["key_file"] for one in self.config["tenants"] if one["tenant_id"] == tenant)
        return Path(path).read_text().strip()

    @property
    def admin_key(self) -> str:
        """The operator's key."""
        return (self.state_dir / "secrets" / "admin.key").read_text().strip()

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Status and body of ``/readyz``."""
        response = httpx.get(f"{self.url}/readyz", timeout=10, trust_env=False)
        return response.status_code, response.json()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Return, with the seconds it took, when the start has ended and every engine serves.

        Raises RuntimeError with the log's end.
        """
        began_s = time.monotonic()
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"wisp serve ended:\n{self.log()[-4000:]}")
            with contextlib.suppress(httpx.TransportError):
                if self.readiness()[0] == 200 and "wisp: serving at" in self.log():
                    return time.monotonic() - began_s
            if time.monotonic() - began_s > timeout_s:
                raise RuntimeError(f"not ready after {timeout_s:g} s:\n{self.log()[-4000:]}")
            time.sleep(0.1)

    def log(self) -> str:
        """What ``wisp serve`` printed."""
        self._log.flush()
        return Path(self._log.name).read_text()

    def processes(self, title: str) -> list[psutil.Process]:
        """Processes of the service whose command line contains ``title``, oldest first."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if title in " ".join(process.cmdline()):
                    found.append(process)
        return sorted(found, key=psutil.Process.create_time)

    def resident_bytes(self) -> int:
        """Resident memory of every process of the service, shared pages counted once for each."""
        total = 0
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def anonymous_bytes(self) -> dict[str, int]:
        """Memory of each kind of process that is no file's: without libraries, and without an engine's pools.

        Pools are resident once their pages have been used, and bounded by the replica's budget.
        """
        found: Counter[str] = Counter()
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                memory = process.memory_info()
                found[part_name(process.cmdline())] += memory.rss - memory.shared
        return dict(found)

    def status(self, patience_s: float = 10.0) -> dict[str, Any]:
        """The operator's status page; asked again while the store does not answer. Raises HTTPStatusError."""
        deadline_s = time.monotonic() + patience_s
        headers = {"Authorization": f"Bearer {self.admin_key}"}
        while True:
            answer = httpx.get(f"{self.url}/wisp/status", headers=headers, timeout=10, trust_env=False)
            if answer.status_code != 503 or time.monotonic() > deadline_s:
                body: dict[str, Any] = answer.raise_for_status().json()
                return body
            time.sleep(0.2)

    def stop(self) -> int:
        """End the service as an operator does; returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        finally:
            self.process.kill()
            self._log.close()


def part_name(command: Sequence[str]) -> str:
    """What a process of a service is, by its command line; Ray's titles change with the method that runs."""
    title = " ".join(command)
    for pattern in _TITLES:
        if found := pattern.search(title):
            return found[1]
    scripts = [word for word in command if word.endswith(".py")]
    return Path([*scripts, *command, "?"][0].split(" ")[0]).name


@contextmanager
def temporary_service(
    make_file: Callable[[Path], dict[str, Any]], model: TinyModelConfig = SMALL_MODEL
) -> Iterator[RunningService]:
    """A service of ``model`` that is ready, and of which nothing is left; ``make_file`` is given its directory."""
    with tempfile.TemporaryDirectory() as scratch:
        write_tiny_model(Path(scratch) / "model", model)
        with RunningService(Path(scratch), make_file(Path(scratch))) as service:
            yield service


def service_file(
    name: str,
    directory: Path,
    model: str,
    replica: dict[str, Any],
    tenants: Sequence[dict[str, Any]],
    **parts: Any,
) -> dict[str, Any]:
    """A service's file: the model of ``directory``, on a free port, with a split that does not move unless told so."""
    return {
        "name": name,
        "state_dir": str(directory / "state"),
        "http": {"port": free_port()},
        "model": {"path": str(directory / "model"), "served_name": model},
        "replica": replica,
        "policy": {"name": "static_split"},
        "tenants": list(tenants),
        **parts,
    }


def tenant(directory: Path, name: str, **terms: float) -> dict[str, Any]:
    """A tenant of a service's file, whose limits refuse nothing but for ``terms``."""
    plenty = {"requests_per_minute": 10_000_000, "tokens_per_minute": 10_000_000_000}
    return {"tenant_id": name, "key_file": str(directory / f"{name}.key"), **plenty, **terms}
