"""The service's file: the shipped ones load, every error comes at once, unknown keys are refused."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from services.cli.serve import load_config
from services.config import ServiceConfig
from wisp_core.errors import ConfigurationError

FILES = sorted((Path(__file__).parents[2] / "infra" / "serve").glob("*.yaml"))
MINIMAL = """
model: {path: m}
replica: {vram_budget_bytes: 1000}
tenants: [{tenant_id: acme, key_file: k}]
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "service.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    config = ServiceConfig.load(path)
    assert config.replica.count >= 1
    assert ServiceConfig.model_validate(config.model_dump(mode="json")) == config


def test_defaults_need_only_model_budget_and_tenant(tmp_path: Path) -> None:
    config = ServiceConfig.load(write(tmp_path, MINIMAL))
    assert config.policy.name == "mv_wsa"
    assert config.redis.url is None
    assert config.http.host == "127.0.0.1"


def test_every_error_is_told_at_once(tmp_path: Path) -> None:
    text = MINIMAL.replace("1000", "-1").replace("acme", "Acme Inc") + "http: {port: 70000}\ncolour: red\n"
    with pytest.raises(ConfigurationError) as caught:
        ServiceConfig.load(write(tmp_path, text))
    for name in ("replica.vram_budget_bytes", "tenants.0.tenant_id", "http.port", "colour"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("1000", "-1", "replica.vram_budget_bytes: must be above 0, not -1 (Everything a replica may hold"),
        ("1000", "24 GB", "replica.vram_budget_bytes: takes a whole number (Everything"),
        ("vram_budget_bytes", "vram_budget", "replica.vram_budget: no such setting; did you mean vram_budget_bytes?"),
        ("model: {path: m}", "", "model: is needed"),
        ("{path: m}", "m", "model: takes settings of its own, NAME: VALUE"),
        ("key_file: k", "key_sha256: sk-my-key", "tenants.0.key_sha256: must match ^[0-9a-f]{64}$ (SHA-256 of the key"),
        ("1000", "1000, barrier: now", "replica.barrier: takes one of 'balloon', 'drained' (When KV blocks may"),
        ("1000", "1000, autoscaling: {max_count: 1}", "replica.autoscaling.max_count: must be above 1, not 1 (Most"),
        ("[{tenant_id: acme, key_file: k}]", "[]", "tenants: needs at least 1"),
    ],
)
def test_an_error_names_the_setting_and_the_fix(tmp_path: Path, old: str, new: str, line: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        ServiceConfig.load(write(tmp_path, MINIMAL.replace(old, new)))
    assert f"\n  {line}" in str(caught.value)
    assert "sk-my-key" not in str(caught.value)
    assert "Input should" not in str(caught.value)


@pytest.mark.parametrize("key", ["key_sha256: abc, key_file: k", ""])
def test_a_tenant_has_exactly_one_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigurationError):
        ServiceConfig.load(write(tmp_path, MINIMAL.replace("key_file: k", key).replace(", }", "}")))


@pytest.mark.parametrize("text", ["a: [", "- 1\n", ""])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"service\.yaml"):
        ServiceConfig.load(write(tmp_path, text))


@pytest.mark.parametrize("text", ["", "# to come\n"])
def test_an_empty_file_is_called_empty(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^--config \S+:\n  the file is empty$"):
        ServiceConfig.load(write(tmp_path, text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        ServiceConfig.load(tmp_path / "service.yaml")


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ("{tenant_id: acme, key_file: other}", "tenant_id of its own.*acme"),
        ("{tenant_id: globex, key_file: ./k}", "key of its own"),
    ],
)
def test_two_tenants_are_never_one(tmp_path: Path, second: str, named: str) -> None:
    text = MINIMAL.replace("key_file: k}", "key_file: k}, " + second)
    with pytest.raises(ConfigurationError, match=named):
        ServiceConfig.load(write(tmp_path, text))


@pytest.mark.parametrize(
    "section", ["policy: {epoch_s: .inf}", "redis: {timeout_s: .inf}", "policy: {deadline_s: .nan}"]
)
def test_numbers_are_finite(tmp_path: Path, section: str) -> None:
    with pytest.raises(ConfigurationError, match=r"finite|greater than"):
        ServiceConfig.load(write(tmp_path, MINIMAL + section + "\n"))


@pytest.mark.parametrize("url", ["localhost:6379", "http://h:1", "redis://h:99999/0", "redis://"])
def test_a_redis_url_that_cannot_work_is_refused_without_repeating_it(tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"redis\.url") as caught:
        ServiceConfig.load(write(tmp_path, MINIMAL + f"redis: {{url: '{url}'}}\n"))
    assert url not in str(caught.value).replace("redis://HOST:6379/0, rediss:// or unix://", "")
    with pytest.raises(ConfigurationError, match="--redis-url"):
        load_config(write(tmp_path, MINIMAL), url)


def test_snapshots_that_would_always_be_stale_are_refused(tmp_path: Path) -> None:
    text = MINIMAL.replace("1000}", "1000, snapshot_period_s: 20}")
    with pytest.raises(ConfigurationError, match="snapshot_period_s"):
        ServiceConfig.load(write(tmp_path, text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.yaml"):
        ServiceConfig.load(tmp_path / "absent.yaml")


def test_redis_url_of_the_command_line_wins(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "redis: {timeout_s: 0.5}\n")
    config = load_config(path, "redis://elsewhere:1/0")
    assert config.redis.url == "redis://elsewhere:1/0"
    assert config.redis.timeout_s == 0.5


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"replica": {"count": 3, "autoscaling": {"max_count": 3}}}, r"max_count \(3\) must be above replica.count"),
        ({"tenants": [{"dedicated_replicas": 3}]}, "dedicated_replicas is for isolation: dedicated"),
    ],
)
def test_settings_that_could_do_nothing_are_refused(changed: dict[str, Any], named: str) -> None:
    tenant = {"tenant_id": "a", "key_sha256": "0" * 64}
    fields = {
        "model": {"path": "m"},
        "replica": {"vram_budget_bytes": 1000, **changed.get("replica", {})},
        "tenants": [{**tenant, **one} for one in changed.get("tenants", [{}])],
    }
    with pytest.raises(ValidationError, match=named):
        ServiceConfig.model_validate(fields)


def test_a_section_that_is_given_twice_is_named_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "replica: {vram_budget_bytes: 2000}\n")
    with pytest.raises(ConfigurationError, match=r"replica is given twice(?s:.*)service\.yaml\", line 5"):
        ServiceConfig.load(path)


def test_a_redis_port_that_is_none_is_named_with_the_fix(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "redis: {url: 'redis://127.0.0.1:abc/0'}\n")
    with pytest.raises(ConfigurationError, match=r"redis\.url: its port is no number.*give a URL such as"):
        ServiceConfig.load(path)
