"""The server of engine processes: ``python -m loadtests.bench.child FD``, driven by `loadtests.bench.runner`.

It imports vLLM once and forks a process for each job, which starts with everything imported and whose memory is really
free when it ends. Lines of JSON: in comes ``{"job", "rows", "log"}``, out go ``{"pid"}`` and, when that process has
ended, ``{"exit_code"}``. A process writes its rows as they come, and at last ``{"done": true}``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

from loadtests.bench.child.budget import run_budget
from loadtests.bench.child.decode import run_decode
from loadtests.bench.child.engine import build_replay
from loadtests.bench.child.hardware import facts
from loadtests.bench.child.identity import run_identity
from loadtests.bench.child.latency import run_latency
from loadtests.bench.child.online import run_online
from loadtests.bench.child.prefill import run_prefill
from loadtests.bench.child.resize import run_resize
from loadtests.bench.child.session_return import run_return
from loadtests.bench.job import JOB

_RUN: dict[str, Callable[[Any], Iterator[dict[str, Any]]]] = {
    "decode": run_decode,
    "prefill": run_prefill,
    "latency": run_latency,
    "resize": run_resize,
    "budget": run_budget,
    "identity": run_identity,
    "online": run_online,
    "return": run_return,
}


def main(answers: TextIO) -> None:
    """Fork a process for each request until stdin ends."""
    _say(answers, ready=True)
    for line in sys.stdin:
        request = json.loads(line)
        job = JOB.validate_json(Path(request["job"]).read_bytes())
        build_replay(job.engine.trace)  # here, so that the processes share it
        # A process forked from one that uses CUDA cannot use it.
        assert not torch.cuda.is_initialized()
        pid = os.fork()
        if pid == 0:
            answers.close()
            _run(job, Path(request["rows"]), request["log"])
        _say(answers, pid=pid)
        _, status = os.waitpid(pid, 0)
        _say(answers, exit_code=os.waitstatus_to_exitcode(status))


def _run(job: Any, rows_path: Path, log_path: str) -> NoReturn:
    """The forked process. Leaves at once when it is done: its exit handlers are the server's."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(job.engine.env)
    code = 1
    try:
        with rows_path.open("w") as file:
            for line in _lines(job):
                file.write(json.dumps(line) + "\n")
                file.flush()
        code = 0
    except BaseException:  # noqa: BLE001 - the process's end: the log gets what it is, whoever waits the exit code
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _lines(job: Any) -> Iterator[dict[str, Any]]:
    if job.kind != "budget":  # which looks at the device's memory before this process uses it
        yield facts()
    yield from _RUN[job.kind](job)
    if job.kind == "budget":
        yield facts()
    yield {"done": True}


def _say(answers: TextIO, **message: int) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "w") as to_runner:
        main(to_runner)
