"""What all tests share."""

from __future__ import annotations

import logging
import os

import pytest
from hypothesis import HealthCheck, settings

from services.logs import PACKAGES

# A busy machine makes single examples slow; that says nothing about the code.
settings.register_profile("wisp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wisp")

# vLLM's OpenAI app imports a package that sets the root logger, and so what caplog sees of other tests, to this level.
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")


@pytest.fixture(autouse=True)
def own_loggers_reach_caplog() -> None:
    """Whatever other tests, and what they import, have made of the loggers of this process."""
    logging.disable(logging.NOTSET)
    logging.getLogger().setLevel(logging.WARNING)
    for name, logger in logging.root.manager.loggerDict.items():
        if name.partition(".")[0] in PACKAGES and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)
