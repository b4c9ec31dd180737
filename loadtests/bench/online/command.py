"""What ``wisp bench online`` does with a service: measures ways, and keeps what it has after each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from loadtests.bench.online import run
from loadtests.bench.online.config import OnlineConfig
from loadtests.bench.online.figures import Row
from loadtests.bench.online.results import Result, result_of, save
from loadtests.report import Measured


def measure(
    config: OnlineConfig,
    path: Path,
    *,
    record: Path | None,
    work_dir: Path | None,
    say: Callable[[str], None],
) -> Result:
    """Run every way of ``config``; ``path`` is written after each."""

    def result(rows: list[Row]) -> Result:
        return result_of(config, Measured.here(rows))

    with tempfile.TemporaryDirectory() as scratch:
        rows = run.run_online(
            config,
            work_dir or Path(scratch),
            say=say,
            on_rows=lambda rows: save(result(rows), path),
            record=record,
        )
    return result(rows)
