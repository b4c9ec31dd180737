"""What WiSP logs is shown whatever a library makes of the root logger."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging
from services.logs import log_to_stderr

log_to_stderr()
logging.getLogger().setLevel(logging.ERROR)  # as a package does that vLLM's OpenAI app imports
for name in ("services.replica.supervisor", "wisp_core.store.connection", "policies.mv_wsa", "elsewhere"):
    logging.getLogger(name).info("shown by %s", name)
    logging.getLogger(name).debug("not shown")
"""


def test_wisp_lines_are_shown_once_with_time_level_and_name() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    said = [line.split(maxsplit=2)[2] for line in done.stderr.splitlines()]
    assert said == [
        "INFO services.replica.supervisor: shown by services.replica.supervisor",
        "INFO wisp_core.store.connection: shown by wisp_core.store.connection",
        "INFO policies.mv_wsa: shown by policies.mv_wsa",
    ]
