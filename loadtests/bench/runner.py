"""Engine processes one after the other: rows come back, and an engine that fails is a row with its error."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from loadtests.bench.job import Job
from loadtests.report import Measured
from loadtests.rows import Row

_ROOT = Path(__file__).parents[2]
_LEAST_S = 15.0  # no engine starts in less
_LOG_LINES = 15  # of a failed engine, for its row
_KILL_S = 60.0  # until the server has told of a killed engine: tens of GB of locked memory take their time


class EngineServer:
    """The process that engine processes are forked from; see `loadtests.bench.child`."""

    def __init__(self, directory: Path, env: dict[str, str]) -> None:
        """Start it. It imports for seconds; the first `run` waits for that.

        Args:
            directory: where jobs, rows and logs go.
            env: environment of all engines, on top of this process's.
        """
        self._directory = directory
        self._log = directory / "server.log"
        path = f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"
        from_server, to_runner = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "loadtests.bench.child", str(to_runner)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(to_runner,),
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": path, **env},
            )
        os.close(to_runner)
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, args=(from_server,))
        self._reader.start()
        self._is_ready = False

    def run(self, name: str, job: Job, timeout_s: float) -> list[Row]:
        """Run one engine and wait for its lines; the last one is an error unless it finished."""
        rows, log = self._directory / f"{name}.jsonl", self._directory / f"{name}.log"
        path = self._directory / f"{name}.json"
        path.write_text(job.model_dump_json())
        until_s = time.monotonic() + timeout_s
        problem = self._run({"job": str(path), "rows": str(rows), "log": str(log)}, until_s, timeout_s)
        lines = _lines(rows)
        if lines and lines[-1].get("done"):
            return lines[:-1]
        source = log if log.exists() else self._log
        said = [line for line in source.read_text(errors="replace").splitlines() if line.strip()][-_LOG_LINES:]
        error = f"{problem}: {said[-1] if said else 'it said nothing'}"
        return [*lines, {"mode": job.engine.mode, "error": error, "log": said}]

    def stop(self) -> None:
        """Kill it; engine processes end with `run`."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._reader.join()

    def _run(self, request: dict[str, str], until_s: float, timeout_s: float) -> str | None:
        """What went wrong, or None."""
        pid = None
        try:
            if not self._is_ready:
                self._answer(until_s)
                self._is_ready = True
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            pid = int(self._answer(until_s)["pid"])
            code = int(self._answer(until_s)["exit_code"])
        except queue.Empty:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                self._answer(time.monotonic() + _KILL_S)
            return f"no end within {timeout_s:.2g} s"
        except (BrokenPipeError, _ServerEndedError):
            return f"the engines' server ended with exit code {self._process.wait()}"
        return f"exit code {code}" if code else None

    def _answer(self, until_s: float) -> dict[str, Any]:
        """Its next message. Raises queue.Empty when none comes in time, _ServerEndedError when none will."""
        answer = self._answers.get(timeout=max(0.0, until_s - time.monotonic()))
        if not answer:
            raise _ServerEndedError
        return answer

    def _read(self, from_server: int) -> None:
        with os.fdopen(from_server) as lines:
            for line in lines:
                self._answers.put(json.loads(line))
        self._answers.put({})


class _ServerEndedError(Exception):
    """No further answer comes."""


def _lines(path: Path) -> list[Row]:
    """What an engine process wrote; a line cut off by a kill is left out."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def run_jobs(
    jobs: Sequence[tuple[str, Job]],
    *,
    on_rows: Callable[[Measured], None],
    say: Callable[[str], None],
    log_dir: Path | None = None,
    deadline_s: float | None = None,
) -> Measured:
    """Run the jobs in order, each in a process of its own. What their environments share serves the imports.

    Args:
        jobs: each with a name for its files.
        on_rows: called with everything measured so far after each job, to save it.
        say: progress for a person.
        log_dir: where the engines' logs stay; None: they go.
        deadline_s: seconds from now by which all are done: later ones are cut off or not run, and their rows say so.
    """
    measured = Measured()
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        directory = log_dir or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        server: EngineServer | None = None
        try:
            for name, job in jobs:
                job_started_s = time.monotonic()
                left_s = math.inf if deadline_s is None else deadline_s - (job_started_s - started_s)
                if left_s <= _LEAST_S:
                    measured.rows.append({"mode": job.engine.mode, "error": f"not run: {left_s:.0f} s were left"})
                    continue
                server = server or EngineServer(directory, _common_env(jobs))
                lines = server.run(name, job, min(left_s, job.engine.timeout_s))
                _take(measured, job, lines)
                say(f"{name}: {len(lines) - 1} rows in {time.monotonic() - job_started_s:.0f} s")
                on_rows(measured)
        finally:
            if server is not None:
                server.stop()
    on_rows(measured)
    return measured


def _common_env(jobs: Sequence[tuple[str, Job]]) -> dict[str, str]:
    """What all engines want: a mode's own variables must not reach the next mode, whose process is a fork too."""
    return dict(set.intersection(*(set(job.engine.env.items()) for _, job in jobs)))


def _take(measured: Measured, job: BaseModel, lines: list[Row]) -> None:
    for line in lines:
        if "hardware" in line:
            measured.hardware, measured.versions = line["hardware"], line["versions"]
        else:
            measured.rows.append(line)
