"""A service on a Ray cluster that was there before: two hosts, a Redis that both reach, and nothing else of theirs."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import ray.util
from live_service import MODEL, service_config
from valkey_process import ValkeyProcess

from loadtests.service.running import RunningService
from services.embedded_valkey import die_with_parent
from services.free_port import free_port
from wisp_core.tiny_model.tiny import TinyModelConfig, write_tiny_model

WORKER_HOST = "127.0.0.2"
"""Another address of this machine, which Ray takes for another machine."""


class Cluster:
    """One head and one worker node, each with room for one replica."""

    def __init__(self, directory: Path, ray_directory: str) -> None:
        port = free_port()
        self.address = f"{ray.util.get_node_ip_address()}:{port}"
        self.environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        head = ["--head", f"--port={port}", f"--temp-dir={ray_directory}", "--include-dashboard=false"]
        self._nodes = [
            self._start(directory / "head.log", *head),
            self._start(directory / "worker.log", f"--address={self.address}", f"--node-ip-address={WORKER_HOST}"),
        ]

    def _start(self, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
        command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats"]
        size = ["--num-cpus=2", "--num-gpus=0", "--object-store-memory=100000000"]
        with log.open("wb") as output:
            node = subprocess.Popen(
                [*command, *size, *arguments],
                env={**os.environ, **self.environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=die_with_parent,
            )
        deadline_s = time.monotonic() + 60
        while "Ray runtime started" not in log.read_text():
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.1)
        return node

    def processes(self, title: str) -> list[list[psutil.Process]]:
        """Processes whose title contains ``title``, for each node."""
        return [
            [one for one in psutil.Process(node.pid).children(recursive=True) if title in " ".join(one.cmdline())]
            for node in self._nodes
        ]

    def stop(self) -> None:
        """End all of it."""
        parts = [one for node in self._nodes for one in psutil.Process(node.pid).children(recursive=True)]
        for node in reversed(self._nodes):
            node.terminate()
        for node in self._nodes:
            node.wait(30)
        for one in psutil.wait_procs(parts, timeout=20)[1]:
            one.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Not pytest's directory, whose path is too long for Ray's sockets, and not Ray's own, where it would leave the
    # address that any later ``ray.init()`` joins.
    with tempfile.TemporaryDirectory(prefix="ray") as ray_directory:
        started = Cluster(tmp_path_factory.mktemp("cluster"), ray_directory)
        yield started
        started.stop()


def configured(directory: Path, **changed: Any) -> dict[str, Any]:
    write_tiny_model(directory / "model", TinyModelConfig(layers=2, experts=16, moe_intermediate=128))
    return {**service_config(directory, free_port()), **changed}


def joined(directory: Path, config: dict[str, Any], cluster: Cluster) -> RunningService:
    return RunningService(directory, config, cluster.environment | {"RAY_ADDRESS": cluster.address})


def test_replicas_spread_over_the_hosts_of_a_cluster_that_outlives_them(
    cluster: Cluster, tmp_path: Path, valkey: ValkeyProcess
) -> None:
    url = f"redis://:{valkey.password}@127.0.0.1:{valkey.port}/0"
    service = joined(tmp_path, configured(tmp_path, redis={"url": url}), cluster)
    try:
        service.wait_ready()
        assert [len(found) for found in cluster.processes("ServeReplica:wisp-test:Replica")] == [1, 1]
        with openai.OpenAI(
            base_url=f"{service.url}/v1", api_key=service.key("acme"), max_retries=0, timeout=60
        ) as client:
            for turn in range(4):
                answer = client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": f"turn {turn}"}],
                    max_tokens=4,
                    user=f"user-{turn}",
                )
                assert answer.usage is not None
                assert answer.usage.completion_tokens == 4
    finally:
        code = service.stop()
    assert code == 0
    assert cluster.processes("ServeReplica") == [[], []]
    assert cluster.processes("raylet") != [[], []]


def test_hosts_that_no_embedded_valkey_serves_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    service = joined(tmp_path, configured(tmp_path), cluster)
    try:
        assert service.process.wait(120) == 2
        assert "redis.url: the 2 hosts of the Ray cluster" in service.log()
    finally:
        service.stop()
