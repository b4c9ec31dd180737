"""The policy that the README shows is one that the service would run."""

import re
from pathlib import Path

import pytest
from policy_snapshots import make_layout, make_snapshot

from policies.registry import load_policy
from wisp_core.allocation.solver import violations

README = Path(__file__).parents[2] / "README.md"


def test_the_shown_policy_is_loaded_and_keeps_every_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(# my_policies\.py.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "my_policies.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    policy = load_policy("my_policies:HalfAndHalf", {})
    for experts in (8, 32):
        snapshot = make_snapshot(layout=make_layout(num_experts=experts))
        decision, _ = policy.decide(snapshot, policy.initial_state())
        experts_bytes = snapshot.layout.experts_bytes_by_cap[decision.split.cap]
        assert experts_bytes <= snapshot.budget_bytes / 2
        assert violations(snapshot, decision.split) == []
