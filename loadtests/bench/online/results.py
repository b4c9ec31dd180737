"""The results file of an online run, and one made of several that ran apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from loadtests import report
from loadtests.bench.online.config import OnlineConfig
from loadtests.bench.online.figures import compare
from loadtests.bench.online.in_process import InProcessConfig
from loadtests.report import Measured
from loadtests.rows import Row
from wisp_core.errors import ConfigurationError

AnyConfig = OnlineConfig | InProcessConfig

_OF_ONE_WAY = ("policy", "caps", "deadline_s")
"""Fields of the configuration in which files that are merged may differ."""
_CONFIGS: dict[str, type[OnlineConfig] | type[InProcessConfig]] = {
    one.name: one for one in (OnlineConfig, InProcessConfig)
}


@dataclass(frozen=True)
class Result:
    """A results file's content."""

    config: AnyConfig
    measured: Measured
    summary: Row


def result_of(config: AnyConfig, measured: Measured) -> Result:
    """With what the rows come to."""
    return Result(config, measured, compare(measured.rows, config.policy))


def save(result: Result, path: Path, command: str | None = None) -> None:
    """Write it."""
    report.write_result(path, result.config, result.measured, result.summary, command=command)


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
    config = replace(
        _config(first["config"]),
        caps=tuple(row["cap"] for row in rows if row["cap"] is not None),
        policy=next((row["policy"] for row in rows if row["cap"] is None), "none"),
        deadline_s=max(content["config"]["deadline_s"] for content in contents),
    )
    commands = list(dict.fromkeys(content["command"] for content in contents))
    result = result_of(config, Measured(rows=rows, hardware=first["hardware"], versions=first["versions"]))
    save(result, path, "; ".join(commands))
    return result


def _read(file: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        _config(content["config"])
        return content
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"--merge {file}: not a results file of this benchmark: {error}") from error


def _config(values: dict[str, Any]) -> AnyConfig:
    kind = _CONFIGS[values["name"]]
    if unknown := values.keys() - {field.name for field in fields(kind)}:
        raise KeyError(", ".join(sorted(unknown)))
    return TypeAdapter(kind).validate_python(values)
