"""``wisp bench`` and ``wisp simulate`` name exactly the commands that the packages behind them have."""

import subprocess
import sys

import pytest
import typer

from loadtests.bench.cli import app as engines
from loadtests.placement.cli import app as placement
from loadtests.service.cli import app as services
from loadtests.simulate.cli import app as simulator
from services.cli.bench import app as bench
from services.cli.simulate import app as simulate


def names(*apps: typer.Typer) -> list[str]:
    return sorted(
        info.name or info.callback.__name__.replace("_", "-")  # type: ignore[union-attr]  # a command has one
        for app in apps
        for info in app.registered_commands
    )


@pytest.mark.parametrize(
    ("named", "behind"), [(bench, (engines, services, placement)), (simulate, (simulator,))], ids=["bench", "simulate"]
)
def test_every_command_is_named_once(named: typer.Typer, behind: tuple[typer.Typer, ...]) -> None:
    assert names(named) == names(*behind)


def test_options_are_passed_on() -> None:
    command = [sys.executable, "-m", "services.cli.main", "bench", "decode", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "wisp bench decode" in done.stdout
    assert "--baselines" in done.stdout
