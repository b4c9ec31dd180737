"""What the demo shows at its end: sessions, and what each replica saw, decided and did. Readable in 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from services.cli.status import print_entry
from services.demo.drive import SessionFigures
from services.demo.sampler import MemorySampler
from wisp_core.contracts import DecisionRecord, Outcome, Placement, ResizeOutcome, Signature, Split

_SETTLE_S = 0.8
"""The reading from outside is taken this long before and after a resize."""


@dataclass(frozen=True)
class Resize:
    """A plan's outcome with the decision behind it."""

    outcome: ResizeOutcome
    decision: DecisionRecord | None

    @property
    def is_applied(self) -> bool:
        """Whether memory moved."""
        return self.outcome.outcome is Outcome.APPLIED and self.outcome.before != self.outcome.after

    @property
    def is_to_kv(self) -> bool:
        """Whether KV gained."""
        return self.outcome.after.kv_blocks > self.outcome.before.kv_blocks


def join(outcomes: Sequence[ResizeOutcome], decisions: Sequence[DecisionRecord]) -> list[Resize]:
    """Each outcome with its decision, oldest first."""
    by_revision = {decision.plan_revision: decision for decision in decisions}
    return [
        Resize(outcome, by_revision.get(outcome.revision))
        for outcome in sorted(outcomes, key=lambda outcome: outcome.at_s)
    ]


def session_table(
    sessions: Mapping[str, SessionFigures],
    placements: Mapping[str, Placement],
    signatures: Mapping[str, Signature],
) -> Table:
    """One row per session, keys ``tenant/user/session``."""
    table = Table(title="Sessions", title_justify="left", box=None, pad_edge=False)
    for name in ("session", "replica"):
        table.add_column(name, overflow="fold")
    for name in ("turns", "failed", "TTFT s", "tok/s", "hits"):
        table.add_column(name, justify="right")
    for key, figures in sessions.items():
        placement, signature = placements.get(key), signatures.get(key)
        table.add_row(
            key,
            placement.replica_id if placement else "?",
            str(len(figures.results)),
            str(figures.num_failed),
            f"{figures.mean_ttft_s:.2f}",
            f"{figures.tokens_per_s:.1f}",
            f"{signature.hits / signature.lookups:.0%}" if signature and signature.lookups else "?",
        )
    return table


def print_replica(
    console: Console, replica_id: str, start: Split, end: Split, resizes: Sequence[Resize], sampler: MemorySampler
) -> None:
    """Print a few lines per decision that became a plan."""
    console.print(
        f"\nReplica {replica_id}: {show_split(start)} at the start, {show_split(end)} at the end", style="bold"
    )
    for resize in resizes:
        outcome = resize.outcome
        started_s = outcome.at_s - outcome.pause_ms / 1000
        before = sampler.at(replica_id, started_s - _SETTLE_S)
        after = sampler.at(replica_id, outcome.at_s + _SETTLE_S)
        print_entry(
            console,
            f"{show_split(outcome.before)} -> {show_split(outcome.after)}; {outcome.outcome.value}: {outcome.reason}",
            f"saw {_inputs(resize.decision)}\n"
            f"{outcome.policy}: {outcome.plan_reason}\n"
            f"{outcome.bytes_moved / 2**20:.1f} MiB moved; resident from outside, MiB: {before} -> {after}",
        )
    if not resizes:
        console.print("no resize")


def show_split(split: Split) -> str:
    """A split in few words."""
    return f"{split.cap} slots, {split.kv_blocks} blocks"


def _inputs(decision: DecisionRecord | None) -> str:
    if decision is None:
        return "what the log no longer has"
    return (
        f"floor {decision.floor_blocks}, demand {decision.demand_blocks} blocks; {decision.mean_turns:.1f} turns; "
        f"{decision.decode_steps_per_s:.1f} decode and {decision.prefill_steps_per_s:.1f} prefill steps/s; "
        f"{decision.decode_misses_per_step:.1f} misses/step"
    )
