"""Those of ``wisp bench`` that are about placement; what is heavy is imported when one is called."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadtests.command_line import say
from loadtests.report import Measured, Row, finish, merge_results, result_path, write_result
from wisp_core.errors import ConfigurationError

if TYPE_CHECKING:
    from loadtests.placement.live import LiveConfig

app = typer.Typer()

Output = Annotated[Path | None, typer.Option(help="The results file; else a new one under loadtests/results.")]


@app.command()
def routing(
    replicas: Annotated[int, typer.Option(min=1)] = 1000,
    sessions: Annotated[int, typer.Option(min=1)] = 100_000,
    decisions: Annotated[int, typer.Option(min=100, help="Decisions of each kind that are timed.")] = 5000,
    output: Output = None,
) -> None:
    """Time of a routing decision, and its regret against scoring every replica in full."""
    from loadtests.placement.routing import DecisionsConfig, measure, summarize

    config = DecisionsConfig(num_replicas=replicas, num_sessions=sessions, decisions=decisions)
    rows = measure(config, say)
    _finish(config, rows, summarize(rows), output)


@app.command()
def placement(
    is_live: Annotated[bool, typer.Option("--live", help="Real engines on this machine's CPU.")] = False,
    turns: Annotated[int | None, typer.Option(min=16, help="Turns of each run.")] = None,
    router: Annotated[str | None, typer.Option(help="Live: these only, such as working_set,power_of_two.")] = None,
    work: Annotated[str | None, typer.Option(help="Live: these only, such as topics.")] = None,
    seed: Annotated[str | None, typer.Option(help="Live: these only, such as 0,1.")] = None,
    join: Annotated[
        list[Path] | None, typer.Option(help="Live: measure nothing, join the rows of these files.")
    ] = None,
    work_dir: Annotated[Path | None, typer.Option(help="Live: where model, state and logs go.")] = None,
    output: Output = None,
) -> None:
    """Expert copies and latency with WiSP's router, Serve's power of two, and consistent hashing; simulated, or live.

    A live run adds to the rows that ``output`` has of other routers with the same settings.
    """
    if is_live:
        from services.environment import prepare_driver

        # Ray reads these when it is imported, and the service imports Ray.
        prepare_driver()
        from loadtests.placement.live import LiveConfig

        base = LiveConfig() if turns is None else replace(LiveConfig(), num_turns=turns)
        if join:
            _join(base, join, output)
            return
        config = replace(
            base,
            routers=base.routers if router is None else tuple(router.split(",")),
            works=base.works if work is None else tuple(work.split(",")),
            seeds=base.seeds if seed is None else tuple(map(int, seed.split(","))),
        )
        _live(base, config, work_dir, output)
        return
    from loadtests.placement.simulated import SimulatedConfig, measure, summarize

    simulated = SimulatedConfig() if turns is None else replace(SimulatedConfig(), num_turns=turns)
    rows = measure(simulated, say)
    _finish(simulated, rows, summarize(rows), output)


@app.command()
def overhead(
    requests: Annotated[int, typer.Option(min=10, help="One-token answers on each way.")] = 1000,
    work_dir: Annotated[Path | None, typer.Option(help="Where model, state and logs go.")] = None,
    output: Output = None,
) -> None:
    """What ingress and router add to a turn, against calling a replica's own app directly."""
    from services.environment import prepare_driver

    prepare_driver()
    from loadtests.placement.overhead import OverheadConfig, measure, summarize

    config = OverheadConfig(requests=requests)
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(config, work_dir or Path(scratch), say)
    _finish(config, rows, summarize(rows), output)


@app.command()
def co_schedule(output: Output = None) -> None:
    """Turns that come at once to one engine: first come first served, and held until their experts fit."""
    from loadtests.placement.co_schedule import CoScheduleConfig, measure, summarize

    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(CoScheduleConfig(), Path(scratch), say)
    _finish(CoScheduleConfig(), rows, summarize(rows), output)


@app.command()
def working_sets(output: Output = None) -> None:
    """How well working sets are foretold on a real engine, whether safe sizes are safe, and what counting costs."""
    from loadtests.placement.working_sets import PredictionConfig, measure, summarize

    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(PredictionConfig(), Path(scratch), say)
    _finish(PredictionConfig(), rows, summarize(rows), output)


def _live(base: LiveConfig, config: LiveConfig, work_dir: Path | None, output: Path | None) -> None:
    """Measure what ``config`` names of ``base``; the file says ``base``, as other runs add the rest."""
    from loadtests.placement.live import measure, summarize

    path = output or result_path(config.name)
    measured = (config.routers, config.works, config.seeds)
    kept = [row for row in _rows_of(path, base) if not _is_of(row, *measured)] if path.exists() else []

    def keep(rows: list[Row]) -> None:
        write_result(path, base, Measured.here([*kept, *rows]), summarize([*kept, *rows]))

    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(config, work_dir or Path(scratch), say, keep)
    _finish(base, [*kept, *rows], summarize([*kept, *rows]), path)


def _join(base: LiveConfig, paths: Sequence[Path], output: Path | None) -> None:
    """One file of what several machines, or parts of one, have measured of ``base``; each seed's routers on one."""
    from loadtests.placement.live import summarize

    for path in paths:
        _rows_of(path, base)
    merge_results(output or result_path(base.name), paths, summarize, is_machine_shared=False)


def _rows_of(path: Path, base: LiveConfig) -> list[Row]:
    """Rows of a file. Raises ConfigurationError where its settings are others."""
    content = json.loads(path.read_text())
    if content["config"] != json.loads(json.dumps(asdict(base))):
        raise ConfigurationError(f"{path}: it has figures of other settings; give another file")
    rows: list[Row] = content["rows"]
    return rows


def _is_of(row: Row, routers: Sequence[str], works: Sequence[str], seeds: Sequence[int]) -> bool:
    return row["router"] in routers and row["work"] in works and row["seed"] in seeds


def _finish(config: Any, rows: list[Row], summary: Row, output: Path | None) -> None:
    finish(output or result_path(config.name), config, Measured.here(rows), summary)
