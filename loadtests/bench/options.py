"""Texts of options as values."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from loadtests.bench.modes import Mode
from wisp_core.errors import ConfigurationError

T = TypeVar("T")


def given(parse: Callable[[str], T], text: str | None) -> T | None:
    """The value of an option that may be missing. Raises what ``parse`` does."""
    return None if text is None else parse(text)


def bytes_of(number: float | None, unit_bytes: float) -> int | None:
    """Bytes of an option that counts in another unit and may be missing."""
    return None if number is None else int(number * unit_bytes)


def mode(name: str) -> Mode:
    """The mode of that name. Raises ConfigurationError."""
    try:
        return Mode(name)
    except ValueError:
        raise ConfigurationError(f"no mode {name!r}: it is one of {', '.join(Mode)}") from None


def modes(text: str) -> tuple[Mode, ...]:
    """Modes between commas. Raises ConfigurationError."""
    return tuple(mode(name) for name in text.split(","))


def baselines(text: str) -> tuple[tuple[Mode, float], ...]:
    """Modes, each with the share of experts on the device; empty for ``none``. Raises ConfigurationError."""
    if text == "none":
        return ()
    pairs = (item.split(":") for item in text.split(","))
    try:
        return tuple((mode(name), float(share)) for name, share in pairs)
    except ValueError as error:
        raise ConfigurationError(f"--baselines {text}: write mode:share,mode:share ({error})") from error


def floats(text: str) -> tuple[float, ...]:
    """Numbers between commas. Raises ConfigurationError."""
    try:
        return tuple(float(item) for item in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is no list of numbers: {error}") from error


def integers(text: str) -> tuple[int, ...]:
    """Whole numbers between commas. Raises ConfigurationError."""
    try:
        return tuple(int(item) for item in text.split(","))
    except ValueError as error:
        raise ConfigurationError(f"{text!r} is no list of whole numbers: {error}") from error
