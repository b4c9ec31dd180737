"""Pictures of predictions and simulations, by matplotlib: an optional extra, ``pip install wisp[plot]``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wisp_core.errors import ConfigurationError

_KINDS = (".svg", ".png", ".pdf")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One series of points."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    bars: Sequence[tuple[str, float]] = ()
    chosen_x: float | None = None
    """Marked by a vertical line."""
    top_y: float | None = None


def check_picture(path: Path) -> None:
    """Raises ConfigurationError if `draw` cannot write a picture named ``path``."""
    if path.suffix not in _KINDS:
        raise ConfigurationError(f"--plot {path}: give a name that ends in {', '.join(_KINDS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("pictures need matplotlib: pip install 'wisp[plot]'")


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write ``panels`` side by side to ``path``: .svg, .png or .pdf. Raises ConfigurationError without matplotlib."""
    check_picture(path)
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.8 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for panel, axis in zip(panels, axes, strict=False):
        _draw_panel(axis, panel)
    for axis in list(axes)[len(panels) :]:
        axis.set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # No date and fixed ids: equal figures give equal files.
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--plot {path}: {error}") from error


def _draw_panel(axis: Any, panel: Panel) -> None:
    for line in panel.lines:
        axis.plot(line.xs, line.ys, "--" if line.is_dashed else "-", label=line.name, linewidth=1.6)
    if panel.bars:
        axis.barh([name for name, _ in panel.bars], [value for _, value in panel.bars])
        axis.invert_yaxis()
    if panel.chosen_x is not None:
        axis.axvline(panel.chosen_x, color="black", linewidth=1.0, linestyle=":", label="chosen")
    if panel.lines:
        axis.legend(fontsize="small")
        axis.set_ylim(bottom=0, top=panel.top_y)
    axis.set_title(panel.title, fontsize="medium")
    axis.set_xlabel(panel.x_label)
    axis.set_ylabel(panel.y_label)
