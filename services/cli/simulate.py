"""``wisp simulate``: the simulator's commands, of ``loadtests.simulate``, which stands above the service."""

from __future__ import annotations

import typer

from services.cli.bench import PASS_ON, run_package

app = typer.Typer(no_args_is_help=True, help="Judge policies, splits and routers before they touch a replica.")


@app.command(context_settings=PASS_ON)
def run(context: typer.Context) -> None:
    """A workload under policies and static splits, side by side."""
    run_package("run", context.args, "loadtests.simulate")


@app.command(context_settings=PASS_ON)
def compare(context: typer.Context) -> None:
    """Every policy against the oracle, on five workflows at three budgets."""
    run_package("compare", context.args, "loadtests.simulate")


@app.command(context_settings=PASS_ON)
def replay(context: typer.Context) -> None:
    """A recording of a live service replayed in the simulator, its latencies against the recorded ones."""
    run_package("replay", context.args, "loadtests.simulate")


@app.command(context_settings=PASS_ON)
def scale(context: typer.Context) -> None:
    """How fast the simulator is, from one replica to ten thousand."""
    run_package("scale", context.args, "loadtests.simulate")
