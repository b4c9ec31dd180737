"""What ``wisp bench online`` does: measures ways, or merges what several processes have measured."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from loadtests.bench import report
from loadtests.bench.child.hardware import hardware, versions
from loadtests.bench.online import run
from loadtests.bench.online.config import OnlineConfig
from loadtests.bench.online.figures import Row, compare
from loadtests.bench.runner import Measured
from wisp_core.errors import ConfigurationError
from wisp_core.model.tiny import TinyModelConfig

_OF_ONE_WAY = ("policy", "caps")
"""Fields of the configuration in which files that are merged may differ."""


@dataclass(frozen=True)
class Result:
    """A results file's content."""

    config: OnlineConfig
    measured: Measured
    summary: Row


def measure(
    config: OnlineConfig,
    path: Path,
    command: str,
    *,
    record: Path | None,
    work_dir: Path | None,
    say: Callable[[str], None],
) -> Result:
    """Run every way of ``config``; ``path`` is written after each."""

    def result(rows: list[Row]) -> Result:
        return Result(config, Measured(rows=rows, hardware=hardware(), versions=versions()), compare(rows))

    def save(rows: list[Row]) -> None:
        now = result(rows)
        report.write_result(path, config, command, now.measured, now.summary)

    with tempfile.TemporaryDirectory() as scratch:
        rows = run.run_online(config, work_dir or Path(scratch), say=say, on_rows=save, record=record)
    return result(rows)


def merge(files: Sequence[Path], path: Path) -> Result:
    """One results file of several that measured other ways on the same turns, in the order of the caps.

    Raises ConfigurationError where they measured something else, or elsewhere.
    """
    contents = [_read(file) for file in files]
    first = contents[0]
    for file, content in zip(files, contents, strict=True):
        for part, least in (("config", _OF_ONE_WAY), ("hardware", ()), ("versions", ())):
            differing = [
                name for name in first[part] if name not in least and first[part][name] != content[part].get(name)
            ]
            if differing:
                raise ConfigurationError(
                    f"--merge {file}: its {part} differs from {files[0]}'s in {', '.join(differing)}"
                )
    rows = sorted(
        (row for content in contents for row in content["rows"]),
        key=lambda row: (row["cap"] is None, row["cap"] or 0),
    )
    config = replace(_config(first["config"]), caps=tuple(row["cap"] for row in rows if row["cap"] is not None))
    commands = list(dict.fromkeys(content["command"] for content in contents))
    result = Result(config, Measured(rows=rows, hardware=first["hardware"], versions=first["versions"]), compare(rows))
    report.write_result(path, config, "; ".join(commands), result.measured, result.summary)
    return result


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        _config(content["config"])
        return content
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--merge {file}: not a results file of this benchmark: {error}") from error


def _config(values: dict[str, Any]) -> OnlineConfig:
    known = {field.name for field in fields(OnlineConfig)}
    if unknown := values.keys() - known:
        raise KeyError(", ".join(sorted(unknown)))
    fixed: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in values.items()}
    return OnlineConfig(**fixed | {"model": TinyModelConfig(**values["model"])})
