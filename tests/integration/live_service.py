"""A whole service, started by ``wisp serve`` as an operator would: two replicas of a tiny model, Valkey, Ray."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import yaml

from wisp_core.model.tiny import TinyModelConfig, write_tiny_model

MODEL = "tiny-test"
MAX_MODEL_LEN = 1024
START_TIMEOUT_S = 240.0


def service_config(directory: Path, port: int) -> dict[str, Any]:
    """The service's file; ``limited`` may send two requests a minute."""
    keys = directory / "keys"
    return {
        "name": "wisp-test",
        "state_dir": str(directory / "state"),
        "http": {"port": port},
        "model": {"path": str(directory / "model"), "served_name": MODEL},
        "replica": {
            "count": 2,
            "vram_budget_bytes": 40 << 20,
            "activation_bytes": 4 << 20,
            "graceful_shutdown_timeout_s": 10,
            "engine": {
                "max_model_len": MAX_MODEL_LEN,
                "max_num_seqs": 16,
                "max_num_batched_tokens": 512,
                "block_size": 32,
                "enable_auto_tool_choice": True,
                "tool_call_parser": "hermes",
                "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
            },
        },
        "tenants": [
            {"tenant_id": "acme", "key_file": str(keys / "acme"), "requests_per_minute": 100_000,
             "tokens_per_minute": 100_000_000},
            {"tenant_id": "limited", "key_file": str(keys / "limited"), "requests_per_minute": 2},
        ],
    }  # fmt: skip


class LiveService:
    """The running service and the processes that it consists of."""

    def __init__(self, directory: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.state_dir = directory / "state"
        self._directory = directory
        config = directory / "service.yaml"
        config.write_text(yaml.safe_dump(service_config(directory, port)))
        self._log = (directory / "serve.log").open("w+")
        command = [sys.executable, "-m", "services.cli.main", "serve", "--config", str(config)]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT)

    def key(self, tenant: str = "acme") -> str:
        """API key of a tenant."""
        return (self._directory / "keys" / tenant).read_text().strip()

    def client(self, tenant: str = "acme", **options: Any) -> openai.OpenAI:
        """The official client; it retries nothing by itself."""
        options = {"api_key": self.key(tenant), "max_retries": 0, "timeout": 120, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Status and body of ``/readyz``."""
        response = httpx.get(f"{self.url}/readyz", timeout=10)
        return response.status_code, response.json()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when every engine serves."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            assert self.process.poll() is None, f"wisp serve ended:\n{self.log()}"
            with contextlib.suppress(httpx.TransportError):
                # Before the ingress is there, Serve's proxy answers by itself.
                if httpx.get(f"{self.url}/readyz", timeout=10).status_code == 200:
                    return
            assert time.monotonic() < deadline_s, f"not ready after {timeout_s} s:\n{self.log()}"
            time.sleep(0.3)

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

    def status(self, patience_s: float = 10.0) -> dict[str, Any]:
        """The operator's status page; asked again while the store is too busy to answer. Raises HTTPStatusError."""
        key = (self.state_dir / "secrets" / "admin.key").read_text().strip()
        deadline_s = time.monotonic() + patience_s
        while True:
            answer = httpx.get(f"{self.url}/wisp/status", headers={"Authorization": f"Bearer {key}"}, timeout=10)
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


def run_live_service(directory: Path, port: int) -> Iterator[LiveService]:
    """Start the service, hand it out, and see that nothing of it is left afterwards."""
    write_tiny_model(directory / "model", TinyModelConfig(layers=2, experts=16, moe_intermediate=128))
    service = LiveService(directory, port)
    parts: list[psutil.Process] = []
    try:
        service.wait_ready()
        yield service
        parts = psutil.Process(service.process.pid).children(recursive=True)
    finally:
        code = service.stop()
    assert code == 0, "wisp serve did not stop cleanly"
    _, alive = psutil.wait_procs(parts, timeout=20)
    assert not alive, f"left behind: {[process.cmdline() for process in alive]}"


def pause(process: psutil.Process) -> None:
    """SIGSTOP."""
    os.kill(process.pid, signal.SIGSTOP)


def resume(process: psutil.Process) -> None:
    """SIGCONT."""
    os.kill(process.pid, signal.SIGCONT)
