"""Command line of the benchmarks of placement."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from loadtests.bench.report import result_path, write_result
from loadtests.bench.runner import Measured
from wisp_core.errors import WispError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Output = Annotated[Path | None, typer.Option(help="The results file; else a new one under loadtests/results.")]


@app.command()
def routing(
    replicas: Annotated[int, typer.Option(min=1)] = 1000,
    sessions: Annotated[int, typer.Option(min=1)] = 100_000,
    decisions: Annotated[int, typer.Option(min=100, help="Decisions of each kind that are timed.")] = 5000,
    output: Output = None,
) -> None:
    """Time of a routing decision, and its regret against scoring every replica in full."""
    from loadtests.placement.decisions import DecisionsConfig, measure, summarize

    config = DecisionsConfig(num_replicas=replicas, num_sessions=sessions, decisions=decisions)
    rows = measure(config, _say)
    _finish(config, rows, summarize(rows), output)


@app.command()
def placement(
    turns: Annotated[int | None, typer.Option(min=100, help="Turns of each simulated run.")] = None,
    output: Output = None,
) -> None:
    """Expert copies and latency with WiSP's router, Serve's power of two, and consistent hashing, simulated."""
    from loadtests.placement.simulated import SimulatedConfig, measure, summarize

    config = SimulatedConfig() if turns is None else replace(SimulatedConfig(), num_turns=turns)
    rows = measure(config, _say)
    _finish(config, rows, summarize(rows), output)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: an error that the operator can fix is one message, not a traceback."""
    try:
        app(arguments)
    except WispError as error:
        typer.secho(f"wisp bench: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2)


def _finish(config: Any, rows: list[dict[str, Any]], summary: dict[str, Any], output: Path | None) -> None:
    from loadtests.bench.child.hardware import hardware, versions

    measured = Measured(rows=rows, hardware=hardware(), versions=versions())
    path = (output or result_path(config.name, "cpu")).resolve()
    write_result(path, config, "wisp bench " + shlex.join(sys.argv[1:]), measured, summary)
    typer.echo(json.dumps({"benchmark": config.name, "file": str(path)} | summary))


def _say(text: str) -> None:
    typer.echo(text, err=True)
