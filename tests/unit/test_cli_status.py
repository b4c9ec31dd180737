"""What `wisp status` and `wisp tenant list` print is readable in a terminal of 80 columns."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from services.cli import main, tenant
from services.cli.status import print_status
from services.cli.tenant import print_tenants
from services.secret_files import read_or_create
from wisp_core.errors import ConfigurationError

SESSION = {
    "session_key": "initech/user-0/burst-0-1",
    "home": "vr3bbh0o",
    "replica_id": "vr3bbh0o",
    "turns": 25,
    "failed_turns": 0,
    "ttft_sum_s": 14.25,
    "ttft_turns": 25,
    "decode_s": 20.0,
    "completion_tokens": 500,
    "cached_tokens": 65,
    "prompt_tokens": 100,
    "expert_hits": 99,
    "expert_lookups": 100,
}


def split(cap: int, kv_blocks: int) -> dict[str, int]:
    return {"cap": cap, "kv_blocks": kv_blocks}


def decision(before: dict[str, int], after: dict[str, int], revision: int | None, reason: str) -> dict[str, Any]:
    return {
        "at_s": time.time() - 125,
        "replica_id": "vr3bbh0o",
        "policy": "mv_wsa",
        "before": before,
        "decision": {"split": after, "reason": reason},
        "plan_revision": revision,
    }


def replica(*decisions: dict[str, Any], **changes: Any) -> dict[str, Any]:
    snapshot = {
        "replica_id": "vr3bbh0o",
        "is_healthy": True,
        "is_resizing": False,
        "split": split(128, 12345),
        "resident_bytes": 22_000 << 20,
        "budget_bytes": 22_528 << 20,
        "kv": {"running_turns": 16, "waiting_turns": 2, "used_blocks": 12000},
        "decode_steps_per_s": 123.4,
        "plan_revision": 1234,
    }
    outcome = {"revision": 7, "outcome": "deferred", "reason": "194 KV blocks are below the 291 that turns need"}
    return {"snapshot": snapshot | changes, "is_stale": False, "decisions": list(decisions), "outcomes": [outcome]}


def printed(*replicas: dict[str, Any]) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    print_status({"replicas": list(replicas), "sessions": [SESSION]}, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_names_and_figures_are_not_broken() -> None:
    lines = printed(replica(is_healthy=False))
    assert lines[1] == "vr3bbh0o  engine down; 128 slots, 12345 blocks, 12000 of them used"
    assert lines[2].startswith("  22000.0 MiB resident of 22528.0; 16 running, 2 waiting; 123.4 decode steps/s;")
    assert any("initech/user-0/burst-0-1" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_decision_says_what_changed_how_it_ended_and_why() -> None:
    text = " ".join(
        " ".join(
            printed(
                replica(
                    decision(split(11, 314), split(21, 194), 7, "mv_wsa: predicted 1.048 -> 0.568 s/s"),
                    decision(split(11, 314), split(11, 314), None, "hold: no decode step in the window"),
                    decision(split(11, 314), split(12, 302), 8, "[half] of the budget"),
                )
            )
        ).split()
    )
    assert "vr3bbh0o 11 slots, 314 blocks -> 21 slots, 194 blocks, 2 min 5 s ago; deferred: 194 KV blocks" in text
    assert "vr3bbh0o 11 slots, 314 blocks, 2 min 5 s ago; hold mv_wsa: hold: no decode step in the window" in text
    assert "12 slots, 302 blocks, 2 min 5 s ago; pending mv_wsa: [half] of the budget" in text


def test_a_tenant_is_readable() -> None:
    out = io.StringIO()
    shown = {
        "tenant_id": "initech",
        "is_from_file": False,
        "keys": ["0a1b2c3d", "4e5f6071"],
        "isolation": "shared",
        "requests_per_minute": 600,
        "tokens_per_minute": 200_000,
        "max_concurrent_turns": 16,
        "weight": 2.0,
        "kv_share": 0.5,
        "usage": {"turns": 1234, "failed_turns": 1, "prompt_tokens": 5_000_000, "completion_tokens": 600_000},
    }
    print_tenants([shown], Console(file=out, width=80))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "initech  from the admin API, shared; keys 0a1b2c3d 4e5f6071",
        "  600 requests/min, 200000 tokens/min, 16 turns at once; weight 2, KV share 0.5",
        "  1234 turns done, 1 of them failed; 5600000 tokens used",
    ]


def test_only_the_limits_that_are_given_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[tuple[Any, ...]]()

    def call(_: Path, *request: Any) -> dict[str, Any]:
        sent.append(request)
        limits = {"requests_per_minute": 600, "tokens_per_minute": 200_000, "max_concurrent_turns": 16}
        return {"key": "sk-new", **limits, "weight": 2.0, "kv_share": 0.5}

    monkeypatch.setattr(tenant, "_call", call)
    added = CliRunner().invoke(tenant.app, ["add", "umbrella", "--weight", "2"])
    assert (added.exit_code, added.stdout) == (0, "sk-new\n")
    limited = CliRunner().invoke(tenant.app, ["limit", "umbrella", "--kv-share", "0.5"])
    told = "umbrella: 600 requests/min, 200000 tokens/min, 16 turns at once; weight 2, KV share 0.5\n"
    assert (limited.exit_code, limited.stdout) == (0, told)
    assert CliRunner().invoke(tenant.app, ["rm", "umbrella"]).stdout == "umbrella: removed\n"
    assert isinstance(CliRunner().invoke(tenant.app, ["limit", "umbrella"]).exception, ConfigurationError)
    assert sent == [
        ("POST", "", {"tenant_id": "umbrella", "weight": 2.0}),
        ("PATCH", "/umbrella", {"kv_share": 0.5}),
        ("DELETE", "/umbrella"),
    ]


def test_an_upgrade_takes_no_other_redis() -> None:
    arguments = ["serve", "--config", "service.yaml", "--upgrade", "--redis-url", "redis://h:6379/0"]
    refused = CliRunner().invoke(main.app, arguments).exception
    assert isinstance(refused, ConfigurationError)
    assert "--redis-url: a running service keeps its Redis" in str(refused)


def test_a_directory_in_place_of_a_key_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigurationError, match="is no file: name one that holds the secret"):
        read_or_create(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
