"""``wisp bench``: the benchmarks of ``loadtests.bench``, which stand above the service and run without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

_ROOT = Path(__file__).parents[2]
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

app = typer.Typer(no_args_is_help=True, help="Measure what paging costs and gains, beside vLLM's own offloaders.")


def _run(name: str, arguments: list[str], package: str = "loadtests.bench") -> None:
    command = [sys.executable, "-m", package, name, *arguments]
    environment = os.environ | {"PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    raise typer.Exit(subprocess.run(command, check=False, env=environment).returncode)


@app.command(context_settings=_PASS_ON)
def decode(context: typer.Context) -> None:
    """Time per decode step: resident, paged, and offloaded by vLLM."""
    _run("decode", context.args)


@app.command(context_settings=_PASS_ON)
def prefill(context: typer.Context) -> None:
    """Time to first token."""
    _run("prefill", context.args)


@app.command(context_settings=_PASS_ON)
def resize(context: typer.Context) -> None:
    """Pause of the engine while memory moves between experts and KV."""
    _run("resize", context.args)


@app.command(context_settings=_PASS_ON)
def online(context: typer.Context) -> None:
    """A live service whose work has phases: divided online, and by every static split."""
    _run("online", context.args)


@app.command(context_settings=_PASS_ON)
def prefetch(context: typer.Context) -> None:
    """Prefetch of predicted experts, on against off."""
    _run("prefetch", context.args)


@app.command(context_settings=_PASS_ON)
def service(context: typer.Context) -> None:
    """A whole service under load: budget from outside, an engine killed, every token compared."""
    _run("service", context.args)


@app.command(context_settings=_PASS_ON)
def pager_overhead(context: typer.Context) -> None:
    """What paging costs by itself."""
    _run("pager-overhead", context.args)


@app.command(context_settings=_PASS_ON)
def fairness(context: typer.Context) -> None:
    """What a tenant that floods, and one that thrashes the expert cache, cost another."""
    _run("fairness", context.args, "loadtests.service")


@app.command(context_settings=_PASS_ON)
def faults(context: typer.Context) -> None:
    """Parts of a service killed while turns run: lost turns, recovery times, answers."""
    _run("faults", context.args, "loadtests.service")


@app.command(context_settings=_PASS_ON)
def streams(context: typer.Context) -> None:
    """Many streams held open at once."""
    _run("streams", context.args, "loadtests.service")


@app.command(context_settings=_PASS_ON)
def malformed(context: typer.Context) -> None:
    """Broken and hostile requests; none may get a 5xx."""
    _run("malformed", context.args, "loadtests.service")
