"""A run's file under loadtests/results, its table, and its last line."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtests.bench.runner import Measured

Row = dict[str, Any]
RESULTS = Path(__file__).parents[1] / "results"

_LOG_WIDTH = 160
_SCALES = {"_bytes": (1e6, "MB"), "_bytes_per_s": (1e9, "GB/s"), "_bytes_per_step": (1e6, "MB")}


def result_path(benchmark: str, device: str) -> Path:
    """A new name: results are kept, the good ones and the others."""
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return RESULTS / f"{benchmark}-{device}-{now}.json"


def write_result(path: Path, config: Any, command: str, measured: Measured, summary: dict[str, Any]) -> None:
    """Write everything that the claim needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "benchmark": config.name,
        "hardware": measured.hardware,
        "versions": measured.versions,
        "command": command,
        "config": asdict(config),
        "rows": measured.rows,
        "summary": summary,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def last_line(config: Any, path: Path, measured: Measured, summary: dict[str, Any]) -> str:
    """The one JSON line that ends a run."""
    failed = sum("error" in row for row in measured.rows)
    line = {"benchmark": config.name, "file": str(path), "rows": len(measured.rows), "failed_rows": failed} | summary
    return json.dumps(line)


def print_table(title: str, rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Rows side by side; a failed one shows the first line of its error."""
    table = Table(title=title)
    for name in columns:
        table.add_column(_heading(name), justify="left" if name == "mode" else "right", overflow="fold")
    for row in rows:
        if "error" not in row:
            table.add_row(*(_cell(name, row.get(name)) for name in columns))
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    console.print(table)
    for row in rows:
        if "error" in row:
            console.print(f"{row.get('mode', row.get('policy'))}: {row['error']}", markup=False, highlight=False)


def _heading(name: str) -> str:
    factor, unit = _scale(name)
    short = name.replace("_bytes", "").replace("_per_step", "/step").replace("_per_s", "") if unit else name
    words = short.replace("_per_step", "/step").replace("_", " ")
    return f"{words}, {unit}" if factor != 1.0 else words


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "output_hash":
        return str(value)[:8]
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, int | float):
        factor, unit = _scale(name)
        return f"{value / factor:,.1f}" if unit else f"{value:,.3g}" if isinstance(value, float) else str(value)
    return str(value)


def _scale(name: str) -> tuple[float, str]:
    for suffix, scale in sorted(_SCALES.items(), key=lambda item: -len(item[0])):
        if name.endswith(suffix):
            return scale
    return 1.0, ""
