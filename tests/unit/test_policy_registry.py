from __future__ import annotations

import sys
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

from policies import registry
from policies.mv_wsa import MarginalValue
from policies.registry import known_names, load_policy
from policies.static_split import StaticSplit
from wisp_core.errors import ConfigurationError

OUTSIDE = """
from dataclasses import dataclass
from wisp_core.contracts import Decision

NUMBER = 3

class NotAPolicy:
    pass

@dataclass(frozen=True, kw_only=True)
class KeepsCap:
    cap: int = 1

    def __post_init__(self):
        if self.cap < 1:
            raise ValueError("cap must be positive")

    def initial_state(self):
        return None

    def decide(self, snapshot, state):
        return Decision(split=snapshot.split, reason=f"keeps {self.cap}"), state
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the project with a policy module and a distribution that announces it."""
    (tmp_path / "outside_policy.py").write_text(OUTSIDE)
    info = tmp_path / "outside_policy-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-policy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[wisp.policies]\nkeeps_cap = outside_policy:KeepsCap\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "outside_policy", raising=False)
    return tmp_path


def test_built_in_names_and_their_settings() -> None:
    assert load_policy("static_split", {"cap": 7}) == StaticSplit(cap=7)
    assert isinstance(load_policy("mv_wsa", {}), MarginalValue)


def test_a_built_in_name_is_found_without_any_installed_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entry_points", lambda **_: EntryPoints())
    assert known_names() == sorted(registry.BUILT_IN)
    assert [type(load_policy(name, {})) for name in ("static_split", "mv_wsa")] == [StaticSplit, MarginalValue]


def test_the_oracle_is_not_offered_where_a_name_is_unknown() -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_policy("orakel", {})
    assert "oracle" not in str(caught.value)


def test_module_and_class(outside: Path) -> None:
    policy = load_policy("outside_policy:KeepsCap", {"cap": 5})
    assert policy.cap == 5  # type: ignore[attr-defined]


def test_entry_point_of_another_distribution(outside: Path) -> None:
    assert "keeps_cap" in known_names()
    assert type(load_policy("keeps_cap", {})).__module__ == "outside_policy"


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("mv_wsaa", {}, r"policy\.name: unknown policy 'mv_wsaa'; known: .*mv_wsa, .*static_split, .*or module:Class"),
        ("no_such_module:Policy", {}, r"policy\.name: cannot load 'no_such_module:Policy': No module .* PYTHONPATH"),
        ("outside_policy:Missing", {}, r"policy\.name: cannot load 'outside_policy:Missing'"),
        (":KeepsCap", {}, r"policy\.name: cannot load ':KeepsCap'"),
        ("outside_policy:NUMBER", {}, r"policy\.name: 'outside_policy:NUMBER' is a int, not a policy class"),
        ("outside_policy:NotAPolicy", {}, r"policy\.name: .* has no method initial_state and no decide"),
        ("outside_policy:KeepsCap", {"cap": 0}, r"policy\.settings: .*cap must be positive"),
        ("outside_policy:KeepsCap", {"kap": 1}, r"policy\.settings\.kap: unknown setting .* takes: cap"),
        ("mv_wsa", {"speed": 1}, r"policy\.settings\.speed: unknown setting of mv_wsa, which takes: horizon_s"),
        ("static_split", {"cap": 1, "fraction": 0.5}, r"policy\.settings\.cap and policy\.settings\.fraction exclude"),
    ],
)
def test_errors_name_the_setting(outside: Path, name: str, settings: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        load_policy(name, settings)
