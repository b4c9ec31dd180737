"""What all tests share."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine makes single examples slow; that says nothing about the code.
settings.register_profile("wisp", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("wisp")
