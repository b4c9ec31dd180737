"""What cannot start is refused at once, and a second service never touches the first one's state directory."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.config import HttpSettings, ModelSettings, PolicySettings, RoutingSettings, ServiceConfig
from services.ingress.listener import Listener
from services.preflight import (
    check_host,
    check_host_store,
    check_memory,
    check_model,
    check_policy,
    own_state_dir,
    warnings_of,
)
from services.service_file import is_owned, read_service_file
from wisp_core.errors import ConfigurationError

CONFIG = """
state_dir: {directory}/state
http: {{port: {port}}}
model: {{path: {directory}/model}}
replica: {{vram_budget_bytes: 1000}}
tenants: [{{tenant_id: acme, key_file: {directory}/acme.key}}]
"""


def serve(directory: Path, port: int, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "model").mkdir(exist_ok=True)
    (directory / "model" / "config.json").write_text("{}")
    (directory / "service.yaml").write_text(CONFIG.format(directory=directory, port=port))
    command = [sys.executable, "-m", "services.cli.main", "serve", "--config", str(directory / "service.yaml")]
    command += options
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_second_service_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    with own_state_dir(state_dir):
        (state_dir / "service.json").write_text("{}")
        done = serve(tmp_path, 8000)
        assert (state_dir / "service.json").exists()
    assert done.returncode == 2
    assert "starting" not in done.stderr
    assert "another service runs there" in done.stderr
    assert "Traceback" not in done.stderr
    with own_state_dir(state_dir):
        pass


def test_an_upgrade_of_a_service_that_was_killed_signals_nobody(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    assert not is_owned(state_dir)
    state_dir.mkdir()
    with subprocess.Popen(["sleep", "60"]) as bystander:
        (state_dir / "service.json").write_text(json.dumps({"pid": bystander.pid}))
        done = serve(tmp_path, 8000, "--upgrade")
        assert bystander.poll() is None
        bystander.terminate()
    assert (done.returncode, "no service runs" in done.stderr) == (2, True)
    with own_state_dir(state_dir):
        assert is_owned(state_dir)
    assert not is_owned(state_dir)


def test_a_service_that_starts_is_not_said_to_be_absent(tmp_path: Path) -> None:
    with own_state_dir(tmp_path), pytest.raises(ConfigurationError, match="is starting"):
        read_service_file(tmp_path)
    with pytest.raises(ConfigurationError, match="start one with `wisp serve`"):
        read_service_file(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="start one with `wisp serve`"):
        read_service_file(tmp_path / "file")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve(tmp_path, port)
    assert done.returncode == 2
    assert f"http.port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_of_another_machine_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"http\.host 203\.0\.113\.1"):
        Listener(HttpSettings(host="203.0.113.1", port=8000), tmp_path)


def test_a_state_dir_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="state_dir"), own_state_dir(tmp_path / "file" / "state"):
        pass


@pytest.mark.parametrize("path", ["/absent/model", "./absent", ".wisp/absent/model", "a/b/c"])
def test_a_missing_checkpoint_is_named_with_the_fix(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"model\.path.*wisp model tiny"):
        check_model(ModelSettings(path=path))


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("nope", {}, r"policy\.name.*unknown.*mv_wsa"),
        ("no.such:Policy", {}, r"policy\.name.*no"),
        ("mv_wsa", {"colour": "red"}, r"policy\.settings.*colour"),
    ],
)
def test_a_policy_that_cannot_load_is_named(name: str, settings: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        check_policy(PolicySettings(name=name, settings=settings))


def test_a_policy_that_loads_leaves_no_process_behind() -> None:
    # Other tests' servers may run in this session, and start processes of their own: only children that are new count.
    before = set(psutil.Process().children())
    check_policy(PolicySettings())
    assert set(psutil.Process().children()) <= before


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        check_model(ModelSettings(path=str(tmp_path)))


@pytest.mark.parametrize("name", ["allenai/OLMoE-1B-7B-0924", "gpt2"])
def test_names_on_the_hub_are_left_to_vllm(name: str) -> None:
    check_model(ModelSettings(path=name))


GB = 10**9


def config_of(**replica: object) -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "model": {"path": "m"},
            "replica": {"vram_budget_bytes": GB, **replica},
            "tenants": [{"tenant_id": "a", "key_sha256": "0" * 64}],
        }
    )


@pytest.mark.parametrize(
    ("replica", "most"),
    [
        ({"vram_budget_bytes": 6 * GB}, 14),
        ({"vram_budget_bytes": 6 * GB, "kv_host_bytes": 3 * GB}, 9),
        ({"vram_budget_bytes": 80 * GB, "num_gpus": 1}, 93),
    ],
)
def test_more_replicas_than_the_host_holds_are_refused_with_the_number_that_it_does(
    replica: dict[str, int], most: int
) -> None:
    check_memory(config_of(count=most, **replica), 100 * GB)
    for too_many in ({"count": 5000}, {"autoscaling": {"max_count": most + 1}}):
        with pytest.raises(ConfigurationError, match=rf"replica\.count: .* this host has 100\.0: give {most} or fewer"):
            check_memory(config_of(**replica, **too_many), 100 * GB)


def test_a_host_store_is_in_memory_and_can_be_written(tmp_path: Path) -> None:
    check_host_store(Path("/dev/shm"))
    check_host_store(Path("/dev/shm/wisp-that-a-replica-makes"))
    with pytest.raises(ConfigurationError, match=r"replica\.host_store_dir /nonexistent/a: no such directory; give"):
        check_host_store(Path("/nonexistent/a"))
    with pytest.raises(ConfigurationError, match="no such directory"):
        check_host_store(Path("/proc/self/status"))
    with pytest.raises(ConfigurationError, match=r"lies on proc, no memory file system|not writable"):
        check_host_store(Path("/proc/self"))


def test_what_another_host_has_is_not_judged_by_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    too_much = config_of(count=5000, host_store_dir="/nonexistent/a")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigurationError, match=r"replica\.count"):
        check_host(too_much)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    check_host(too_much)


def test_more_turns_than_a_tenant_s_replicas_take_are_warned_of() -> None:
    tenant = {"tenant_id": "a", "key_sha256": "0" * 64}
    shared = config_of(count=2, max_ongoing_turns=64).model_dump(mode="json", exclude_unset=True)

    def told(**limits: object) -> list[str]:
        return warnings_of(ServiceConfig.model_validate({**shared, "tenants": [{**tenant, **limits}]}))

    assert told() == told(max_concurrent_turns=128) == []
    assert [line.partition(": ")[0] for line in told(max_concurrent_turns=129)] == ["tenants.0.max_concurrent_turns"]
    assert "on each of 1 replicas" in told(max_concurrent_turns=65, isolation="dedicated")[0]


def test_settings_that_others_make_useless_are_warned_of() -> None:
    def told(router: str, barrier: str) -> list[str]:
        config = config_of(barrier=barrier, drain_timeout_s=5.0)
        routing = RoutingSettings.model_validate({"router": router, "migrate_gain_s": 1.0, "refresh_s": 1.0})
        return [line.partition(":")[0] for line in warnings_of(config.model_copy(update={"routing": routing}))]

    assert told("working_set", "drained") == []
    assert told("power_of_two", "balloon") == [
        "routing.migrate_gain_s",
        "routing.refresh_s",
        "replica.drain_timeout_s",
    ]
