"""Commands of packages that stand above the service, so that they are started, not imported: their options, too."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

_ROOT = Path(__file__).parents[2]
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def pass_on(app: typer.Typer, name: str, package: str, help_text: str) -> None:
    """Give ``app`` a command ``name`` that is ``python -m package``."""

    def run(context: typer.Context) -> None:
        command = [sys.executable, "-m", package, *(context.args or ["--help"])]
        environment = os.environ | {"PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        # In this process's place, so that a signal reaches whoever has something to stop.
        os.execve(sys.executable, command, environment)

    app.command(name, help=help_text, context_settings=_PASS_ON)(run)
