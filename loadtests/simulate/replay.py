"""Recordings of a real service against their replay in the simulator: calibrated on one, judged on others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from policies.damping import Damped, Damping
from policies.registry import load_policy
from wisp_core.simulator.calibration import calibrated_engine, compare, replay, starting_split
from wisp_core.simulator.recording import read_recording
from wisp_core.simulator.simulation import SimulationSettings


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Which recordings, and how the service ran."""

    name: str = "simulate-replay"
    fit: str
    judged: tuple[tuple[str, str], ...]
    """Recording and the policy that ran: ``static`` for a split that was held, but for what κ_min asks."""
    pass_tokens: int = 1024
    epoch_s: float = 1.0
    window_s: float = 5.0


def replays(config: ReplayConfig, directory: Path) -> Iterator[dict[str, Any]]:
    """A row for the fitted recording and each judged one."""
    fitted = read_recording(directory / config.fit)
    settings = SimulationSettings(epoch_s=config.epoch_s, window_s=config.window_s)
    engine = calibrated_engine(fitted, pass_tokens=config.pass_tokens, policy=_moving("static"), settings=settings)
    for name, policy in ((config.fit, "static"), *config.judged):
        recording = read_recording(directory / name)
        split = starting_split(recording)
        result = replay(recording.trace, engine, split=split, policy=_moving(policy), settings=settings)
        figures = compare(recording.trace, result)
        yield {
            "recording": Path(name).stem,
            "is_fitted": name == config.fit,
            "policy": policy,
            "cap": split.cap,
            **asdict(figures),
            "off_by": figures.error,
        }


def _moving(name: str) -> Damped[Any]:
    """As a service runs it."""
    if name == "static":
        return Damped(policy=load_policy("static_split", {}), damping=Damping(confirmations=1, dead_zone_fraction=0.0))
    return Damped(policy=load_policy(name, {}))


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the judged recordings, and whether the simulator orders all of them as the service does.

    ``swapped`` names the pairs that it orders otherwise, with the measured difference.
    """
    judged = [row for row in rows if not row["is_fitted"]]
    swapped = [
        f"{one['recording']}, {other['recording']}: {abs(one['measured_turn_s'] / other['measured_turn_s'] - 1):.1%}"
        for one, other in combinations(rows, 2)
        if (one["measured_turn_s"] < other["measured_turn_s"]) != (one["simulated_turn_s"] < other["simulated_turn_s"])
    ]
    return {
        "worst_error_pct": max(100 * abs(row["off_by"]) for row in judged),
        "fitted_error_pct": max(100 * abs(row["off_by"]) for row in rows if row["is_fitted"]),
        "is_order_same": not swapped,
        "swapped": swapped,
    }
