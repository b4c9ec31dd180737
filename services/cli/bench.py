"""``wisp bench``: the benchmarks of ``loadtests.bench``, which stand above the service and run without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

_ROOT = Path(__file__).parents[2]
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

app = typer.Typer(no_args_is_help=True, help="Measure what paging costs and gains, beside vLLM's own offloaders.")


def run_package(name: str, arguments: list[str], package: str = "loadtests.bench") -> None:
    """Run ``python -m package name arguments`` and end with its exit code."""
    command = [sys.executable, "-m", package, name, *arguments]
    environment = os.environ | {"PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    raise typer.Exit(subprocess.run(command, check=False, env=environment).returncode)


@app.command(context_settings=PASS_ON)
def decode(context: typer.Context) -> None:
    """Time per decode step: resident, paged, and offloaded by vLLM."""
    run_package("decode", context.args)


@app.command(context_settings=PASS_ON)
def prefill(context: typer.Context) -> None:
    """Time to first token."""
    run_package("prefill", context.args)


@app.command(context_settings=PASS_ON)
def latency(context: typer.Context) -> None:
    """`decode` and `prefill` with one engine for each mode."""
    run_package("latency", context.args)


@app.command(context_settings=PASS_ON)
def budget(context: typer.Context) -> None:
    """Peak of GPU memory by the driver while another process holds the rest of the card."""
    run_package("budget", context.args)


@app.command(context_settings=PASS_ON)
def identity(context: typer.Context) -> None:
    """Tokens and log-probabilities of paged engines against resident ones, on a GPU."""
    run_package("identity", context.args)


@app.command(context_settings=PASS_ON)
def resize(context: typer.Context) -> None:
    """Pause of the engine while memory moves between experts and KV."""
    run_package("resize", context.args)


@app.command(context_settings=PASS_ON)
def online(context: typer.Context) -> None:
    """A live service whose work has phases: divided online, and by every static split."""
    run_package("online", context.args)


@app.command(context_settings=PASS_ON)
def prefetch(context: typer.Context) -> None:
    """Prefetch of predicted experts, on against off."""
    run_package("prefetch", context.args)


@app.command(context_settings=PASS_ON)
def service(context: typer.Context) -> None:
    """A whole service under load: budget from outside, an engine killed, every token compared."""
    run_package("service", context.args)


@app.command(context_settings=PASS_ON)
def pager_overhead(context: typer.Context) -> None:
    """What paging costs by itself."""
    run_package("pager-overhead", context.args)


@app.command(context_settings=PASS_ON)
def fairness(context: typer.Context) -> None:
    """What a tenant that floods, and one that thrashes the expert cache, cost another."""
    run_package("fairness", context.args, "loadtests.service")


@app.command(context_settings=PASS_ON)
def faults(context: typer.Context) -> None:
    """Parts of a service killed while turns run: lost turns, recovery times, answers."""
    run_package("faults", context.args, "loadtests.service")


@app.command(context_settings=PASS_ON)
def streams(context: typer.Context) -> None:
    """Many streams held open at once."""
    run_package("streams", context.args, "loadtests.service")


@app.command(context_settings=PASS_ON)
def malformed(context: typer.Context) -> None:
    """Broken and hostile requests; none may get a 5xx."""
    run_package("malformed", context.args, "loadtests.service")


@app.command(context_settings=PASS_ON)
def routing(context: typer.Context) -> None:
    """Time of a routing decision, and its regret against scoring every replica."""
    run_package("routing", context.args, "loadtests.placement")


@app.command(context_settings=PASS_ON)
def placement(context: typer.Context) -> None:
    """Expert copies and latency by router, on simulated or on real replicas."""
    run_package("placement", context.args, "loadtests.placement")


@app.command(context_settings=PASS_ON)
def overhead(context: typer.Context) -> None:
    """What ingress and router add to a turn."""
    run_package("overhead", context.args, "loadtests.placement")
