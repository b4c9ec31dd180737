"""``wisp bench`` and ``wisp simulate`` are the packages behind them, with all their commands and options."""

import signal
import subprocess
import sys
import time
from pathlib import Path

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


def test_a_signal_reaches_the_benchmark_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.cli.main", "bench", "routing", "--output", str(tmp_path / "x.json")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        assert "replicas" in started.stderr.readline(), "it tells its progress"
        started.send_signal(signal.SIGTERM)
        began_s = time.monotonic()
        started.stderr.read()
        assert time.monotonic() - began_s < 10, "nobody is left who could write"
        assert started.wait(10) != 0
