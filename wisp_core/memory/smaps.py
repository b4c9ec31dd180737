"""What a process's mappings really occupy, read from outside it."""

from __future__ import annotations

import re
from pathlib import Path

from wisp_core.memory.memfd import MAPPING_PREFIX

_HEADER = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+\s*(.*)$")


def resident_bytes(pid: int, prefix: str = MAPPING_PREFIX) -> int:
    """Sum of ``Rss`` over the mappings of ``pid`` whose name starts with ``prefix``, in bytes.

    A process that is gone, or going, holds nothing: 0. Raises PermissionError for another user's process.
    """
    total_kib = 0
    is_counted = False
    try:
        with Path(f"/proc/{pid}/smaps").open() as lines:
            for line in lines:
                if header := _HEADER.match(line):
                    is_counted = header.group(1).startswith(prefix)
                elif is_counted and line.startswith("Rss:"):
                    total_kib += int(line.split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return total_kib * 1024
