"""Those of ``wisp bench`` that load a whole service; what is heavy is imported when one is called."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from loadtests import command_line
from loadtests.report import Measured, Merge, Output, finish, merge_results, result_path, write_result
from loadtests.rows import Row
from services.environment import prepare_driver
from wisp_core.errors import ConfigurationError

app = typer.Typer()


@app.command()
def fairness(
    runs: Annotated[int, typer.Option(min=1, help="Times that each condition is measured.")] = 3,
    turns: Annotated[int, typer.Option(min=10, help="Turns of the quiet tenant in each condition.")] = 200,
    b_weight: Annotated[float, typer.Option(help="Weight of the quiet tenant; the others' is 1.")] = 9.0,
    max_condition_s: Annotated[float, typer.Option(help="A condition that takes longer ends, seconds.")] = 600.0,
    conditions: Annotated[
        str, typer.Option(help="Of alone,flood,thrash,ample; alone is needed.")
    ] = "alone,flood,thrash",
    merge: Merge = None,
    output: Output = None,
) -> None:
    """What a tenant that floods, and one that thrashes the expert cache, cost another."""
    from loadtests.service.fairness import CONDITIONS, FairnessConfig, holds, measure, summarize

    path = output or result_path("fairness")
    if merge:
        merge_results(path, merge, summarize)
        return
    chosen = tuple(conditions.split(","))
    if "alone" not in chosen or not set(chosen) <= set(CONDITIONS):
        raise ConfigurationError(f"--conditions {conditions}: give alone and some of {', '.join(CONDITIONS[1:])}")
    config = FairnessConfig(turns=turns, conditions=chosen, b_weight=b_weight, max_condition_s=max_condition_s)

    def keep(rows: list[Row]) -> None:
        write_result(path, config, Measured.here(rows), {})
        command_line.say(json.dumps(rows[-1]))

    rows = asyncio.run(measure(config, runs, keep))
    summary = summarize(rows)
    finish(path, config, Measured.here(rows), summary)
    raise typer.Exit(int(not holds(summary)))


@app.command()
def faults(
    rounds: Annotated[int, typer.Option(min=1, help="Faults, and upgrades, of each kind.")] = 20,
    kinds: Annotated[str | None, typer.Option(help="Such as engine,valkey; else all.")] = None,
    max_run_s: Annotated[float, typer.Option(help="No fault begins later, seconds.")] = 36_000.0,
    merge: Merge = None,
    output: Output = None,
) -> None:
    """Kill parts of a service while turns run: lost turns, recovery times, and the answers' tokens.

    Written after each fault. Answers of a run that was cut are rescored when it is merged.
    """
    from loadtests.service import faults as bench

    path = output or result_path("faults")
    if merge:
        for part in merge:
            bench.rescore_cut_run(part)
        summary = merge_results(path, merge, bench.summarize, is_machine_shared=False)
    else:
        chosen = tuple(bench.ALL_KINDS if kinds is None else kinds.split(","))
        if unknown := set(chosen) - set(bench.ALL_KINDS):
            raise ConfigurationError(f"--kinds {', '.join(sorted(unknown))}: there are {', '.join(bench.ALL_KINDS)}")
        config = bench.FaultsConfig(rounds=rounds, kinds=chosen, max_run_s=max_run_s)

        def keep(rows: list[Row]) -> None:
            write_result(path, config, Measured.here(rows), bench.summarize(rows))
            shown = ("kind", "lost_turns", "recovery_s", "not_recovered", "rescored", "above_limit")
            command_line.say(json.dumps({key: rows[-1][key] for key in shown if key in rows[-1]}))

        findings = bench.Findings(keep, bench.answers_path(path))
        bench.measure(config, findings)
        summary = bench.summarize(findings.rows)
        finish(path, config, Measured.here(findings.rows), summary)
    raise typer.Exit(int(not bench.holds(summary)))


@app.command()
def streams(
    streams: Annotated[int, typer.Option(min=1, help="Connections at once.")] = 1000,
    hold_s: Annotated[float, typer.Option(help="How long they are held, seconds.")] = 120.0,
    output: Output = None,
) -> None:
    """Hold many streams open at once."""
    from loadtests.service.streams import StreamsConfig, holds, measure, summarize

    config = StreamsConfig(streams=streams, hold_s=hold_s)
    rows = measure(config)
    summary = summarize(rows)
    finish(output or result_path("streams"), config, Measured.here(rows), summary)
    raise typer.Exit(int(not holds(summary)))


@app.command()
def malformed(
    requests: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 10_000,
    output: Output = None,
) -> None:
    """Send broken and hostile requests; none may get a 5xx."""
    from loadtests.service.malformed import MalformedConfig, holds, measure, summarize

    path, config = output or result_path("malformed"), MalformedConfig(requests=requests)

    def keep(row: Row) -> None:
        write_result(path, config, Measured.here([row]), summarize(row))
        command_line.say(f"{row['requests']} requests: {row['statuses']}")

    row = measure(config, keep)
    summary = summarize(row)
    finish(path, config, Measured.here([row]), summary)
    raise typer.Exit(int(not holds(summary)))


@app.command()
def service(
    config: Annotated[Path, typer.Option(help="The service's YAML file, such as infra/serve/gpu.yaml.")],
    model: Annotated[str | None, typer.Option(help="Instead of its model: a checkpoint, 'tiny', or a shape.")] = None,
    users: Annotated[int, typer.Option(min=1, help="Agent sessions at once.")] = 8,
    run_time: Annotated[str, typer.Option(help="As Locust takes it, such as 5m.")] = "5m",
    samples: Annotated[int, typer.Option(min=1, help="Prompts to compare with an engine that holds all experts.")] = 24,
    kill_engine: Annotated[bool, typer.Option(help="Kill one engine and time its restart.")] = True,
    phase_s: Annotated[float, typer.Option(help="Length of phases of bursts and of long documents; 0: mixed.")] = 0.0,
    long_words: Annotated[int, typer.Option(min=1, help="Words of a long document.")] = 1500,
    output: Output = None,
) -> None:
    """A whole service under load: budget from outside, an engine killed, every token compared."""
    prepare_driver()  # before Ray is imported
    from loadtests.service.run import ServiceRun
    from loadtests.service.service import measure_service

    run = ServiceRun(
        users=users,
        run_time=run_time,
        num_samples=samples,
        is_engine_killed=kill_engine,
        phase_s=phase_s,
        long_words=long_words,
    )
    raise typer.Exit(measure_service(config, model, run, output))
