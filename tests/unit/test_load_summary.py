"""`wisp load`: its table has Locust's final figures; a time that Locust would not take is refused at once."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.cli.load import Counters, _print_summary, run_load, run_locust
from wisp_core.errors import ConfigurationError


@pytest.mark.parametrize("run_time", ["abc", "", "30 s", "5s3m", "h", "-3"])
def test_a_time_that_locust_would_not_take_is_refused(run_time: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--run-time"):
        run_load(users=1, run_time=run_time, state_dir=tmp_path, is_own_service=False)


@pytest.mark.parametrize("run_time", ["30", "30s", "5m", "1h30m", "3h30m10s"])
def test_what_locust_takes_gets_further(run_time: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no service runs"):
        run_load(users=1, run_time=run_time, state_dir=tmp_path, is_own_service=False)


def test_the_rows_are_those_that_locust_prints_at_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key_file = tmp_path / "acme.key"
    key_file.write_text("key")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        facts = {
            "url": f"http://127.0.0.1:{unused.getsockname()[1]}",
            "model": "m",
            "key_files": {"acme": str(key_file)},
        }
        # Shorter than the period in which Locust flushes its own files.
        code, rows = run_locust(facts, users=2, run_time="2s")
    assert code == 1
    (total,) = [row for row in rows if row["Name"] == "Aggregated"]
    assert int(total["Request Count"]) == int(total["Failure Count"]) > 0
    printed = next(line.split() for line in "".join(capfd.readouterr()).splitlines() if "Aggregated" in line)
    assert printed[1] == total["Request Count"]


def test_turns_and_their_ttfts_are_not_added_up(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {"Failure Count": "0", "50%": "10", "95%": "20", "Requests/s": "1.5"}
    rows = [
        {"Type": "POST", "Name": "burst turn", "Request Count": "47", **figures},
        {"Type": "TTFT", "Name": "burst turn", "Request Count": "47", **figures},
        {"Type": "", "Name": "Aggregated", "Request Count": "94", **figures},
    ]
    _print_summary(rows, Counters({}), Counters({}))
    out = capsys.readouterr().out
    assert out.count("47") == 2
    assert "94" not in out
