"""What ``wisp trace record`` keeps of a live service: a trace, and what its replicas reported meanwhile. No prompts.

The file is a trace's (`wisp_core.simulator.trace`) with lines of three more kinds: ``started_at_s``, ``snapshot``
(ReplicaSnapshot) and ``signature`` (Signature). Readers of traces pass over them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from wisp_core.contracts import ReplicaSnapshot, Signature
from wisp_core.errors import ConfigurationError
from wisp_core.simulator.expert_curves import ExpertCurves
from wisp_core.simulator.trace import Trace, TraceTurn, trace_lines
from wisp_core.simulator.trace_files import read_trace
from wisp_core.tenant_contracts import TurnRecord
from wisp_core.working_set.signature import UseRates, merge, use_rates


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A trace and the reports that belong to it; both may be empty for a trace that nobody recorded."""

    trace: Trace
    snapshots: tuple[ReplicaSnapshot, ...] = ()
    """In the order of time, of all replicas."""
    started_at_s: float = 0.0
    """When the trace began, on the clock of the snapshots."""
    signatures: tuple[Signature, ...] = ()
    """Of the trace's sessions; the key is a session's number."""

    def topic_rates(self, *, is_prefill: bool = False) -> UseRates | None:
        """Uses per decode token of each of the trace's topics, [topics, L, E]: those of its sessions together.

        A topic of which no session was seen is taken to be like all. None without signatures. ``is_prefill``: uses
        per prompt token.
        """
        turns, top_ks = self.trace.turns, {one.layout.top_k for one in self.snapshots}
        topic_of = dict(zip(turns["session"].tolist(), turns["topic"].tolist(), strict=True))
        seen: dict[int, list[Signature]] = {}
        for one in self.signatures:
            if (one.prefill_tokens if is_prefill else one.decode_tokens) and int(one.key) in topic_of:
                seen.setdefault(topic_of[int(one.key)], []).append(one)
        if not seen or len(top_ks) != 1:
            return None
        (top_k,) = top_ks
        rates = {
            topic: use_rates(merge(str(topic), found), top_k, is_prefill=is_prefill) for topic, found in seen.items()
        }
        mean: UseRates = np.mean(list(rates.values()), axis=0)
        return np.stack([rates.get(topic, mean) for topic in range(self.trace.num_topics)])

    def matches(self, num_layers: int, num_experts: int, top_k: int) -> bool:
        """Whether its curves are those of a model with these experts."""
        layouts = [one.layout for one in self._curved()]
        return bool(layouts) and all(
            (one.num_layers, one.num_experts, one.top_k) == (num_layers, num_experts, top_k) for one in layouts
        )

    def expert_curves(self) -> ExpertCurves:
        """Measured curves by batch, without a distinction of topics. Raises ConfigurationError when there are none.

        Each snapshot's curve belongs to its mean batch; over the batch a line is laid through those of all snapshots.
        """
        return measured_curves(self._curved())

    def _curved(self) -> list[ReplicaSnapshot]:
        return [one for one in self.snapshots if len(one.decode_misses_by_cap) == one.layout.num_experts + 1]


def measured_curves(snapshots: Sequence[ReplicaSnapshot]) -> ExpertCurves:
    """Curves by batch from what replicas reported over time. Raises ConfigurationError when no decode step was."""
    batches, steps, misses, needed = list[float](), list[int](), list[tuple[float, ...]](), list[float]()
    before: dict[str, ReplicaSnapshot] = {}
    for one in snapshots:
        last = before.get(one.replica_id)
        before[one.replica_id] = one
        first = (last.decode.steps, last.decode.tokens, last.decode.distinct) if last else (0, 0, 0)
        num_steps = one.decode.steps - first[0]
        if num_steps <= 0 or not one.decode_misses_by_cap:
            continue
        mean = (one.decode.tokens - first[1]) / num_steps
        if one.decode_steps_per_s > 0 and one.decode_tokens_per_s > 0:
            mean = one.decode_tokens_per_s / one.decode_steps_per_s  # looks back as far as the curve does
        batches.append(max(1.0, mean))
        steps.append(num_steps)
        misses.append(one.decode_misses_by_cap)
        needed.append((one.decode.distinct - first[2]) / num_steps)
    if not batches:
        raise ConfigurationError("the recording has no decode step: record while turns run")
    ends = sorted({1, max(2, round(max(batches)))})
    curves = np.minimum.accumulate(_on_line(batches, np.array(misses), steps, ends), axis=1)
    distinct = _on_line(batches, np.array(needed)[:, None], steps, ends)
    comeback = np.zeros((1, curves.shape[1]))
    return ExpertCurves(ends, (1,), curves[:, None, :], distinct, (1,), comeback)


def _on_line(
    places: Sequence[float], values: npt.NDArray[np.float64], weights: Sequence[float], at: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Values at the places ``at`` on the lines through ``values``, [places, any]; no line falls, or below 0."""
    x, weight = np.array(places), np.array(weights, dtype=float)
    mean_x, mean = float(np.average(x, weights=weight)), np.average(values, axis=0, weights=weight)
    square = float(weight @ (x - mean_x) ** 2)
    slope = np.maximum((weight * (x - mean_x)) @ values / square, 0.0) if square > 0 else np.zeros_like(mean)
    lines: npt.NDArray[np.float64] = np.maximum(mean + np.subtract.outer(np.array(at), mean_x)[:, None] * slope, 0.0)
    return lines


def recording_of(
    turns: Iterable[TurnRecord],
    source: str,
    *,
    snapshots: Iterable[ReplicaSnapshot] = (),
    signatures: Iterable[Signature] = (),
) -> Recording:
    """The recording of a service's finished turns. Raises ConfigurationError when there are none.

    Replicas are numbered in the order of their ids. Each session is a client: its first turn keeps its time, and
    between two of its turns lies what the client paused. A prompt that grew by at least the last answer continues the
    conversation: what was there is its prefix. Failed turns and those without token counts are left out. Signatures
    come under their sessions' keys; others are left out.
    """
    good = [turn for turn in turns if not turn.is_failed and turn.prompt_tokens > 0 and turn.completion_tokens > 0]
    good.sort(key=lambda turn: turn.at_s - turn.duration_s)
    if not good:
        raise ConfigurationError("no turn was recorded: record while turns run")
    start_s = good[0].at_s - good[0].duration_s
    numbers, replicas = _Numbers(), sorted({turn.replica_id for turn in good})
    last: dict[str, TurnRecord] = {}
    rows = []
    for turn in good:
        tenant, user = _owner(turn.session_key)
        before = last.get(turn.session_key)
        last[turn.session_key] = turn
        arrived_s = turn.at_s - turn.duration_s
        context = before.prompt_tokens + before.completion_tokens if before is not None else 0
        client = numbers.of("session", turn.session_key)
        rows.append(
            TraceTurn(
                client=client,
                session=client,
                user=numbers.of("user", user),
                tenant=numbers.of("tenant", tenant),
                topic=numbers.of("user", user),
                phase=0,
                at_s=arrived_s - start_s if before is None else 0.0,
                think_s=0.0 if before is None else max(0.0, arrived_s - before.at_s),
                prompt_tokens=turn.prompt_tokens,
                prefix_tokens=max(turn.cached_tokens, context if context <= turn.prompt_tokens else 0),
                output_tokens=turn.completion_tokens,
                ttft_s=float("nan") if turn.ttft_s is None else turn.ttft_s,
                duration_s=turn.duration_s,
                replica=replicas.index(turn.replica_id),
            )
        )
    sessions = {key: number for number, key in enumerate(numbers.names("session"))}
    return Recording(
        trace=Trace.of(rows, tenants=tuple(numbers.names("tenant")), source=source),
        snapshots=tuple(snapshots),
        started_at_s=start_s,
        signatures=tuple(numbered(one, sessions[one.key]) for one in signatures if one.key in sessions),
    )


def numbered(signature: Signature, session: int) -> Signature:
    """``signature`` under its session's number: a recording holds no names."""
    return signature.model_copy(update={"key": str(session)})


class _Numbers:
    """Small numbers for names, by kind."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, int]] = {}

    def of(self, kind: str, name: str) -> int:
        names = self._known.setdefault(kind, {})
        return names.setdefault(name, len(names))

    def names(self, kind: str) -> list[str]:
        return list(self._known.get(kind, {}))


def _owner(session_key: str) -> tuple[str, str]:
    """Tenant and user of a session's key, ``tenant/user/session``."""
    tenant, _, rest = session_key.partition("/")
    return tenant, f"{tenant}/{rest.partition('/')[0]}"


def write_recording(path: Path, recording: Recording) -> None:
    """Write trace, snapshots and signatures."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for line in trace_lines(recording.trace):
            file.write(line + "\n")
        file.write(json.dumps({"started_at_s": recording.started_at_s}) + "\n")
        for snapshot in recording.snapshots:
            file.write(json.dumps({"snapshot": snapshot.model_dump(mode="json")}) + "\n")
        for signature in recording.signatures:
            file.write(json.dumps({"signature": signature.model_dump(mode="json")}) + "\n")


def read_recording(path: Path) -> Recording:
    """Read a recording, or any trace that `read_trace` knows. Raises ConfigurationError."""
    trace = read_trace(path)
    snapshots, signatures, started_at_s = [], [], 0.0
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        try:
            if line.startswith('{"started_at_s"'):
                started_at_s = float(json.loads(line)["started_at_s"])
            elif line.startswith('{"snapshot"'):
                snapshots.append(ReplicaSnapshot.model_validate(json.loads(line)["snapshot"]))
            elif line.startswith('{"signature"'):
                signatures.append(Signature.model_validate(json.loads(line)["signature"]))
        except (ValueError, ValidationError) as error:
            raise ConfigurationError(f"{path}, line {number}: {error}") from error
    return Recording(trace=trace, snapshots=tuple(snapshots), started_at_s=started_at_s, signatures=tuple(signatures))
