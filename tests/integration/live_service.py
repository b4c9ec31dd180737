"""A whole service, started by ``wisp serve`` as an operator would: two replicas of a tiny model, Valkey, Ray."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil

from loadtests.service.running import RunningService
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

MODEL = "tiny-test"
MAX_MODEL_LEN = 1024


def service_config(directory: Path, port: int) -> dict[str, Any]:
    """The service's file; ``limited`` may send two requests a minute, ``other`` is a stranger to ``acme``."""
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
             "tokens_per_minute": 100_000_000, "max_concurrent_turns": 1000},
            {"tenant_id": "other", "key_file": str(keys / "other"), "requests_per_minute": 100_000},
            {"tenant_id": "limited", "key_file": str(keys / "limited"), "requests_per_minute": 2},
        ],
    }  # fmt: skip


class LiveService(RunningService):
    """The running service, with an official client."""

    def __init__(self, directory: Path, port: int) -> None:
        super().__init__(directory, service_config(directory, port))

    def key(self, tenant: str = "acme") -> str:
        """API key of a tenant."""
        return super().key(tenant)

    def client(self, tenant: str = "acme", **options: Any) -> openai.OpenAI:
        """The official client; it retries nothing by itself."""
        options = {"api_key": self.key(tenant), "max_retries": 0, "timeout": 120, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)


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
