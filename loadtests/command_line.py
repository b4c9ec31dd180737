"""What all commands of ``wisp bench`` and ``wisp simulate`` have in common: how they end, and what to type for them."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Sequence

import typer

from wisp_core.errors import WispError


def run(app: typer.Typer, program: str, arguments: Sequence[str] | None = None) -> None:
    """Run ``app``: an error that the operator can fix is one message, and a run that is ended stops what it started."""
    # As Ctrl-C does: Ray, Valkey and engines would outlive it. Shells start what runs in the background with SIGINT
    # ignored.
    for ended in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ended, signal.default_int_handler)
    try:
        app(arguments, prog_name=program)
    except WispError as error:
        typer.secho(f"{program}: {error}", err=True, fg=typer.colors.RED)
        sys.exit(2)


def say(text: str) -> None:
    """Tell progress."""
    typer.echo(text, err=True)


def typed_command(program: str = "wisp bench", arguments: Sequence[str] | None = None) -> str:
    """``program`` and the ``arguments`` (those of this process), without options that name places of this machine.

    Where the file went and absolute paths decide nothing of a run and exist nowhere else.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    kept = []
    while words:
        word = words.pop(0)
        option, has_value, value = word.partition("=")
        is_option = option.startswith("--")
        if is_option and not has_value and words and not words[0].startswith("--"):
            value = words[0]
            if _is_left_out(option, value):
                words.pop(0)
                continue
        elif _is_left_out(option, value if is_option else word):
            continue
        kept.append(word)
    return f"{program} {shlex.join(kept)}".rstrip()


def _is_left_out(option: str, value: str) -> bool:
    return option == "--output" or value.startswith("/")
