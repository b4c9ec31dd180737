"""Workloads: equal seeds, conversations that grow, phases, and files of four formats."""

import json
from pathlib import Path

import numpy as np
import pytest

from loadtests.traces import WORKFLOWS, generate, open_sessions, workflow
from wisp_core.errors import ConfigurationError
from wisp_core.simulator.trace import Trace, TraceTurn, write_trace
from wisp_core.simulator.trace_files import read_trace


@pytest.mark.parametrize("name", WORKFLOWS)
def test_conversations_grow_by_what_was_said_and_stay_within_the_context(name: str) -> None:
    trace = generate(workflow(name, 400, max_context_tokens=8192), seed=3)
    assert abs(len(trace) - 400) <= 0.1 * 400
    assert trace.longest_tokens() <= 8192
    last: dict[int, TraceTurn] = {}
    for turn in trace:
        before = last.get(turn.session)
        if before is None:
            assert turn.prefix_tokens == 0
        else:
            assert turn.prefix_tokens == before.prompt_tokens + before.output_tokens < turn.prompt_tokens
            assert (turn.client, turn.topic, turn.tenant) == (before.client, before.topic, before.tenant)
        last[turn.session] = turn
    assert trace.num_sessions > trace.num_clients / 2


@pytest.mark.parametrize("name", WORKFLOWS)
def test_the_seed_decides_every_number_and_nothing_else_does(name: str) -> None:
    first, again, other = (generate(workflow(name, 200), seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(
        first.turns[["client", "at_s", "prompt_tokens"]], again.turns[["client", "at_s", "prompt_tokens"]]
    )
    assert not np.array_equal(first.turns["prompt_tokens"][:50], other.turns["prompt_tokens"][:50])


def test_workflows_differ_as_their_names_say() -> None:
    def medians(name: str) -> tuple[float, float]:
        turns = generate(workflow(name, 600), seed=0).turns
        return float(np.median(turns["prompt_tokens"])), float(np.median(turns["output_tokens"]))

    bursts, research, coding = medians("tool_bursts"), medians("long_research"), medians("coding_agent")
    assert bursts[0] < 4000 < coding[0] < research[0]
    assert bursts[1] < coding[1] < research[1]
    assert generate(workflow("mixed_tenants", 300), seed=0).tenants == ("acme", "globex", "initech")


def test_phases_of_a_shift_wait_for_each_other_and_alternate() -> None:
    trace = generate(workflow("phase_shift", 400), seed=0)
    assert trace.has_barriers
    assert trace.phases == ("bursts", "long contexts", "bursts", "long contexts")
    prompts = [float(np.median(trace.phase(number).turns["prompt_tokens"])) for number in range(4)]
    assert min(prompts[1], prompts[3]) > 3 * max(prompts[0], prompts[2])


def test_open_sessions_come_at_the_asked_rate_each_with_its_own_client() -> None:
    trace = open_sessions(workflow("tool_bursts", 4000), sessions_per_s=5.0, seed=1)
    assert len(trace) == 4000
    assert trace.num_clients == trace.num_sessions
    assert trace.num_sessions / trace.turns["at_s"].max() == pytest.approx(5.0, rel=0.2)


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = generate(workflow("mixed_tenants", 60), seed=5)
    measured = Trace.of([turn._replace(ttft_s=0.5, duration_s=1.5) for turn in trace], tenants=trace.tenants)
    for one in (trace, measured):
        write_trace(tmp_path / "trace.jsonl", one)
        again = read_trace(tmp_path / "trace.jsonl")
        assert np.array_equal(one.turns["prefix_tokens"], again.turns["prefix_tokens"])
        assert np.allclose(one.turns["think_s"], again.turns["think_s"])
        assert (again.tenants, again.has_measurements) == (one.tenants, one.has_measurements)


def test_cut_leaves_out_what_a_shorter_context_cannot_hold() -> None:
    trace = generate(workflow("long_research", 100), seed=0)
    assert 0 < len(trace.cut(16384)) < len(trace)
    assert trace.cut(16384).longest_tokens() <= 16384
    with pytest.raises(ConfigurationError, match="no turns"):
        trace.cut(10)


def test_azure_csv(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:47.1805900,0,12\n"
        "2024-05-10 00:00:00+00:00,900,20\n"
    )
    trace = read_trace(path)
    assert trace.turns["prompt_tokens"].tolist() == [374, 900]
    assert trace.turns["output_tokens"].tolist() == [44, 20]
    assert trace.turns["at_s"][0] == 0.0
    assert trace.turns["at_s"][1] == pytest.approx((176 * 24 - 18) * 3600 - 15 * 60 - 46.68059)


def test_burstgpt_csv_with_and_without_sessions(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n"
    )
    assert read_trace(path).turns["at_s"].tolist() == [0.0, 40.0]
    path.write_text(
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "1,a,2.0,GPT-4,100,20,120,Conversation log\n"
        "2,b,2.0,GPT-4,50,10,60,Conversation log\n"
        "9,a,2.0,GPT-4,150,30,180,Conversation log\n"
    )
    trace = read_trace(path)
    assert trace.num_sessions == 2
    assert [(t.prompt_tokens, t.prefix_tokens) for t in trace] == [(100, 0), (150, 120), (50, 0)]


def test_mooncake_sessions_come_from_hashed_blocks(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1600, "output_length": 30, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 1500, "input_length": 700, "output_length": 5, "hash_ids": [0, 9]},
        {"timestamp": 3000, "input_length": 2600, "output_length": 10, "hash_ids": [0, 1, 2, 4, 5, 6]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trace = read_trace(path)
    assert trace.num_sessions == 2
    assert [(t.at_s, t.prompt_tokens, t.prefix_tokens) for t in trace] == [
        (0, 1600, 0),
        (3.0, 2600, 1536),
        (1.5, 700, 0),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,b\n1,2\n", "known formats"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,x,1\n", "line 2"),
        ('{"timestamp": 0, "input_length": 1}\n', "line 1: KeyError 'output_length'"),
        (
            '{"wisp_trace": 1, "tenants": ["a"], "phases": ["p"], "has_barriers": false}\n{"turn": {"client": 0}}\n',
            "line 2",
        ),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp"\n', "line 2"),
        ('{"wisp_trace": 99}\n', "format 1"),
        ("", "known formats"),
    ],
)
def test_a_bad_file_is_one_message(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=said):
        read_trace(path)


def test_a_trace_with_impossible_numbers_is_refused() -> None:
    good = next(iter(generate(workflow("tool_bursts", 4), seed=0)))
    with pytest.raises(ConfigurationError, match="prefix_tokens is out of range"):
        Trace.of([good._replace(prefix_tokens=good.prompt_tokens + 1)])
    with pytest.raises(ConfigurationError, match="no turns"):
        Trace.of([])
    with pytest.raises(ConfigurationError, match="no workflow"):
        workflow("surfing", 10)
