"""What the turns of one way to divide the budget add up to, and how ways compare. Pure: figures in, figures out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtests.rows import Row, quantile
from wisp_core.contracts import Outcome, ReplicaSnapshot, ResizeOutcome


@dataclass(frozen=True, kw_only=True)
class TurnFigures:
    """One turn as its client saw it; times in seconds, since the start of the run where they are moments."""

    client: int
    session: int
    phase: int
    sent_at_s: float
    ttft_s: float | None
    duration_s: float
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


def turn_figures(
    turns: Sequence[TurnFigures], phases: Sequence[str], *, num_planned: int, lasted_s: float | None = None
) -> Row:
    """Throughput, latencies and failures; the makespan is from the first send to the last end.

    Where fewer than the ``num_planned`` turns have ended, the run was cut after ``lasted_s``: its throughput is then
    what it would be had the others ended at that moment, which it cannot exceed; latencies are of those that ended.
    """
    last_s = max((turn.sent_at_s + turn.duration_s for turn in turns), default=0.0)
    makespan_s = last_s - min((turn.sent_at_s for turn in turns), default=0.0)
    good = [turn for turn in turns if turn.error is None]
    num_cut = num_planned - len(turns)
    if num_cut and lasted_s is not None:
        makespan_s = max(makespan_s, lasted_s)
    return {
        "is_ended": not num_cut,
        "turns": len(turns),
        "cut_turns": num_cut,
        "failed_turns": len(turns) - len(good),
        "errors": sorted({turn.error for turn in turns if turn.error is not None})[:3],
        "makespan_s": makespan_s,
        "turns_per_s": (len(good) + num_cut) / makespan_s,
        "ttft_p50_s": quantile([turn.ttft_s for turn in good if turn.ttft_s is not None], 0.5),
        "ttft_p95_s": quantile([turn.ttft_s for turn in good if turn.ttft_s is not None], 0.95),
        "turn_mean_s": sum(turn.duration_s for turn in good) / max(1, len(good)),
        "prompt_tokens": sum(turn.prompt_tokens for turn in good),
        "completion_tokens": sum(turn.completion_tokens for turn in good),
        "phases": [
            _phase(number, name, turns)
            for number, name in enumerate(phases)
            if any(turn.phase == number for turn in turns)
        ],
    }


def engine_figures(before: Sequence[ReplicaSnapshot], after: Sequence[ReplicaSnapshot]) -> Row:
    """Work of all engines between two moments."""
    starts = {one.replica_id: one for one in before}
    pairs = [(starts[one.replica_id], one) for one in after if one.replica_id in starts]
    row: Row = {}
    for kind in ("decode", "prefill"):
        counts = [(getattr(start, kind), getattr(end, kind)) for start, end in pairs]
        for name in ("steps", "tokens", "misses", "missed_bytes", "seconds", "link_seconds"):
            row[f"{kind}_{name}"] = sum(getattr(end, name) - getattr(start, name) for start, end in counts)
    row["preemptions"] = sum(end.kv.preemptions - start.kv.preemptions for start, end in pairs)
    row["model_error"] = [end.fit.error_fraction for _, end in pairs]
    return row


def resize_figures(outcomes: Sequence[ResizeOutcome]) -> Row:
    """Resizes by outcome, and bytes that went from one pool to the other."""
    moved = [one for one in outcomes if one.outcome is Outcome.APPLIED and one.before != one.after]
    return {
        "resizes": len(moved),
        "resizes_to_kv": sum(one.after.kv_blocks > one.before.kv_blocks for one in moved),
        "resizes_deferred": sum(one.outcome is Outcome.DEFERRED for one in outcomes),
        "resizes_failed": sum(one.outcome is Outcome.FAILED for one in outcomes),
        "bytes_moved": sum(one.bytes_moved for one in moved),
        "pause_ms_max": max((one.pause_ms for one in moved), default=0.0),
    }


def moves(outcomes: Sequence[ResizeOutcome], since_s: float) -> list[Row]:
    """Every resize that was applied, in the order of time; ``since_s`` is when the run began, Unix seconds."""
    return [
        {
            "at_s": round(one.at_s - since_s, 1),
            "replica": one.replica_id,
            "cap": one.after.cap,
            "cap_before": one.before.cap,
            "kv_blocks": one.after.kv_blocks,
            "pause_ms": round(one.pause_ms, 1),
        }
        for one in sorted(outcomes, key=lambda one: one.at_s)
        if one.outcome is Outcome.APPLIED and one.before != one.after
    ]


def compare(rows: Sequence[Row], policy: str) -> Row:
    """The online ``policy`` over the best static split: throughput, and whether p95 TTFT is no worse.

    Rates of the splits in ``cut_static_caps`` are upper bounds, as those were cut; where the best one is among them,
    ``over_best_static`` is a lower bound. An online run that was cut is not compared.
    """
    good = [row for row in rows if "error" not in row]
    static = [row for row in good if row["cap"] is not None]
    summary: Row = {
        "failed_turns": sum(row["failed_turns"] for row in good),
        "cut_turns": sum(row["cut_turns"] for row in good),
        "static": {str(row["cap"]): round(row["turns_per_s"], 4) for row in static},
        "cut_static_caps": [row["cap"] for row in static if row["cut_turns"]],
        "online": {row["policy"]: round(row["turns_per_s"], 4) for row in good if row["cap"] is None},
    }
    online = next((row for row in good if row["policy"] == policy and not row["cut_turns"]), None)
    if online is None or not static:
        return summary
    best = max(static, key=lambda row: row["turns_per_s"])
    return summary | {
        "best_static_cap": best["cap"],
        "over_best_static": online["turns_per_s"] / best["turns_per_s"],
        "ttft_p95_over_best_static": online["ttft_p95_s"] / best["ttft_p95_s"],
        "makespan_s": online["makespan_s"],
        "resizes": online["resizes"],
        "bytes_moved": online["bytes_moved"],
    }


def _phase(number: int, name: str, turns: Sequence[TurnFigures]) -> Row:
    own = [turn for turn in turns if turn.phase == number]
    ttfts = [turn.ttft_s for turn in own if turn.ttft_s is not None]
    started_s = min(turn.sent_at_s for turn in own)
    return {
        "name": name,
        "turns": len(own),
        "started_s": started_s,
        "makespan_s": max(turn.sent_at_s + turn.duration_s for turn in own) - started_s,
        "ttft_p95_s": quantile(ttfts, 0.95),
        "turn_mean_s": sum(turn.duration_s for turn in own) / len(own),
    }
