"""Those of ``wisp bench`` that are about placement; what is heavy is imported when one is called."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from loadtests.command_line import say
from loadtests.report import Measured, Merge, Output, finish, merge_results, result_path, write_result
from loadtests.rows import Row
from services.environment import prepare_driver
from wisp_core.errors import ConfigurationError

if TYPE_CHECKING:
    from loadtests.placement.live import LiveConfig

app = typer.Typer()


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
    _run(config, lambda _: measure(config, say), summarize, output)


@app.command()
def placement(
    is_live: Annotated[bool, typer.Option("--live", help="Real engines on this machine's CPU.")] = False,
    turns: Annotated[int | None, typer.Option(min=16, help="Turns of each run.")] = None,
    router: Annotated[str | None, typer.Option(help="Live: these only, such as working_set,power_of_two.")] = None,
    work: Annotated[str | None, typer.Option(help="Live: these only, such as topics.")] = None,
    seed: Annotated[str | None, typer.Option(help="Live: these only, such as 0,1.")] = None,
    merge: Merge = None,
    work_dir: Annotated[Path | None, typer.Option(help="Live: where model, state and logs go.")] = None,
    output: Output = None,
) -> None:
    """Expert copies and latency with WiSP's router, Serve's power of two, and consistent hashing; simulated, or live.

    Live runs of some routers, works or seeds make files that can be merged.
    """
    changes: dict[str, Any] = {} if turns is None else {"num_turns": turns}
    if is_live:
        prepare_driver()  # before Ray is imported
        from loadtests.placement.live import LiveConfig

        base = replace(LiveConfig(), **changes)
        if merge:
            _merge(base, merge, output)
            return
        names = {"routers": router, "works": work, "seeds": seed}
        chosen: dict[str, Any] = {name: tuple(text.split(",")) for name, text in names.items() if text is not None}
        if seed is not None:
            chosen["seeds"] = tuple(map(int, chosen["seeds"]))
        _live(base, replace(base, **chosen), work_dir, output)
        return
    from loadtests.placement.simulated import SimulatedConfig, measure, summarize

    config = replace(SimulatedConfig(), **changes)
    _run(config, lambda _: measure(config, say), summarize, output)


@app.command()
def overhead(
    requests: Annotated[int, typer.Option(min=10, help="One-token answers on each way.")] = 1000,
    work_dir: Annotated[Path | None, typer.Option(help="Where model, state and logs go.")] = None,
    output: Output = None,
) -> None:
    """What ingress and router add to a turn, against calling a replica's own app directly."""
    prepare_driver()  # before Ray is imported
    from loadtests.placement.overhead import OverheadConfig, measure, summarize

    config = OverheadConfig(requests=requests)
    _run(config, lambda scratch: measure(config, work_dir or scratch, say), summarize, output)


@app.command()
def co_schedule(output: Output = None) -> None:
    """Turns that come at once to one engine: first come first served, and held until their experts fit."""
    from loadtests.placement.co_schedule import CoScheduleConfig, measure, summarize

    config = CoScheduleConfig()
    _run(config, lambda scratch: measure(config, scratch, say), summarize, output)


@app.command()
def working_sets(output: Output = None) -> None:
    """How well working sets are foretold on a real engine, whether safe sizes are safe, and what counting costs."""
    from loadtests.placement.working_sets import PredictionConfig, measure, summarize

    config = PredictionConfig()
    _run(config, lambda scratch: measure(config, scratch, say), summarize, output)


def _run(
    config: Any, measure: Callable[[Path], list[Row]], summarize: Callable[[list[Row]], Row], output: Path | None
) -> None:
    """Measure with a directory that goes afterwards, and tell."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(Path(scratch))
    finish(output or result_path(config.name), config, Measured.here(rows), summarize(rows))


def _live(base: LiveConfig, config: LiveConfig, work_dir: Path | None, output: Path | None) -> None:
    """Measure what ``config`` names of ``base``; the file says ``base``, whose rest other runs measure."""
    from loadtests.placement.live import measure, summarize

    path = output or result_path(config.name)

    def keep(rows: list[Row]) -> None:
        write_result(path, base, Measured.here(rows), summarize(rows))

    _run(base, lambda scratch: measure(config, work_dir or scratch, say, keep), summarize, path)


def _merge(base: LiveConfig, paths: Sequence[Path], output: Path | None) -> None:
    """One file of what several machines, or parts of one, have measured of ``base``; each seed's routers on one."""
    from loadtests.placement.live import summarize

    for path in paths:
        if json.loads(path.read_text())["config"] != json.loads(json.dumps(asdict(base))):
            raise ConfigurationError(f"{path}: it has figures of other settings; give another file")
    merge_results(output or result_path(base.name), paths, summarize, is_machine_shared=False)
