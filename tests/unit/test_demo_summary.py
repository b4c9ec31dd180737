"""What `wisp demo` shows at its end is readable in a terminal, and in a file, of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from services.demo.client import TurnResult
from services.demo.drive import SessionFigures
from services.demo.sampler import MemorySampler
from services.demo.summary import join, print_replica, session_table
from services.demo.workload import AgentSpec
from wisp_core.contracts import Decision, DecisionRecord, Outcome, Placement, ResizeOutcome, Signature, Split

REPLICA = "vr3bbh0o"
FEW, MANY = Split(cap=11, kv_blocks=314), Split(cap=21, kv_blocks=194)


def outcome(revision: int, after: Split, how: Outcome, at_s: float) -> ResizeOutcome:
    return ResizeOutcome(
        replica_id=REPLICA,
        revision=revision,
        outcome=how,
        reason=f"{how} for a reason",
        before=FEW,
        after=after,
        policy="mv_wsa",
        plan_reason=f"reason of {revision}",
        bytes_moved=3 << 20,
        at_s=at_s,
    )


def decision(revision: int) -> DecisionRecord:
    return DecisionRecord(
        replica_id=REPLICA,
        policy="mv_wsa",
        before=FEW,
        budget_bytes=1 << 20,
        floor_blocks=129,
        demand_blocks=274,
        mean_turns=2.5,
        decode_steps_per_s=40.0,
        prefill_steps_per_s=3.0,
        decode_misses_per_step=6.25,
        decision=Decision(split=MANY, reason=f"reason of {revision}"),
        plan_revision=revision,
    )


def printed(*outcomes: ResizeOutcome) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    resizes = join(outcomes, [decision(1)])
    sampler = MemorySampler({REPLICA: []}, {REPLICA: 1 << 20})
    print_replica(console, REPLICA, FEW, MANY, resizes, sampler)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_each_resize_says_what_was_seen_decided_and_done_the_oldest_first() -> None:
    lines = printed(outcome(2, FEW, Outcome.DEFERRED, 20.0), outcome(1, MANY, Outcome.APPLIED, 10.0))
    assert max(map(len, lines)) <= 80
    assert " ".join(" ".join(lines).split()) == (
        "Replica vr3bbh0o: 11 slots, 314 blocks at the start, 21 slots, 194 blocks at the end "
        "11 slots, 314 blocks -> 21 slots, 194 blocks; applied: applied for a reason "
        "saw floor 129, demand 274 blocks; 2.5 turns; 40.0 decode and 3.0 prefill steps/s; 6.2 misses/step "
        "mv_wsa: reason of 1 "
        "3.0 MiB moved; resident from outside, MiB: experts 0.0, KV 0.0 -> experts 0.0, KV 0.0 "
        "11 slots, 314 blocks -> 11 slots, 314 blocks; deferred: deferred for a reason "
        "saw what the log no longer has "
        "mv_wsa: reason of 2 "
        "3.0 MiB moved; resident from outside, MiB: experts 0.0, KV 0.0 -> experts 0.0, KV 0.0"
    )
    assert printed()[-1] == "no resize"


def test_a_session_is_one_line() -> None:
    key = "initech/user-0/burst-0-1"
    figures = SessionFigures(AgentSpec(tenant="initech", user="user-0", session_id="burst-0-1", topic=4))
    result = {"answer": {}, "prompt_tokens": 100, "completion_tokens": 21, "decode_s": 0.5}
    figures.results = [TurnResult(ttft_s=0.25, **result), TurnResult(ttft_s=None, error="lost", **result)]
    console = Console(file=io.StringIO(), width=80)
    placement = Placement(session_key=key, replica_id=REPLICA, version=1, reason="new")
    signature = Signature(key=key, num_layers=1, num_experts=8, weights=b"", hits=99, lookups=100)
    console.print(session_table({key: figures}, {key: placement}, {key: signature}))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines()[-1].split() == [key, REPLICA, "2", "1", "0.25", "40.0", "99%"]
