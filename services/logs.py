"""What WiSP's own packages log: lines on stderr, which Ray keeps in a file for each process."""

from __future__ import annotations

import logging

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
PACKAGES = ("services", "policies", "wisp_core")


def log_to_stderr() -> None:
    """Have this process show what WiSP logs from INFO on.

    Serve sets up a logger of its own only, and a package that vLLM's OpenAI app imports raises the root's level to
    ERROR: ``model_hosting_container_standards.logging_config``.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    for name in PACKAGES:
        package = logging.getLogger(name)
        package.setLevel(logging.INFO)
        package.addHandler(handler)
        package.propagate = False
