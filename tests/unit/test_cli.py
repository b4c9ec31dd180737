"""The command line: errors an operator can fix are one message; secrets are private; settings reach their process."""

import json
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from services.config import ModelSettings, ReplicaSettings, ServiceConfig, TenantSettings
from services.environment import replica_environment
from services.replica.deployment import wisp_settings
from services.secret_files import ServiceSecrets, read_or_create, replace_secret, secret_path, tenant_spec, tenant_specs
from wisp_core.errors import ConfigurationError


def wisp(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_bad_file_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("model: {path: m}\nreplica: {vram_budget_bytes: 0}\ntenants: []\n")
    done = wisp("serve", "--config", str(path))
    assert done.returncode == 2
    assert "replica.vram_budget_bytes" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "count"), [(signal.SIGINT, "1 replica"), (signal.SIGTERM, "2 replicas")])
def test_a_start_that_is_interrupted_says_so(tmp_path: Path, number: signal.Signals, count: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    path = tmp_path / "service.yaml"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path.write_text(
        f"state_dir: {tmp_path}/state\nmodel: {{path: {tmp_path}/model}}\nhttp: {{port: {port}}}\n"
        f"replica: {{vram_budget_bytes: 1000, count: {count[0]}}}\n"
        f"tenants: [{{tenant_id: acme, key_file: {tmp_path}/acme.key}}]\n"
    )
    command = [sys.executable, "-m", "services.cli.main", "serve", "--config", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        assert f"starting {count} of" in started.stderr.readline()
        started.send_signal(number)
        rest = started.stderr.read()
        assert (started.wait(30), "interrupted, stopping" in rest) == (130, True)
    assert "Traceback" not in rest


def test_status_without_a_service_says_how_to_start_one(tmp_path: Path) -> None:
    done = wisp("status", "--state-dir", str(tmp_path))
    assert done.returncode == 2
    assert "wisp serve" in done.stderr


@pytest.mark.parametrize("command", ["status", "load"])
def test_a_service_that_is_gone_is_one_message(tmp_path: Path, command: str) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        (tmp_path / "service.json").write_text(json.dumps({"url": url, "model": "m", "key_files": {}}))
        done = wisp(command, "--state-dir", str(tmp_path))
    assert done.returncode == 2
    assert f"{url} does not answer" in done.stderr
    assert "Traceback" not in done.stderr


def test_model_tiny_writes_a_checkpoint_and_refuses_a_bad_shape(tmp_path: Path) -> None:
    shape = ["--experts", "4", "--top-k", "2", "--layers", "1", "--hidden", "64", "--moe-intermediate", "32"]
    assert wisp("model", "tiny", str(tmp_path / "m"), *shape).returncode == 0
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in (tmp_path / "m").iterdir()}
    done = wisp("model", "tiny", str(tmp_path / "n"), "--experts", "4", "--top-k", "8")
    assert done.returncode == 2
    assert "top_k 8" in done.stderr
    assert not (tmp_path / "n").exists()


def test_secrets_are_created_once_and_private(tmp_path: Path) -> None:
    first = ServiceSecrets.load(tmp_path)
    assert ServiceSecrets.load(tmp_path) == first
    assert len({first.admin_key, first.metrics_key, first.cache_salt_key, first.redis_password}) == 4
    for name in ("admin", "metrics", "cache-salt", "redis"):
        path = secret_path(tmp_path, name)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_key_file_that_others_can_read_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "acme.key"
    path.write_text("sk-acme-0123456789\n")
    path.chmod(0o644)
    assert read_or_create(path) == "sk-acme-0123456789"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(path) in caplog.text
    assert "sk-acme" not in caplog.text


def test_a_replaced_secret_is_private_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "keys" / "acme.key"
    for secret in ("first-0123456789", "second-0123456789"):
        replace_secret(path, secret)
        assert read_or_create(path) == secret
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in path.parent.iterdir()] == ["acme.key"]


def test_an_empty_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").touch()
    with pytest.raises(ConfigurationError, match="empty"):
        read_or_create(tmp_path / "key")


def test_a_secret_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("k" * 16)
    assert read_or_create(path) == "k" * 16
    path.write_text("0123456789abcde\n")
    with pytest.raises(
        ConfigurationError, match="holds 15 characters: give a secret of 16 or more, or delete"
    ) as caught:
        read_or_create(path)
    assert "0123" not in str(caught.value)


def test_the_store_gets_the_hash_of_a_key_only(tmp_path: Path) -> None:
    tenant = TenantSettings(tenant_id="acme", key_file=tmp_path / "acme.key")
    spec = tenant_spec(tenant)
    assert spec == tenant_spec(tenant).model_copy(update={"at_s": spec.at_s})
    assert read_or_create(tmp_path / "acme.key") not in spec.model_dump_json()


def test_a_key_file_that_cannot_be_read_is_named_by_its_setting(tmp_path: Path) -> None:
    config = ServiceConfig(
        model=ModelSettings(path="m"),
        replica=ReplicaSettings(vram_budget_bytes=1),
        tenants=(
            TenantSettings(tenant_id="fine", key_file=tmp_path / "fine.key"),
            TenantSettings(tenant_id="bad", key_file=tmp_path / "fine.key" / "bad.key"),
        ),
    )
    with pytest.raises(ConfigurationError, match=r"^tenants\.1\.key_file: .*bad\.key: "):
        tenant_specs(config)


def test_replica_settings_become_the_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    config = ServiceConfig(
        model=ModelSettings(path=str(tmp_path)),
        replica=ReplicaSettings(vram_budget_bytes=1000, initial_cap=7, env={"VLLM_LOGGING_LEVEL": "DEBUG"}),
        tenants=(TenantSettings(tenant_id="acme", key_file=tmp_path / "k"),),
    )
    settings = wisp_settings(config.replica)
    assert (settings.cap, settings.vram_budget_bytes) == (7, 1000)
    environment = replica_environment(config)
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert int(environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]) < 1024
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" not in replica_environment(
        config.model_copy(update={"replica": config.replica.model_copy(update={"num_gpus": 1})})
    )
