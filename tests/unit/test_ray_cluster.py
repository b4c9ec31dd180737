"""A service starts or joins Ray only where that can work, and says nothing that is no news."""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.exceptions import RayActorError

from services.config import ModelSettings, ReplicaSettings, ServiceConfig, TenantSettings
from services.ray_cluster import WithoutShutdownNoise, check_cluster, start_ray, stop_serve
from wisp_core.errors import ConfigurationError


def test_a_ray_address_where_nobody_listens_is_refused_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_cluster(f"127.0.0.1:{port}")
        check_cluster(f"ray://127.0.0.1:{port}")
    for address in (f"127.0.0.1:{port}", f"ray://127.0.0.1:{port}"):
        with pytest.raises(
            ConfigurationError, match=f"RAY_ADDRESS {address}: no Ray there .*refused.*unset RAY_ADDRESS"
        ):
            check_cluster(address)


@pytest.mark.parametrize("address", ["head", "head:ray", "head:99999", ":6379", "ray://head"])
def test_a_ray_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match=f"RAY_ADDRESS {address}: give HOST:PORT"):
        check_cluster(address)


def test_a_start_that_ends_before_serve_s_keeps_serve_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("ray.serve")
    monkeypatch.setattr(logger, "level", logging.INFO)
    monkeypatch.setenv("RAY_ADDRESS", "head")
    with pytest.raises(ConfigurationError):
        start_ray(ServiceConfig.model_construct())
    assert not logger.isEnabledFor(logging.INFO)


def test_signals_end_a_start_that_waits_for_what_is_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped_by() -> list[object]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    before, meanwhile = stopped_by(), list[object]()

    def init(**_: object) -> None:
        meanwhile.extend(stopped_by())
        raise ConnectionError("no Ray")

    monkeypatch.setattr(ray, "init", init)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(ConfigurationError, match=r"RAY_ADDRESS .*: no Ray"):
            start_ray(ServiceConfig.model_construct())
    assert meanwhile == [signal.SIG_DFL, signal.SIG_DFL]
    assert stopped_by() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_ray_has_started(monkeypatch: pytest.MonkeyPatch, number: signal.Signals) -> None:
    has_started = False

    def init(**_: object) -> None:
        nonlocal has_started
        signal.raise_signal(number)
        # What Ray does with the one, and what must not outlive its start.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        has_started = True

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    config = ServiceConfig(
        model=ModelSettings(path="models/tiny"),
        replica=ReplicaSettings(vram_budget_bytes=1 << 20),
        tenants=(TenantSettings(tenant_id="a", key_sha256="0" * 64),),
    )
    before = {one: signal.signal(one, interrupt) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(KeyboardInterrupt):
            start_ray(config)
        assert [signal.getsignal(one) for one in before] == [interrupt, interrupt]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    assert has_started


PARTS = """
import os, subprocess, sys, time
from services.ray_cluster import ended, own_processes

SLEEP = ["-c", "import time; time.sleep(60)"]
started = [subprocess.Popen([f"{sys.argv[1]}/{name}", *SLEEP]) for name in ("gcs_server", "raylet", "other")]
own = own_processes()
until_s = time.monotonic() + 10
while len(own) < 2 and time.monotonic() < until_s:  # a child has its name a moment later
    own = own_processes()
print(sorted(own), ended(own))
started[0].kill()
os.waitid(os.P_PID, started[0].pid, os.WEXITED | os.WNOWAIT)
print(ended(own), sorted(own_processes()))
started[1].kill()
started[1].wait()
print(ended(own), sorted(own_processes()))
started[2].kill()
"""


def test_the_parts_of_one_s_own_ray_are_known_and_noticed_when_they_end(tmp_path: Path) -> None:
    for name in ("gcs_server", "raylet", "other"):
        (tmp_path / name).symlink_to(sys.executable)
    # In a process of its own: other tests of this one may have a Ray.
    done = subprocess.run([sys.executable, "-c", PARTS, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "['gcs_server', 'raylet'] []",
        "['gcs_server'] ['raylet']",
        "['gcs_server', 'raylet'] []",
    ]


def test_what_serve_says_of_its_end_keeps_ray_from_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RayActorError

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.serve.shutdown", fail)
    stop_serve()
    assert "Serve did not stop" in caplog.text


def test_a_cluster_that_ray_finds_is_left_to_ray() -> None:
    check_cluster("auto")


def test_only_ray_s_false_alarm_is_kept_from_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stream = WithoutShutdownNoise(sys.stdout)
    print("(raylet) Task ServeController.graceful_shutdown failed. There are infinite retries", file=stream)
    stream.write("(raylet) Task ServeController.listen_for_change failed. There are infinite retries\n")
    print("(raylet) something else failed", file=stream)
    print(file=stream)
    stream.flush()
    assert capsys.readouterr().out == "(raylet) something else failed\n\n"
