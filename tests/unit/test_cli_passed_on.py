"""``wisp bench`` and ``wisp simulate`` are the packages behind them, with all their commands and options."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("bench", ["Usage: wisp bench", "decode", "fairness", "co-schedule", "balloon"]),
        ("bench decode --help", ["Usage: wisp bench decode", "--baselines"]),
        ("simulate --help", ["Usage: wisp simulate", "compare", "scale"]),
    ],
)
def test_what_is_behind_answers(typed: str, shown: list[str]) -> None:
    command = [sys.executable, "-m", "services.cli.main", *typed.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert [text for text in shown if text not in done.stdout] == []


def test_an_error_is_one_message_and_its_exit_code_is_passed_on() -> None:
    command = [sys.executable, "-m", "services.cli.main", "bench", "decode", "--cap", "many"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "Invalid value for '--cap'" in done.stderr
