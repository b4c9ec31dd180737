"""What a run leaves: its file under loadtests/results, a table, and one JSON line at its end; for all benchmarks."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from loadtests import machine
from loadtests.command_line import typed_command
from loadtests.rows import Row
from wisp_core.errors import ConfigurationError

Output = Annotated[Path | None, typer.Option(help="The results file; else a new one under loadtests/results.")]
"""The option ``--output`` of a command."""
Merge = Annotated[
    list[Path] | None,
    typer.Option(help="Run nothing: make one file of those of several runs. Give it once for each."),
]
"""The option ``--merge``."""
RESULTS = Path(__file__).parent / "results"

_LOG_WIDTH = 160
_SCALES = {"_bytes": (1e6, "MB"), "_bytes_per_s": (1e9, "GB/s"), "_bytes_per_step": (1e6, "MB")}


@dataclass(slots=True)
class Measured:
    """Rows of figures, and what they were measured on and with."""

    rows: list[Row] = field(default_factory=list)
    hardware: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def here(cls, rows: list[Row]) -> Measured:
        """Rows that were measured on this machine's CPU."""
        return cls(rows, machine.hardware(), machine.versions())


def result_path(benchmark: str, device: str = "cpu") -> Path:
    """A new name: results are kept, the good ones and the others."""
    now = datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return RESULTS / f"{benchmark}-{device}-{now}.json"


def write_result(path: Path, config: Any, measured: Measured, summary: Row, *, command: str | None = None) -> None:
    """Write everything that the claim needs.

    ``config`` is a dataclass whose ``name`` is the benchmark's; ``command`` is what to type for the same run, of
    ``wisp bench`` unless it is given.
    """
    content = {
        "benchmark": config.name,
        "hardware": measured.hardware,
        "versions": measured.versions,
        "command": command or typed_command(),
        "config": asdict(config),
        "rows": measured.rows,
        "summary": summary,
    }
    write_content(path, content)


def write_content(path: Path, content: Row) -> None:
    """Write a results file that is there already in another form."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def finish(
    path: Path,
    config: Any,
    measured: Measured,
    summary: Row,
    columns: Sequence[str] = (),
    *,
    command: str | None = None,
) -> None:
    """Write the file, print the ``columns`` of all rows, and the last line."""
    write_result(path, config, measured, summary, command=command)
    if columns:
        print_table(config.name, measured.rows, columns)
    print_last_line(config.name, path, measured.rows, summary)


def print_last_line(benchmark: str, path: Path, rows: Sequence[Row], summary: Row) -> None:
    """The one JSON line that ends a run."""
    failed = sum("error" in row for row in rows)
    line = {"benchmark": benchmark, "file": str(path.resolve()), "rows": len(rows), "failed_rows": failed}
    typer.echo(json.dumps(line | summary))


def merge_results(
    path: Path, parts: Sequence[Path], summarize: Callable[[list[Row]], Row], *, is_machine_shared: bool = True
) -> Row:
    """Write one file of what several runs of one benchmark have found, and print its last line; returns its summary.

    Rows say which ``part`` they are of; commands, and configurations and machines that differ, are listed by part.
    Raises ConfigurationError for parts of different benchmarks or versions, and of different machines where the figures
    of one are compared with another's (``is_machine_shared``).
    """
    found = [json.loads(part.read_text()) for part in parts]
    for key in ("benchmark", "versions", *(["hardware"] if is_machine_shared else [])):
        if any(one[key] != found[0][key] for one in found):
            raise ConfigurationError(f"these files differ in their {key}, so they are no parts of one run")
    rows = [{"part": number, **row} for number, one in enumerate(found, 1) for row in one["rows"]]
    content = {
        **found[0],
        "hardware": _one_or_all([one["hardware"] for one in found]),
        "command": [one["command"] for one in found],
        "config": _one_or_all([one["config"] for one in found]),
        "rows": rows,
        "summary": summarize(rows),
    }
    write_content(path, content)
    print_last_line(content["benchmark"], path, rows, content["summary"])
    return dict(content["summary"])


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else values


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
