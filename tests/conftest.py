"""What all tests share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# A busy machine makes single examples slow; that says nothing about the code.
settings.register_profile("wisp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wisp")

# vLLM's OpenAI app imports a package that sets the root logger, and so what caplog sees of other tests, to this level.
os.environ.setdefault("SAGEMAKER_CONTAINER_LOG_LEVEL", "WARNING")
