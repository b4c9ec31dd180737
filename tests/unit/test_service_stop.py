"""A start that is interrupted, at whatever moment and however impatiently, leaves nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import psutil
import pytest

from services import app
from services.app import Service
from services.config import HttpSettings, ModelSettings, RedisSettings, ReplicaSettings, ServiceConfig, TenantSettings
from services.free_port import free_port
from services.ingress.listener import handoff_directory
from services.service_file import read_service_file
from wisp_core.errors import ConfigurationError, EngineUnavailableError


class Calls(list[str]):
    """Stands for Ray and Serve: notes what is asked of them, and is interrupted at some of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *interrupted: str) -> None:
        self._interrupted = interrupted
        monkeypatch.setattr(app, "start_ray", lambda _: self.note("start Ray"))
        monkeypatch.setattr(app, "own_processes", dict)  # Other tests of this process may have a Ray of their own.
        monkeypatch.setattr(app, "this_host", lambda: "node:here")
        monkeypatch.setattr(app, "log_directory", lambda: Path("logs"))
        monkeypatch.setattr(Service, "_run_all", lambda _: self.note("deploy"))
        monkeypatch.setattr("ray.is_initialized", lambda: "deploy" in self)
        monkeypatch.setattr("ray.serve.shutdown", lambda: self.note("stop Serve"))
        monkeypatch.setattr("ray.shutdown", lambda: self.note("stop Ray"))

    def note(self, name: str) -> None:
        self.append(name)
        if name in self._interrupted:
            raise KeyboardInterrupt


@pytest.fixture
def config(tmp_path: Path) -> ServiceConfig:
    port = free_port()
    return ServiceConfig(
        state_dir=tmp_path,
        http=HttpSettings(port=port),
        model=ModelSettings(path="models/tiny"),
        replica=ReplicaSettings(vram_budget_bytes=1 << 20),
        tenants=(TenantSettings(tenant_id="a", key_sha256="0" * 64),),
    )


def assert_nothing_is_left(service: Service) -> None:
    port, state_dir = service.config.http.port, service.config.state_dir
    # Other tests of this process may have a Valkey of their own, or leave a child that has ended: it has no words.
    children = [one.as_dict(["cmdline"], ad_value=())["cmdline"] for one in psutil.Process().children(recursive=True)]
    assert not [words for words in children if str(state_dir) in " ".join(words)]
    assert not (state_dir / "valkey" / "valkey.pid").exists()
    assert list(handoff_directory(state_dir).iterdir()) == []
    socket.create_server(("127.0.0.1", port)).close()
    with pytest.raises(ConfigurationError, match="no service runs"):
        read_service_file(state_dir)


@pytest.mark.parametrize(
    ("at", "calls"),
    [
        ("start Ray", ["start Ray", "stop Ray"]),
        ("deploy", ["start Ray", "deploy", "stop Serve", "stop Ray"]),
    ],
)
@pytest.mark.parametrize("again_at", ["", "stop Serve", "stop Ray"])
def test_an_interrupted_start_stops_what_has_been_started(
    config: ServiceConfig, monkeypatch: pytest.MonkeyPatch, at: str, again_at: str, calls: list[str]
) -> None:
    noted = Calls(monkeypatch, at, again_at)
    service = Service(config)
    with pytest.raises(KeyboardInterrupt), service:
        raise AssertionError("it has started")
    assert noted == calls
    assert_nothing_is_left(service)


def test_a_start_that_is_interrupted_before_ray_leaves_ray_alone(
    config: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(_: object) -> None:
        noted.note("ask the store")

    noted = Calls(monkeypatch, "ask the store")
    monkeypatch.setattr(app.StoreAddress, "check", check)
    service = Service(config)
    with pytest.raises(KeyboardInterrupt), service:
        raise AssertionError("it has started")
    assert noted == ["ask the store"]
    assert_nothing_is_left(service)


def test_a_service_stops_in_the_order_of_its_start_reversed(
    config: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Calls(monkeypatch)
    with Service(config) as service:
        assert read_service_file(config.state_dir)["url"] == service.url
        service.publish(upgrade={"id": "x", "error": None})
    assert noted == ["start Ray", "deploy", "stop Serve", "stop Ray"]
    assert_nothing_is_left(service)
    service.stop()
    assert noted[-1:] == ["stop Ray"], "once"
    assert len(noted) == 4


def test_a_start_removes_what_a_killed_service_has_left(config: ServiceConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Calls(monkeypatch, "start Ray")
    left = [config.state_dir / name for name in ("service.json", "upgrade.json")]
    for path in left:
        path.write_text("{}")
    monkeypatch.setattr(app, "start_ray", lambda _: noted.extend(path.name for path in left if path.exists()))
    with Service(config):
        assert noted == ["deploy"], "a stranger may have the pid of before"


def test_what_is_refused_within_a_second_is_refused_before_a_start_is_announced(
    config: ServiceConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = Calls(monkeypatch)
    url = f"redis://127.0.0.1:{free_port()}/0"
    no_redis = config.model_copy(update={"redis": RedisSettings(url=url)})
    with (
        pytest.raises(ConfigurationError, match=r"^redis\.url"),
        Service(no_redis, on_checked=lambda: noted.note("say")),
    ):
        raise AssertionError("it has started")
    with (
        socket.create_server(("127.0.0.1", config.http.port)),
        pytest.raises(ConfigurationError, match=r"http\.port"),
        Service(config, on_checked=lambda: noted.note("say")),
    ):
        raise AssertionError("it has started")
    assert noted == []
    with Service(config, on_checked=lambda: noted.note("say")):
        assert noted == ["say", "start Ray", "deploy"]


@pytest.mark.parametrize("name", ["gcs_server", "raylet"])
def test_a_ray_that_dies_ends_the_service_at_once(
    config: ServiceConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    noted = Calls(monkeypatch)
    process = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(app, "own_processes", lambda: {name: psutil.Process(process.pid)})
    with Service(config) as service:
        service.tend()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # It has ended, and nobody has asked for its code.
        with pytest.raises(EngineUnavailableError, match=rf"^Ray has ended \({name}; logs: logs\)"):
            service.tend()
    process.wait()
    assert noted == ["start Ray", "deploy", "stop Ray"], "Serve would wait for it"
    assert_nothing_is_left(service)
