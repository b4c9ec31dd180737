"""`wisp demo` and a service that already runs from the same directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.demo.run import prepare_demo
from services.preflight import checked_start, own_state_dir
from wisp_core.errors import ConfigurationError


def test_the_model_of_a_running_service_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with own_state_dir(Path(".wisp/demo")), pytest.raises(ConfigurationError, match="another service runs there"):
        prepare_demo("mv_wsa")
    assert not Path(".wisp/demo/model").exists()


def test_a_prepared_demo_can_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = prepare_demo("static_split")
    assert config.policy.name == "static_split"
    with checked_start(config):
        assert (Path(config.model.path) / "config.json").is_file()
