"""An upgrade takes new engines only for what an engine is told at its start, and only where Ray has room."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import yaml
from ray import serve
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState
from ray.serve._private.common import DeploymentID
from ray.serve._private.deployment_info import DeploymentInfo

from services.app import Service, reason_in
from services.cli.serve import load_config
from services.cli.upgrade import Upgrades, request_upgrade
from services.config import ReplicaSettings, ServiceConfig
from services.preflight import own_state_dir
from services.ray_cluster import needed_cpus, ray_cpus
from services.replica.code_version import digest_of, sources
from services.replica.deployment import CHANGED_IN_PLACE, build_replica
from services.service_file import read_service_file, remove_service_file
from services.store_address import StoreAddress
from wisp_core.errors import ConfigurationError, EngineUnavailableError


def config(tmp_path: Path, replica: dict[str, Any] | None = None, **sections: Any) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "state_dir": str(tmp_path),
            "model": {"path": "m"},
            "replica": {"vram_budget_bytes": 1000, **(replica or {})},
            "tenants": [{"tenant_id": "a", "key_sha256": "0" * 64}],
            **sections,
        }
    )


def deployed(config: ServiceConfig, code: str = "0") -> serve.Deployment:
    replica = build_replica(
        config,
        StoreAddress(url="redis://localhost:1/0", service="s"),
        name="Replica",
        count=config.replica.count,
        code=code,
        request_router_class="services.ingress.router.WispRouter",
        request_router_kwargs={},
    )
    return replica._bound_deployment


def version_of(config: ServiceConfig, code: str = "0") -> str | None:
    version: str | None = deployed(config, code).version
    return version


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
@pytest.mark.parametrize(
    "changed",
    [
        {"replica": {"count": 3, "max_ongoing_turns": 5, "graceful_shutdown_timeout_s": 7.0}},
        {"replica": {"autoscaling": {"max_count": 4}}},
        {"tenants": [{"tenant_id": "b", "key_sha256": "1" * 64, "weight": 3.0}]},
        {"policy": {"name": "static_split"}, "routing": {"migrate_gain_s": 2.0}, "http": {"num_ingresses": 2}},
    ],
)
def test_engines_go_on_when_nothing_of_theirs_changes(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert version_of(config(tmp_path, **changed)) == version_of(config(tmp_path))


@pytest.mark.parametrize(
    "changed",
    [
        {"replica": {"engine": {"max_model_len": 512}}},
        {"replica": {"vram_budget_bytes": 1001}},
        {"replica": {"window_s": 5.0}},
        {"model": {"path": "other"}},
        {"model": {"path": "m", "served_name": "other"}},
    ],
)
def test_what_an_engine_is_told_takes_new_ones(tmp_path: Path, changed: dict[str, Any]) -> None:
    assert version_of(config(tmp_path, **changed)) != version_of(config(tmp_path))


def test_new_code_takes_new_engines(tmp_path: Path) -> None:
    assert version_of(config(tmp_path), code="1") != version_of(config(tmp_path))


@pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")
def test_replicas_that_autoscaling_has_started_stay_in_an_upgrade(tmp_path: Path) -> None:
    def info(count: int, max_turns: int, code: str) -> DeploymentInfo:
        settings = {"count": count, "max_ongoing_turns": max_turns, "autoscaling": {"max_count": 8}}
        replicas = deployed(config(tmp_path, settings), code)
        return DeploymentInfo(
            deployment_config=replicas._deployment_config,
            replica_config=replicas._replica_config,
            start_time_ms=0,
            deployer_job_id="",
            version=replicas.version,
        )

    serve_s = DeploymentAutoscalingState(DeploymentID("Replica", "wisp"))
    assert serve_s.register(info(2, 64, "0"), 0) == 2
    assert serve_s.register(info(2, 65, "0"), 6) == 6
    assert serve_s.register(info(2, 65, "1"), 6) == 6
    assert serve_s.register(info(7, 65, "1"), 6) == 7


def test_edited_added_and_renamed_source_is_new_code(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    seen = [digest_of(tmp_path.glob("*.py"))]
    assert digest_of(tmp_path.glob("*.py")) == seen[0]
    (tmp_path / "a.py").write_text("x = 2\n")
    seen.append(digest_of(tmp_path.glob("*.py")))
    (tmp_path / "b.py").write_text("")
    seen.append(digest_of(tmp_path.glob("*.py")))
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    seen.append(digest_of(tmp_path.glob("*.py")))
    assert len(set(seen)) == len(seen)


def test_replicas_import_nothing_else_of_wisp() -> None:
    script = """import services.replica.deployment, sys
print(*(m.__file__ for n, m in sys.modules.items() if n.split(".")[0] in ("services", "policies") and m.__file__))"""
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert len(loaded) > 10
    assert {Path(path) for path in loaded} <= set(sources())


def test_no_replica_is_told_a_setting_that_changes_in_place(tmp_path: Path) -> None:
    _, replica, _ = deployed(config(tmp_path)).init_args
    assert replica["vram_budget_bytes"] == 1000
    assert not CHANGED_IN_PLACE & replica.keys()
    assert set(ReplicaSettings.model_fields) == CHANGED_IN_PLACE | replica.keys()


def test_replicas_that_ray_has_no_room_for_are_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = config(tmp_path)
    service = Service(running)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": float(needed_cpus(running) + 1)})
    taken: list[ServiceConfig] = []
    monkeypatch.setattr(Service, "_deploy", lambda _, config, *more: taken.append(config))
    service.upgrade(config(tmp_path, replica={"count": 3}))
    with pytest.raises(ConfigurationError, match=r"replica\.count: 4 replicas need 4\.4 CPUs, Ray has 3\.4"):
        service.upgrade(config(tmp_path, replica={"count": 4}))
    with pytest.raises(ConfigurationError, match=r"need 2 GPUs, Ray has 0;.*num_gpus: 0\.5"):
        service.upgrade(config(tmp_path, replica={"num_gpus": 1.0}))
    assert [one.replica.count for one in taken] == [3]


def test_what_cannot_change_is_named_before_anything_changes(tmp_path: Path) -> None:
    service = Service(config(tmp_path))
    other = config(tmp_path, name="other", http={"port": 8001, "num_ingresses": 2})
    with pytest.raises(ConfigurationError, match=r"^name, http\.port: cannot change while"):
        service.upgrade(other)


def test_a_policy_that_only_the_upgrade_s_own_process_can_load_is_refused_before_anything_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, deployed = Service(config(tmp_path)), list[ServiceConfig]()
    monkeypatch.setattr(Service, "_deploy", lambda _, config, *more: deployed.append(config))
    with pytest.raises(ConfigurationError, match=r"on PYTHONPATH, here that of the running service: start it again"):
        service.upgrade(config(tmp_path, policy={"name": "policy_of_mine:Policy"}))
    assert not deployed


@pytest.mark.parametrize("url", [None, "redis://h:6379/0", "redis://:other@h:6379/0", "redis://:secret@i:6379/0"])
def test_a_refused_upgrade_leaves_the_store_s_password(tmp_path: Path, url: str | None) -> None:
    service = Service(config(tmp_path, redis={"url": "redis://:secret@h:6379/0"}))
    with pytest.raises(ConfigurationError, match=r"^redis.*cannot change while"):
        service.upgrade(config(tmp_path, redis={"url": url}))
    assert service._store_address.password_file is not None
    assert service._store_address.password_file.read_text().strip() == "secret"


def test_a_service_that_takes_no_upgrade_is_not_sent_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = config(tmp_path, model={"path": "some/model"})
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(running.model_dump(mode="json", exclude_unset=True)))
    signalled = list[int]()
    monkeypatch.setattr("services.cli.upgrade.check_settings", lambda _: None)
    monkeypatch.setattr("os.kill", lambda pid, _: signalled.append(pid))
    with own_state_dir(tmp_path):
        service = Service(running)
        service.publish()
        with pytest.raises(ConfigurationError, match="takes no upgrade: it belongs to a demo"):
            request_upgrade(file)
    assert not signalled


def test_a_second_upgrade_meanwhile_is_refused_by_name_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = config(tmp_path, model={"path": "some/model"})
    files = [tmp_path / "first.yaml", tmp_path / "second.yaml"]
    for file in files:
        file.write_text(yaml.safe_dump(running.model_dump(mode="json", exclude_unset=True)))
    ordered = list[str]()

    def carry_out(*_: object) -> None:
        order = json.loads((tmp_path / "upgrade.json").read_text())
        ordered.append(order["config"])
        if len(ordered) == 1:
            with pytest.raises(ConfigurationError, match=rf"another upgrade runs, to {files[0]} \(pid {os.getpid()}\)"):
                request_upgrade(files[1])
        service.publish(upgrade={"id": order["id"], "error": None})

    monkeypatch.setattr("services.cli.upgrade.check_settings", lambda _: None)
    monkeypatch.setattr("os.kill", carry_out)
    with own_state_dir(tmp_path):
        service = Service(running)
        service.publish(upgrade={})
        for file in files:
            request_upgrade(file)
    assert ordered == [str(file) for file in files], "one after the other both are taken"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "service.yaml"
    running = config(tmp_path, model={"path": "some/model"})
    file.write_text(yaml.safe_dump(running.model_dump(mode="json", exclude_unset=True)))
    monkeypatch.setattr("services.cli.upgrade.check_settings", lambda _: None)
    return file


def test_an_upgrade_ends_at_once_when_the_service_was_killed(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as ownership:
        ownership.enter_context(own_state_dir(tmp_path))
        Service(ServiceConfig.load(file)).publish(upgrade={})
        monkeypatch.setattr("os.kill", lambda *_: ownership.close())
        with pytest.raises(ConfigurationError, match="has ended before it was upgraded"):
            request_upgrade(file)


def test_whoever_waits_no_longer_is_told_that_the_upgrade_goes_on_and_the_next_one_is_refused(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with own_state_dir(tmp_path):
        service = Service(ServiceConfig.load(file))
        service.publish(upgrade={})

        def interrupt(*_: object) -> None:
            service.publish(upgrade={"to": "first.yaml"})
            raise KeyboardInterrupt

        monkeypatch.setattr("os.kill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            request_upgrade(file)
        assert "the service goes on with the upgrade" in capsys.readouterr().err
        with pytest.raises(ConfigurationError, match=r"another upgrade runs, to first\.yaml"):
            request_upgrade(file)


def test_a_running_upgrade_is_published_by_the_service(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, published = Service(ServiceConfig.load(file)), list[Any]()
    monkeypatch.setattr(service, "upgrade", lambda _: published.append(read_service_file(tmp_path)["upgrade"]))
    on_hangup = signal.getsignal(signal.SIGHUP)
    upgrades = Upgrades(service, ServiceConfig.load)
    signal.signal(signal.SIGHUP, on_hangup)
    (tmp_path / "upgrade.json").write_text(json.dumps({"id": "1", "config": str(file)}))
    upgrades._carry_out()
    assert published == [{"to": str(file)}]
    assert read_service_file(tmp_path)["upgrade"] == {"id": "1", "error": None}


def test_a_service_that_stops_ends_its_upgrade_before_it_ends_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, deployed = Service(config(tmp_path)), list[str]()
    is_deploying, may_go_on, ray_ended = threading.Event(), threading.Event(), threading.Event()

    def run(_: object, name: str, **__: object) -> None:
        deployed.append(name)
        is_deploying.set()
        assert may_go_on.wait(10)
        assert not ray_ended.is_set(), "Serve would start another Ray"
        raise RuntimeError("the controller has gone")

    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 100.0})
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(serve, "status", lambda: deployed.append("asked why"))
    service._stops.callback(ray_ended.set)
    service._stops.callback(service._await_upgrade)
    service._stops.callback(threading.Timer(0.2, may_go_on.set).start)
    on_hangup = signal.getsignal(signal.SIGHUP)
    upgrades = Upgrades(service, ServiceConfig.load)
    signal.signal(signal.SIGHUP, on_hangup)
    file = tmp_path / "service.yaml"
    file.write_text(yaml.safe_dump(config(tmp_path, replica={"count": 3}).model_dump(mode="json", exclude_unset=True)))
    (tmp_path / "upgrade.json").write_text(json.dumps({"id": "1", "config": str(file)}))
    upgrades._is_asked.set()
    upgrades.look()
    assert is_deploying.wait(10)
    remove_service_file(tmp_path)
    service.stop()
    assert ray_ended.is_set()
    assert upgrades._thread is not None
    upgrades._thread.join()
    assert deployed == ["wisp-policy"], "neither the rest of it nor the old settings"
    with pytest.raises(ConfigurationError, match="no service runs"):
        read_service_file(tmp_path)


def test_the_redis_of_the_command_line_stays_in_an_upgrade(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, url = tmp_path / "service.yaml", "redis://:secret@h:6379/0"
    file.write_text(yaml.safe_dump(config(tmp_path, replica={"count": 3}).model_dump(mode="json", exclude_unset=True)))
    service, deployed = Service(load_config(file, url)), list[ServiceConfig]()
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 100.0})
    monkeypatch.setattr(Service, "_deploy", lambda _, config, *more: deployed.append(config))
    on_hangup = signal.getsignal(signal.SIGHUP)
    upgrades = Upgrades(service, partial(load_config, redis_url=url))
    (tmp_path / "upgrade.json").write_text(json.dumps({"id": "1", "config": str(file)}))
    signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, on_hangup)
    upgrades.look()
    assert upgrades._thread is not None
    upgrades._thread.join()
    assert read_service_file(tmp_path)["upgrade"] == {"id": "1", "error": None}
    assert [one.redis.url for one in deployed] == ["redis://h:6379/0"]


def test_code_that_the_serving_process_runs_itself_takes_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = iter(["old", "new"])
    monkeypatch.setattr("services.app.driver_code", lambda: next(versions))
    service = Service(config(tmp_path))
    with pytest.raises(ConfigurationError, match="code of `wisp serve` itself has changed: stop the service and start"):
        service.upgrade(config(tmp_path))


@pytest.mark.parametrize("error", [EngineUnavailableError("not ready"), RuntimeError("not ready")])
def test_if_the_new_parts_do_not_start_the_old_ones_are_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    codes = iter(["old", "new"])
    monkeypatch.setattr("services.app.code_version", lambda: next(codes))
    service, deployed, began_s = Service(config(tmp_path)), list[tuple[int, str]](), list[float]()
    service._began_s = 100.0
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 100.0})

    def deploy(_: Service, config: ServiceConfig, code: str, at_s: float) -> None:
        deployed.append((config.replica.count, code))
        began_s.append(at_s)
        if config.replica.count == 3:
            raise error

    monkeypatch.setattr(Service, "_deploy", deploy)
    with pytest.raises(type(error), match="not ready"):
        service.upgrade(config(tmp_path, replica={"count": 3}))
    # With the old code's name: what Serve has not replaced yet stays.
    assert deployed == [(3, "new"), (2, "old")]
    assert began_s[0] > 100.0
    assert began_s[1] == 100.0, "limits that an operator has set since stay"


def test_a_running_service_has_room_for_one_replica_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.ray_cluster.os", SimpleNamespace(cpu_count=lambda: 1))
    assert ray_cpus(config(tmp_path)) >= needed_cpus(config(tmp_path, replica={"count": 3}))
    scaled = config(tmp_path, replica={"autoscaling": {"max_count": 5}})
    assert needed_cpus(scaled) == needed_cpus(config(tmp_path, replica={"count": 5}))


def test_of_a_failed_start_the_operator_is_told_what_to_mend() -> None:
    traceback = """The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:faults:Replica.initialize_and_get_metadata()
    raise ConfigurationError(f"the engine did not start: {error}") from error
wisp_core.errors.ConfigurationError: the engine did not start: 1 validation error for SchedulerConfig
  Value error, max_num_batched_tokens (8) must be at least max_num_seqs (16). [type=value_error, input_value=A()]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""
    assert reason_in(traceback) == (
        "the engine did not start:\n  replica.engine: max_num_batched_tokens (8) must be at least max_num_seqs (16)."
    )
    of_fields = """wisp_core.errors.ConfigurationError: no start: 2 validation errors for SchedulerConfig
max_num_seqs
  Input should be a valid integer [type=int_parsing, input_value='many', input_type=str]
    For further information visit https://errors.pydantic.dev/2.14/v/int_parsing
watermark
  Input should be a valid number [type=float_parsing, input_value='x', input_type=str]
    For further information visit https://errors.pydantic.dev/2.14/v/float_parsing
"""
    assert reason_in(of_fields) == (
        "no start:\n  replica.engine.max_num_seqs: Input should be a valid integer\n"
        "  replica.engine.watermark: Input should be a valid number"
    )
    of_vllm = """The deployment failed to start 1 times in a row. Error:
ray::ServeReplica:faults:Replica.initialize_and_get_metadata() (pid=1, ip=127.0.0.1)
  File "/site-packages/vllm/parser.py", line 42, in get_parser
    return cls.known[name]
           ~~~~~~~~~^^^^^^
KeyError: 'nosuch'

The above exception was the direct cause of the following exception:

  File "/site-packages/vllm/parser.py", line 43, in get_parser
    raise TypeError(text) from error
TypeError: the tool parser 'nosuch'
has not been registered
"""
    assert reason_in(of_vllm) == "TypeError: the tool parser 'nosuch'\nhas not been registered"
    assert reason_in("wisp_core.errors.ConfigurationError: engine arguments: a: odd") == "replica.engine: a: odd"
    assert reason_in(" A replica failed to start: No module named 'x'. ") == (
        "A replica failed to start: No module named 'x'."
    )
