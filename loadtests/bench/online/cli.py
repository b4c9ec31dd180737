"""Commands of ``wisp bench`` that run a live service; everything heavy is imported when one is called."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtests.bench import options, report
from loadtests.bench.runner import Measured
from services.environment import prepare_driver

Output = Annotated[Path | None, typer.Option(help="The results file; else a new one under loadtests/results.")]

_ONLINE_COLUMNS = ("policy", "cap", "turns_per_s", "makespan_s", "ttft_p95_s", "failed_turns", "resizes", "bytes_moved")
_BALLOON_COLUMNS = (
    "barrier",
    "outcome",
    "kv_blocks_before",
    "kv_blocks",
    "applied_s",
    "longest_running_s",
    "turns_in_flight",
    "failed_turns",
)


def online(
    policy: Annotated[str, typer.Option(help="Divides the budget while the service runs, or none.")] = "mv_wsa",
    caps: Annotated[str | None, typer.Option(help="Static splits beside it, slots per layer: 8,16; or none.")] = None,
    workflow: Annotated[str, typer.Option(help="One of loadtests.bench.online.workload.PHASES.")] = "shifts",
    turns: Annotated[int | None, typer.Option(min=1, help="Turns of the fixed set.")] = None,
    seed: Annotated[int, typer.Option(help="Of the set.")] = 0,
    deadline_s: Annotated[float | None, typer.Option(min=1, help="Cut each way after so many seconds.")] = None,
    merge: Annotated[list[Path] | None, typer.Option(help="Run nothing: rows of this results file; again.")] = None,
    record: Annotated[Path | None, typer.Option(help="Directory for recordings, for wisp simulate replay.")] = None,
    output: Output = None,
    work_dir: Annotated[Path | None, typer.Option(help="Where the model and the service's state go.")] = None,
) -> None:
    """Turns per second of a live service whose work has phases: divided online, and by every static split (CPU).

    Ways may run in processes of their own (--policy none --caps 16, and --caps none), and be merged afterwards.
    """
    # Ray reads these when it is imported, and the service imports Ray.
    prepare_driver()
    from loadtests.bench.online import command
    from loadtests.bench.online.config import OnlineConfig

    config = OnlineConfig(policy=policy, workflow=workflow, seed=seed)
    given: dict[str, Any] = {"num_turns": turns, "deadline_s": deadline_s}
    if caps is not None:
        given["caps"] = () if caps == "none" else options.integers(caps)
    config = dataclasses.replace(config, **{name: value for name, value in given.items() if value is not None})
    path = (output or report.result_path(config.name, "cpu")).resolve()
    if merge:
        result = command.merge(merge, path)
    else:
        result = command.measure(config, path, report.command_line(), record=record, work_dir=work_dir, say=_say)
    report.print_table(f"{result.config.name}: {result.config.workflow}", result.measured.rows, _ONLINE_COLUMNS)
    typer.echo(report.last_line(result.config, path, result.measured, result.summary))
    if any("error" in row for row in result.measured.rows):
        raise typer.Exit(1)


def balloon(
    output: Output = None,
    work_dir: Annotated[Path | None, typer.Option(help="Where the model and the service's state go.")] = None,
) -> None:
    """How soon KV blocks leave a pool that is in use: by the balloon, and behind a drained barrier (CPU)."""
    prepare_driver()  # before Ray is imported
    from loadtests.bench.child.hardware import hardware, versions
    from loadtests.bench.online.balloon import BalloonConfig, run_balloon, summarize

    config = BalloonConfig()
    path = (output or report.result_path(config.name, "cpu")).resolve()
    with tempfile.TemporaryDirectory() as scratch:
        rows = run_balloon(config, work_dir or Path(scratch), _say)
    measured, summary = Measured(rows=rows, hardware=hardware(), versions=versions()), summarize(rows)
    report.write_result(path, config, report.command_line(), measured, summary)
    report.print_table(config.name, rows, _BALLOON_COLUMNS)
    typer.echo(report.last_line(config, path, measured, summary))


def _say(text: str) -> None:
    typer.echo(text, err=True)
