"""What a run leaves for the simulator: its turns as they went, and what the replicas reported meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from loadtests.bench.online.figures import TurnFigures
from wisp_core.contracts import ReplicaSnapshot, Signature
from wisp_core.simulator.recording import Recording, numbered
from wisp_core.simulator.trace import Trace
from wisp_core.tenant_contracts import TurnRecord


def recording_of_way(
    trace: Trace,
    turns: Sequence[TurnFigures],
    records: Sequence[TurnRecord],
    snapshots: Sequence[ReplicaSnapshot],
    *,
    started_at_s: float = 0.0,
    signatures: Iterable[Signature] = (),
) -> Recording:
    """``trace`` with measured times, real lengths and replicas; turns that did not end, or failed, are left out.

    Unlike what `wisp trace record` makes of finished turns, it keeps clients, phases and barriers, so that a replay is
    a closed loop again: where turns take longer there, later ones come later.

    Args:
        trace: What was played.
        turns: As the clients saw them; those of a session in their order.
        records: As the ingress saw them, which knows the replica; in any order.
        snapshots: Of all replicas, ascending in time.
        started_at_s: When the play began, on the snapshots' clock.
        signatures: Of the sessions, under their keys.
    """
    of_session: defaultdict[int, list[TurnFigures]] = defaultdict(list)
    for turn in turns:
        of_session[turn.session].append(turn)
    places: defaultdict[int, list[TurnRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.at_s):
        places[_number(record.session_key)].append(record)
    replicas = sorted({record.replica_id for record in records})
    rows, is_kept, seen = trace.turns.copy(), np.zeros(len(trace), dtype=np.bool_), defaultdict[int, int](int)
    for index, session in enumerate(rows["session"].tolist()):
        number = seen[session]
        seen[session] += 1
        if number >= min(len(of_session[session]), len(places[session])):
            continue
        turn, place = of_session[session][number], places[session][number]
        if turn.error is not None or turn.ttft_s is None:
            continue
        is_kept[index] = True
        row = rows[index]
        row["ttft_s"], row["duration_s"], row["replica"] = (
            turn.ttft_s,
            turn.duration_s,
            replicas.index(place.replica_id),
        )
        row["prompt_tokens"], row["output_tokens"] = turn.prompt_tokens, max(1, turn.completion_tokens)
        row["prefix_tokens"] = min(row["prefix_tokens"], turn.prompt_tokens)
    played = Trace(
        rows[is_kept],
        tenants=trace.tenants,
        phases=trace.phases,
        has_barriers=trace.has_barriers,
        source=trace.source,
    )
    return Recording(
        trace=played,
        snapshots=tuple(snapshots),
        started_at_s=started_at_s,
        signatures=tuple(numbered(one, _number(one.key)) for one in signatures),
    )


def _number(session_key: str) -> int:
    """Number of the session that the player named so."""
    return int(session_key.rpartition("-")[2])
