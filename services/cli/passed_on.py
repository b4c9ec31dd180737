"""Commands that another package of this project runs: it stands above the service, so it is started, not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import typer

_ROOT = Path(__file__).parents[2]
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def pass_on(app: typer.Typer, package: str, helps: Mapping[str, str]) -> None:
    """Give ``app`` one command for each name in ``helps``: ``python -m package name ...``, its options included."""
    for name, text in helps.items():
        app.command(name, help=text, context_settings=_PASS_ON)(_runner(package, name))


def _runner(package: str, name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        command = [sys.executable, "-m", package, name, *context.args]
        environment = os.environ | {"PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        raise typer.Exit(subprocess.run(command, check=False, env=environment).returncode)

    return run
