"""The two tables at the end of the demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

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
    table = Table(title="Sessions")
    for name in ("tenant", "user", "session", "replica"):
        table.add_column(name)
    for name in ("turns", "failed", "TTFT, s", "tokens/s", "expert hits"):
        table.add_column(name, justify="right")
    for key, figures in sessions.items():
        placement, signature = placements.get(key), signatures.get(key)
        table.add_row(
            figures.spec.tenant,
            figures.spec.user,
            figures.spec.session_id,
            placement.replica_id if placement else "?",
            str(len(figures.results)),
            str(figures.num_failed),
            f"{figures.mean_ttft_s:.2f}",
            f"{figures.tokens_per_s:.1f}",
            f"{signature.hits / signature.lookups:.0%}" if signature and signature.lookups else "?",
        )
    return table


def replica_table(
    replica_id: str, start: Split, end: Split, resizes: Sequence[Resize], sampler: MemorySampler
) -> Table:
    """One row per decision that became a plan."""
    title = f"Replica {replica_id}: {show_split(start)} at the start, {show_split(end)} at the end"
    table = Table(title=title, show_lines=True)
    widths = {"before": 11, "saw": 40, "decided": 60, "outcome": 26, "after": 11, "moved, MiB": 6}
    for name, width in widths.items():
        table.add_column(name, width=width)
    table.add_column("resident from outside, MiB", width=22)
    for resize in resizes:
        outcome = resize.outcome
        started_s = outcome.at_s - outcome.pause_ms / 1000
        before = sampler.at(replica_id, started_s - _SETTLE_S)
        after = sampler.at(replica_id, outcome.at_s + _SETTLE_S)
        table.add_row(
            show_split(outcome.before),
            _inputs(resize.decision),
            f"{outcome.policy}: {outcome.plan_reason}",
            f"{outcome.outcome.value}: {outcome.reason}",
            show_split(outcome.after),
            f"{outcome.bytes_moved / 2**20:.1f}",
            f"{before} -> {after}",
        )
    if not resizes:
        table.add_row(show_split(start), "", "no resize", "", show_split(end), "0.0", "")
    return table


def show_split(split: Split) -> str:
    """A split in few words."""
    return f"{split.cap} slots, {split.kv_blocks} blocks"


def _inputs(decision: DecisionRecord | None) -> str:
    if decision is None:
        return "?"
    return (
        f"floor {decision.floor_blocks}, demand {decision.demand_blocks} blocks; {decision.mean_turns:.1f} turns; "
        f"{decision.decode_steps_per_s:.1f} decode and {decision.prefill_steps_per_s:.1f} prefill steps/s; "
        f"{decision.decode_misses_per_step:.1f} misses/step"
    )
