"""``wisp bench service``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.environment import prepare_driver


def service(
    config: Annotated[Path, typer.Option(help="The service's YAML file, such as infra/serve/gpu.yaml.")],
    model: Annotated[str | None, typer.Option(help="Instead of its model: a checkpoint, 'tiny', or a shape.")] = None,
    users: Annotated[int, typer.Option(min=1, help="Agent sessions at once.")] = 8,
    run_time: Annotated[str, typer.Option(help="As Locust takes it, such as 5m.")] = "5m",
    samples: Annotated[int, typer.Option(min=1, help="Prompts to compare with an engine that holds all experts.")] = 24,
    kill_engine: Annotated[bool, typer.Option(help="Kill one engine and time its restart.")] = True,
    phase_s: Annotated[float, typer.Option(help="Length of phases of bursts and of long documents; 0: mixed.")] = 0.0,
    long_words: Annotated[int, typer.Option(min=1, help="Words of a long document.")] = 1500,
    output: Annotated[
        Path | None, typer.Option(help="The results file; else a new one under loadtests/results.")
    ] = None,
) -> None:
    """A whole service under load: budget from outside, an engine killed, every token compared."""
    prepare_driver()  # before Ray is imported
    # Needs Ray, Locust and Valkey, which the other benchmarks run without.
    from loadtests.service.command import measure_service
    from loadtests.service.run import ServiceRun

    run = ServiceRun(
        users=users,
        run_time=run_time,
        num_samples=samples,
        is_engine_killed=kill_engine,
        phase_s=phase_s,
        long_words=long_words,
    )
    raise typer.Exit(measure_service(config, model, run, output))
