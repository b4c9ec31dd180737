"""What stands where a pager would: facts, counts of steps, and no cap but all experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wisp_core.errors import ConfigurationError
from wisp_core.memory.memfd import MemfdBacking
from wisp_core.pager.pager import Pager
from wisp_core.pager.resident_experts import HostClock, ResidentExperts
from wisp_core.settings import WispSettings

E, K, LAYERS = 8, 2, 3


class DeviceClock(HostClock):
    """Of a device on which a step takes a second more than its launches."""

    def stop(self) -> None:
        super().stop()
        self._seconds[self._is_prefill] += 1.0


@pytest.fixture
def experts() -> ResidentExperts:
    return resident(HostClock())


def resident(clock: HostClock) -> ResidentExperts:
    pager = Pager(WispSettings(cap=4), E, K, MemfdBacking())
    for index in range(LAYERS):
        assert pager.add_layer() == index
    for index in range(LAYERS):
        weights = torch.from_numpy(np.zeros((E, 16, 1024), dtype=np.float32))
        pager.page_layer(index, {"w13_weight": weights})
    return ResidentExperts(pager, clock)


def test_it_holds_all_experts_at_every_cap(experts: ResidentExperts) -> None:
    whole = LAYERS * E * 16 * 1024 * 4
    assert experts.experts_bytes_by_cap() == (whole,) * (E + 1)
    assert experts.resident_bytes() == whole
    experts.set_cap(E)
    with pytest.raises(ConfigurationError, match="all 8 experts are resident"):
        experts.set_cap(4)


def test_it_counts_steps_by_kind(experts: ResidentExperts) -> None:
    for num_tokens, is_prefill in ((5, True), (2, False), (2, False), (0, False)):
        experts.begin_step(num_tokens, is_prefill)
        experts.end_step()
    assert (experts.counts_prefill.steps, experts.counts_prefill.tokens) == (1, 5)
    assert (experts.counts_decode.steps, experts.counts_decode.tokens) == (2, 4)
    assert experts.counts_decode.seconds > 0
    experts.reset_statistics()
    assert experts.counts_decode.steps == 0
    assert experts.counts_decode.seconds == 0


def test_steps_take_what_the_clock_says_not_what_their_calls_take() -> None:
    experts = resident(DeviceClock())
    for is_prefill in (True, False, False):
        experts.begin_step(3, is_prefill)
        experts.end_step()
    assert 1 <= experts.counts_prefill.seconds < 1.5
    assert 2 <= experts.counts_decode.seconds < 2.5
