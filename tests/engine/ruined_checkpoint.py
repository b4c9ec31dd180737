"""A checkpoint whose experts are no longer what they were: whoever reads them answers differently."""

from __future__ import annotations

import json
import os
from pathlib import Path


def ruin_experts(model: Path) -> int:
    """Overwrite every expert's bytes in the checkpoint, which keeps its files' names, sizes and times; bytes ruined."""
    num_bytes = 0
    for path in model.glob("*.safetensors"):
        times = path.stat()
        with path.open("r+b") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(header_bytes))
            for name, entry in header.items():
                if ".experts." in name:
                    start, stop = entry["data_offsets"]
                    file.seek(8 + header_bytes + start)
                    file.write(b"\x3f" * (stop - start))
                    num_bytes += stop - start
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return num_bytes
