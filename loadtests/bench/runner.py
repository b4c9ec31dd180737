"""Engine processes one after the other: rows come back, and an engine that fails is a row with its error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from loadtests.bench.job import DecodeJob, PrefillJob, ResizeJob

Row = dict[str, Any]
Job = DecodeJob | PrefillJob | ResizeJob

_ROOT = Path(__file__).parents[2]
_LEAST_S = 15.0  # no engine starts in less
_LOG_LINES = 15  # of a failed engine, for its row
_CORES_TO_LOOK_AHEAD = 8  # with fewer, the next engine's imports would disturb the one that is timed


@dataclass(slots=True)
class Measured:
    """Everything that the processes of a run said."""

    rows: list[Row] = field(default_factory=list)
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class _EngineProcess:
    """One child. It imports at once and waits for `run`."""

    def __init__(self, job: Job, directory: Path, name: str) -> None:
        self._job = job
        self.name = name
        self._rows = directory / f"{name}.jsonl"
        self._log = directory / f"{name}.log"
        path = directory / f"{name}.json"
        path.write_text(job.model_dump_json())
        command = [sys.executable, "-m", "loadtests.bench.child", str(path), str(self._rows)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, cwd=_ROOT, env=self._environment()
            )

    def run(self, timeout_s: float) -> list[Row]:
        """Let it go and wait for its lines; the last one is an error unless it finished."""
        assert self._process.stdin is not None
        problem = None
        with contextlib.suppress(BrokenPipeError):  # it died while it imported: its exit code tells
            self._process.stdin.write(b"go\n")
            self._process.stdin.close()
        try:
            code = self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.stop()
            problem = f"no end within {timeout_s:.0f} s"
        else:
            problem = f"exit code {code}" if code else None
        lines = self._lines()
        if lines and lines[-1].get("done"):
            return lines[:-1]
        log = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()][-_LOG_LINES:]
        error = f"{problem}: {log[-1] if log else 'it said nothing'}"
        return [*lines, {"mode": self._job.engine.mode, "error": error, "log": log}]

    def stop(self) -> None:
        """Kill it if it still runs."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()

    def _lines(self) -> list[Row]:
        """What it wrote; a line cut off by a kill is left out."""
        if not self._rows.exists():
            return []
        return [json.loads(line) for line in self._rows.read_text().splitlines() if line.endswith("}")]

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}", **self._job.engine.env}


def run_jobs(
    jobs: Sequence[tuple[str, Job]],
    *,
    on_rows: Callable[[Measured], None],
    say: Callable[[str], None],
    log_dir: Path | None = None,
    deadline_s: float | None = None,
) -> Measured:
    """Run the jobs in order, each in a process of its own.

    Args:
        jobs: each with a name for its files.
        on_rows: called with everything measured so far after each job, to save it.
        say: progress for a person.
        log_dir: where the engines' logs stay; None: they go.
        deadline_s: seconds from now by which all are done: later ones are cut off or not run, and their rows say so.
    """
    measured = Measured()
    look_ahead = 2 if len(os.sched_getaffinity(0)) >= _CORES_TO_LOOK_AHEAD else 1
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        directory = log_dir or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        waiting: list[_EngineProcess] = []
        try:
            for index, (name, job) in enumerate(jobs):
                # The next engine imports vLLM while this one loads its weights.
                for ahead_name, ahead in jobs[index + len(waiting) : index + look_ahead]:
                    waiting.append(_EngineProcess(ahead, directory, ahead_name))
                job_started_s = time.monotonic()
                left_s = math.inf if deadline_s is None else deadline_s - (job_started_s - started_s)
                process = waiting.pop(0)
                if left_s <= _LEAST_S:
                    process.stop()
                    measured.rows.append({"mode": job.engine.mode, "error": f"not run: {left_s:.0f} s were left"})
                    continue
                lines = process.run(min(left_s, job.engine.timeout_s))
                _take(measured, job, lines)
                say(f"{name}: {len(lines) - 1} rows in {time.monotonic() - job_started_s:.0f} s")
                on_rows(measured)
        finally:
            for process in waiting:
                process.stop()
    on_rows(measured)
    return measured


def _take(measured: Measured, job: BaseModel, lines: list[Row]) -> None:
    for line in lines:
        if "hardware" in line:
            measured.hardware, measured.versions = line["hardware"], line["versions"]
        else:
            measured.rows.append(line)
