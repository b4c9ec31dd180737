"""``wisp simulate``: the simulator's commands."""

from __future__ import annotations

import typer

from services.cli.passed_on import pass_on

app = typer.Typer(no_args_is_help=True, help="Judge policies, splits and routers before they touch a replica.")

pass_on(
    app,
    "loadtests.simulate",
    {
        "run": "A workload under policies and static splits, side by side.",
        "compare": "Every policy against the oracle, on five workflows at three budgets.",
        "replay": "A recording of a live service replayed in the simulator, its latencies against the recorded ones.",
        "scale": "How fast the simulator is, from one replica to ten thousand.",
    },
)
