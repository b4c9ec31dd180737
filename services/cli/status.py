"""``wisp status``: what a running service says of itself, in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from services.app import read_service_file
from services.secret_files import read_or_create, secret_path
from wisp_core.errors import EngineUnavailableError

_LAST = 5


def fetch_status(state_dir: Path) -> dict[str, Any]:
    """The status page. Raises ConfigurationError when no service runs, EngineUnavailableError when it is silent."""
    facts = read_service_file(state_dir)
    headers = {"Authorization": f"Bearer {read_or_create(secret_path(state_dir, 'admin'))}"}
    try:
        response = httpx.get(f"{facts['url']}/wisp/status", headers=headers, timeout=10).raise_for_status()
    except httpx.HTTPError as error:
        raise EngineUnavailableError(f"{facts['url']} does not answer: {error}") from error
    status: dict[str, Any] = response.json()
    return status


def show_status(state_dir: Path) -> None:
    """Print replicas, sessions and the last decisions."""
    status = fetch_status(state_dir)
    console = Console()
    console.print(_replicas(status["replicas"]))
    console.print(_decisions(status["replicas"]))
    console.print(_sessions(status["sessions"]))


def _table(title: str, text: tuple[str, ...], numbers: tuple[str, ...] = ()) -> Table:
    table = Table(title=title)
    for name in text:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _split(split: dict[str, Any]) -> str:
    return f"{split['cap']} slots, {split['kv_blocks']} blocks"


def _replicas(replicas: list[dict[str, Any]]) -> Table:
    table = _table(
        "Replicas",
        ("replica", "state", "split"),
        ("resident / budget, MiB", "running", "waiting", "KV used", "decode steps/s", "plan"),
    )
    for replica in replicas:
        one = replica["snapshot"]
        state = "stale" if replica["is_stale"] else "serving" if one["is_healthy"] else "engine down"
        table.add_row(
            one["replica_id"],
            "resizing" if one["is_resizing"] else state,
            _split(one["split"]),
            f"{one['resident_bytes'] / 2**20:.1f} / {one['budget_bytes'] / 2**20:.1f}",
            str(one["kv"]["running_turns"]),
            str(one["kv"]["waiting_turns"]),
            str(one["kv"]["used_blocks"]),
            f"{one['decode_steps_per_s']:.1f}",
            str(one["plan_revision"]),
        )
    return table


def _decisions(replicas: list[dict[str, Any]]) -> Table:
    table = _table("Last decisions", ("replica", "policy", "before", "decided", "reason", "outcome"))
    for replica in replicas:
        outcomes = {outcome["revision"]: outcome for outcome in replica["outcomes"]}
        for record in replica["decisions"][:_LAST]:
            outcome = outcomes.get(record["plan_revision"])
            done = "pending" if record["plan_revision"] is not None else "hold"
            table.add_row(
                record["replica_id"],
                record["policy"],
                _split(record["before"]),
                _split(record["decision"]["split"]),
                record["decision"]["reason"],
                f"{outcome['outcome']}: {outcome['reason']}" if outcome else done,
            )
    return table


def _sessions(sessions: list[dict[str, Any]]) -> Table:
    table = _table("Sessions", ("session", "replica"), ("turns", "failed", "TTFT, s", "tokens/s", "cached", "hits"))
    for one in sessions:
        ttft_s = one["ttft_sum_s"] / one["ttft_turns"] if one["ttft_turns"] else 0.0
        # From arrival to end: an unstreamed turn comes in one piece and has no decode time of its own.
        seconds = one["ttft_sum_s"] + one["decode_s"]
        rate = one["completion_tokens"] / seconds if seconds else 0.0
        cached = one["cached_tokens"] / one["prompt_tokens"] if one["prompt_tokens"] else 0.0
        hits = one["expert_hits"] / one["expert_lookups"] if one["expert_lookups"] else 0.0
        table.add_row(
            one["session_key"],
            one["home"] or one["replica_id"],
            str(one["turns"]),
            str(one["failed_turns"]),
            f"{ttft_s:.2f}",
            f"{rate:.1f}",
            f"{cached:.0%}",
            f"{hits:.0%}",
        )
    return table
