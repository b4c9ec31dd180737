"""Texts of options as values; a ValueError says what is wrong with one."""

from __future__ import annotations

from loadtests.bench.modes import Mode


def floats(text: str) -> tuple[float, ...]:
    """Numbers between commas."""
    return tuple(float(item) for item in text.split(","))


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    return tuple(int(item) for item in text.split(","))


def caps(text: str) -> tuple[int, ...]:
    """Slots per layer between commas; empty for ``none``."""
    return () if text == "none" else integers(text)


def gigabytes(text: str) -> int:
    """Bytes of a number of 1e9 bytes."""
    return int(float(text) * 1e9)


def several_gigabytes(text: str) -> tuple[int, ...]:
    """The same, between commas."""
    return tuple(gigabytes(item) for item in text.split(","))


def mebibytes(text: str) -> int:
    """Bytes of a number of MiB."""
    return int(float(text) * 2**20)


def modes(text: str) -> tuple[Mode, ...]:
    """Modes between commas."""
    return tuple(_mode(name) for name in text.split(","))


def baselines(text: str) -> tuple[tuple[Mode, float], ...]:
    """Modes, each with the share of experts on the device; empty for ``none``."""
    if text == "none":
        return ()
    pairs = (item.partition(":") for item in text.split(","))
    return tuple((_mode(name), float(share)) for name, _, share in pairs)


def _mode(name: str) -> Mode:
    if name not in tuple(Mode):
        raise ValueError(f"no mode {name!r}: it is one of {', '.join(Mode)}")
    return Mode(name)
