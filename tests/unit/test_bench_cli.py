"""What the options of ``wisp bench`` change in a configuration, and that the others leave it as it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from loadtests.bench import cli, configs
from loadtests.bench.modes import Mode
from loadtests.bench.prefetch import prefetch_h200
from loadtests.report import Measured
from loadtests.shapes import SHAPES


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Configurations that would have run, on a machine without a GPU."""
    found: list[Any] = []
    monkeypatch.setattr(configs, "is_gpu_machine", lambda: False)
    monkeypatch.setattr(cli, "_measure", lambda config, *_: found.append(config))
    return found


@pytest.mark.parametrize(
    ("command", "default", "changed"),
    [
        ("decode --cap 0.25,0.5", configs.decode_cpu(), {"fractions": (0.25, 0.5)}),
        ("decode --batch 1,4 --timed-tokens 9", configs.decode_cpu(), {"batches": (1, 4), "timed_tokens": 9}),
        ("decode --baselines none", configs.decode_cpu(), {"baselines": ()}),
        (
            "decode --baselines uva_experts:0.25",
            configs.decode_cpu(),
            {"baselines": ((Mode.UVA_EXPERTS, 0.25),)},
        ),
        (
            "prefill --cap 0.5 --modes resident,paged --prompt-tokens 32,64 --chunk-tokens 128",
            configs.prefill_cpu(),
            {
                "fraction": 0.5,
                "modes": (Mode.RESIDENT, Mode.PAGED),
                "prompt_tokens": (32, 64),
                "chunk_tokens": (128,),
            },
        ),
        (
            "resize --vram-budget-gb 1.5 --step-mib 2 --resizes 4 --traffic 3",
            configs.resize_cpu(),
            {"budget_bytes": 1_500_000_000, "step_bytes": 2 << 20, "resizes": 4, "resizes_under_traffic": 3},
        ),
        (
            "return --prompt-tokens 64 --new-tokens 8,16 --repeats 2",
            configs.return_cpu(),
            {"prompt_tokens": 64, "new_tokens": (8, 16), "repeats": 2},
        ),
    ],
)
def test_an_option_changes_its_field_and_nothing_else(
    ran: list[Any], command: str, default: Any, changed: dict[str, Any]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    assert ended.value.code == 0
    (config,) = ran
    # `return` and `resize` run the model's own router, whatever the configuration says.
    assert dataclasses.replace(config, engine=default.engine) == dataclasses.replace(default, **changed)
    assert dataclasses.replace(config.engine, routing=default.engine.routing) == default.engine


@pytest.mark.parametrize(
    ("command", "default", "changed"),
    [
        ("budget --vram-budget-gb 16,24", configs.budget_h200(), {"budgets_bytes": (16 * 10**9, 24 * 10**9)}),
        ("identity", configs.identity_h200(), {}),
        (
            "prefetch --caps 8,16 --batch 1 --guesses 0,2",
            prefetch_h200(),
            {"caps": (8, 16), "batches": (1,), "guesses": (0, 2)},
        ),
        ("decode --cap 0.25", configs.decode_h200(), {"fractions": (0.25,)}),
    ],
)
def test_an_option_changes_its_field_where_there_is_a_gpu(
    ran: list[Any], monkeypatch: pytest.MonkeyPatch, command: str, default: Any, changed: dict[str, Any]
) -> None:
    monkeypatch.setattr(configs, "is_gpu_machine", lambda: True)
    monkeypatch.setattr(cli, "concurrency_by_cap", lambda *_: {})
    with pytest.raises(SystemExit):
        cli.main(command.split())
    (config,) = ran
    assert dataclasses.replace(config, engine=default.engine) == dataclasses.replace(default, **changed)


def test_latency_changes_both_configurations_and_runs_what_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs: list[Any] = []

    def run(found: list[Any], **_: Any) -> Measured:
        jobs.extend(found)
        rows = [{"benchmark": name, "mode": "paged", "error": "not run"} for name in ("decode", "prefill")]
        return Measured(rows=rows, hardware={}, versions={})

    monkeypatch.setattr(configs, "is_gpu_machine", lambda: False)
    monkeypatch.setattr(cli, "run_jobs", run)
    words = f"latency --cap 0.25,0.5 --prompts paged --only paged,resident --output {tmp_path}"
    with pytest.raises(SystemExit):
        cli.main(words.split())
    assert [job.engine.mode for _, job in jobs] == [Mode.PAGED, Mode.RESIDENT]
    experts = SHAPES[configs.decode_cpu().engine.model].experts
    assert jobs[0][1].decode.caps == (experts // 4, experts // 2)
    assert jobs[0][1].prefill is not None
    assert jobs[1][1].prefill is None, "only the paged prompts are timed"


def test_model_and_host_memory_change_the_engine(ran: list[Any]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["decode", "--model", "tiny", "--routing", "real", "--host-memory-gb", "2"])
    (config,) = ran
    assert (config.engine.model, config.engine.routing) == ("tiny", "real")
    assert config.engine.wisp == configs.decode_cpu().engine.wisp | {"host_memory_bytes": 2 * 10**9}
