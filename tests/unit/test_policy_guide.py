"""The guide's policy runs as the guide says: from outside the project, by module:Class and by entry point."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from policy_snapshots import make_layout, make_snapshot
from typer.testing import CliRunner

from loadtests.simulate.cli import app
from policies.registry import load_policy
from services.policy.process import PolicyProcess, PolicySpec
from wisp_core.allocation.solver import feasible_splits, violations
from wisp_core.contracts import KvDemand
from wisp_core.errors import ConfigurationError

GUIDE = Path(__file__).parents[2] / "policies" / "GUIDE.md"


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the guide's code and its entry point, on the path of this process and of its children."""
    guide = GUIDE.read_text()
    (code,) = re.findall(r"```python\n(# my_policies\.py.*?)```", guide, re.DOTALL)
    (entry,) = re.findall(r"```toml\n.*?\n(slow_peak = .*?)\n```", guide, re.DOTALL)
    (tmp_path / "my_policies.py").write_text(code)
    info = tmp_path / "my_policies-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-policies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[wisp.policies]\n{entry.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_is_as_short_as_it_claims(outside: Path) -> None:
    lines = [line for line in (outside / "my_policies.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 30


@pytest.mark.parametrize("name", ["my_policies:SlowPeak", "slow_peak"])
@pytest.mark.parametrize("settings", [{}, {"memory_epochs": 300}])
def test_it_runs_in_its_own_process(outside: Path, name: str, settings: dict[str, Any]) -> None:
    process = PolicyProcess(PolicySpec(name=name, settings=settings))
    try:
        busy = make_snapshot(kv=KvDemand(mean_turns=2.0, demand_blocks=80, floor_blocks=8))
        decision = process.ask(busy, 30.0)
        assert decision.split.kv_blocks >= 80
        assert decision.split == max((s for s in feasible_splits(busy) if s.kv_blocks >= 80), key=lambda s: s.cap)
        quiet = busy.model_copy(update={"kv": KvDemand(demand_blocks=8, floor_blocks=8)})
        assert process.ask(quiet, 30.0).split.kv_blocks >= 79, "the peak fades slowly: the state is kept"
    finally:
        process.kill()


def test_it_is_simulated_with_its_settings(outside: Path) -> None:
    policy = "my_policies:SlowPeak {memory_epochs: 300}"
    answer = CliRunner().invoke(app, ["run", "--turns", "20", "--policy", policy])
    assert answer.exit_code == 0, answer.output
    assert "{memory_epochs:" in answer.output, "its name in the table"
    for wrong, told in (("mv_wsa {colour: red}", r"policy\.settings\.colour"), ("mv_wsa red", "NAME {SETTING: VALUE}")):
        with pytest.raises(ConfigurationError, match=told):
            CliRunner().invoke(app, ["run", "--policy", wrong], catch_exceptions=False)


@pytest.mark.parametrize("experts", [8, 32])
@pytest.mark.parametrize("demand", [0, 90, 4000])
def test_it_keeps_every_bound(outside: Path, experts: int, demand: int) -> None:
    policy = load_policy("my_policies:SlowPeak", {})
    snapshot = make_snapshot(layout=make_layout(num_experts=experts), kv=KvDemand(demand_blocks=demand))
    decision, _ = policy.decide(snapshot, policy.initial_state())
    assert violations(snapshot, decision.split) == []
