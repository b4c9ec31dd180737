"""A benchmark's engine process: ``python -m loadtests.bench.child JOB.json ROWS.jsonl``.

It imports everything, waits for a line on stdin (so that the next engine's imports overlap with this one's run), then
writes one JSON line after the other: first the facts of the machine, then rows, at last ``{"done": true}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtests.bench.child.decode import run_decode
from loadtests.bench.child.hardware import hardware, versions
from loadtests.bench.child.prefill import run_prefill
from loadtests.bench.child.resize import run_resize
from loadtests.bench.job import JOBS, DecodeJob, PrefillJob


def main(job_path: Path, rows_path: Path) -> None:
    """Run one job."""
    text = json.loads(job_path.read_text())
    job = JOBS[text["kind"]].model_validate(text)
    if not sys.stdin.readline():
        return
    with rows_path.open("w") as file:
        for line in _lines(job):
            file.write(json.dumps(line) + "\n")
            file.flush()


def _lines(job: Any) -> Iterator[dict[str, Any]]:
    yield {"hardware": hardware(), "versions": versions()}
    if isinstance(job, DecodeJob):
        yield from run_decode(job)
    elif isinstance(job, PrefillJob):
        yield from run_prefill(job)
    else:
        yield from run_resize(job)
    yield {"done": True}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
