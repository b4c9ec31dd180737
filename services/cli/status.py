"""``wisp status``: what a running service says of itself, in the terminal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from services.cli.operator import Operator

_LAST = 5


def show_status(state_dir: Path) -> None:
    """Print replicas, sessions and the last decisions. Raises ConfigurationError when no service runs."""
    print_status(Operator(state_dir).read("/wisp/status").json(), Console())


def print_status(status: dict[str, Any], console: Console) -> None:
    """Print ``status``, readable in 80 columns."""
    console.print("Replicas", style="bold")
    for replica in status["replicas"]:
        _print_replica(replica, console)
    console.print("\nLast decisions, newest first", style="bold")
    for replica in status["replicas"]:
        _print_decisions(replica, console)
    console.print("\nSessions", style="bold")
    console.print(_sessions(status["sessions"]))


def print_entry(console: Console, first: str, second: str) -> None:
    """Two lines, the second set in: nine figures, or a reason, do not fit into columns."""
    console.print(Text(first))
    console.print(Padding(Text(second), (0, 0, 0, 2), expand=False))


def _split(split: dict[str, Any]) -> str:
    return f"{split['cap']} slots, {split['kv_blocks']} blocks"


def _print_replica(replica: dict[str, Any], console: Console) -> None:
    one, kv = replica["snapshot"], replica["snapshot"]["kv"]
    state = "stale" if replica["is_stale"] else "serving" if one["is_healthy"] else "engine down"
    split = (
        _split(one["split"])
        if one.get("layout", {}).get("is_paged", True)
        else f"not paged, {one['split']['kv_blocks']} blocks"
    )
    print_entry(
        console,
        f"{one['replica_id']}  {'resizing' if one['is_resizing'] else state}; {split}, "
        f"{kv['used_blocks']} of them used",
        f"{one['resident_bytes'] / 2**20:.1f} MiB resident of {one['budget_bytes'] / 2**20:.1f}; "
        f"{kv['running_turns']} running, {kv['waiting_turns']} waiting; "
        f"{one['decode_steps_per_s']:.1f} decode steps/s; plan {one['plan_revision']}",
    )


def _print_decisions(replica: dict[str, Any], console: Console) -> None:
    outcomes = {outcome["revision"]: outcome for outcome in replica["outcomes"]}
    for record in replica["decisions"][:_LAST]:
        outcome = outcomes.get(record["plan_revision"])
        done = "pending" if record["plan_revision"] is not None else "hold"
        if outcome:
            done = f"{outcome['outcome']}: {outcome['reason']}"
        before, decided = _split(record["before"]), _split(record["decision"]["split"])
        change = before if before == decided else f"{before} -> {decided}"
        print_entry(
            console,
            f"{record['replica_id']}  {change}, {_age(record['at_s'])}; {done}",
            f"{record['policy']}: {record['decision']['reason']}",
        )


def _age(at_s: float) -> str:
    """How long ago that was: a policy that holds decides the same each epoch, of which the log has the first."""
    minutes, seconds = divmod(max(0, round(time.time() - at_s)), 60)
    return f"{minutes} min {seconds} s ago" if minutes else f"{seconds} s ago"


def _sessions(sessions: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("session", "replica"):
        table.add_column(name, overflow="fold")
    for name in ("turns", "failed", "TTFT ms", "tok/s", "cached", "hits"):
        table.add_column(name, justify="right")
    for one in sessions:
        ttft_s = one["ttft_sum_s"] / one["ttft_turns"] if one["ttft_turns"] else 0.0
        # From arrival to end: an unstreamed turn comes in one piece, after all of its time.
        seconds = one["ttft_sum_s"] + one["decode_s"]
        rate = one["completion_tokens"] / seconds if seconds else 0.0
        cached = one["cached_tokens"] / one["prompt_tokens"] if one["prompt_tokens"] else 0.0
        hits = one["expert_hits"] / one["expert_lookups"] if one["expert_lookups"] else 0.0
        table.add_row(
            one["session_key"],
            one["home"] or one["replica_id"],
            str(one["turns"]),
            str(one["failed_turns"]),
            f"{ttft_s * 1e3:.0f}",
            f"{rate:.1f}",
            f"{cached:.0%}",
            f"{hits:.0%}",
        )
    return table
