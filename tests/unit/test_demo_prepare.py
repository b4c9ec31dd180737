"""`wisp demo`: a service that already runs from the same directory; the last line when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from openai import APIConnectionError

from services.demo import run
from services.demo.run import prepare_demo, run_demo
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


@pytest.mark.parametrize(
    "error",
    [ConfigurationError("[a]: a service runs"), APIConnectionError(request=httpx.Request("POST", "http://127.0.0.1"))],
)
def test_the_last_line_of_a_demo_that_fails_is_json(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(policy: str) -> None:
        raise error

    monkeypatch.setattr(run, "prepare_demo", fail)
    assert run_demo(keep=False, policy="mv_wsa", is_swapped=False) == 2
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1]) == {"ok": False, "error": str(error)}
    assert f"wisp demo: {error}" in err
    assert "Traceback" not in err
