"""The command that a result file tells: what to type for the same run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence


def typed_command(program: str = "wisp bench", arguments: Sequence[str] | None = None) -> str:
    """``program`` and the ``arguments`` (those of this process), without options that name places of this machine.

    Where the file went and absolute paths decide nothing of a run and exist nowhere else.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    kept = []
    while words:
        word = words.pop(0)
        option, has_value, value = word.partition("=")
        is_option = option.startswith("--")
        if is_option and not has_value and words and not words[0].startswith("--"):
            value = words[0]
            if _is_left_out(option, value):
                words.pop(0)
                continue
        elif _is_left_out(option, value if is_option else word):
            continue
        kept.append(word)
    return f"{program} {shlex.join(kept)}".rstrip()


def _is_left_out(option: str, value: str) -> bool:
    return option == "--output" or value.startswith("/")
