"""What turns ask for, as vLLM's scheduler shows it: who starts, who comes back after a preemption, who waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import engine_fixtures  # noqa: F401  first: imports vLLM without its warnings
import pytest
from vllm.v1.request import RequestStatus

from wisp_core.contracts import KvDemand
from wisp_core.engine import turn_meter
from wisp_core.engine.turn_meter import TurnMeter

BLOCK_TOKENS, NUM_BLOCKS = 16, 64


class Scheduler:
    """What `TurnMeter` reads of vLLM's scheduler."""

    max_model_len, max_num_scheduled_tokens, hash_block_size = 1024, 64, BLOCK_TOKENS

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.kv_cache_manager = SimpleNamespace(
            enable_caching=True,
            prefix_cache_lookup_enabled=lambda request: True,
            get_blocks=lambda request_id: SimpleNamespace(blocks=([None] * self.held_blocks.get(request_id, 0),)),
        )
        self.held_blocks: dict[str, int] = {}
        self.balloon: Any = SimpleNamespace(used_blocks=0, num_cached_blocks=lambda: 0)
        self.meter = TurnMeter(self, self.balloon, block_tokens=BLOCK_TOKENS, max_blocks=NUM_BLOCKS, window_s=30.0)

    def come(self, name: str, conversation: str, num_blocks: int) -> Any:
        """A turn whose prompt is the first ``num_blocks`` blocks of a conversation and a token more."""
        request = self.requests[name] = SimpleNamespace(
            request_id=name,
            num_prompt_tokens=num_blocks * BLOCK_TOKENS + 1,
            num_output_tokens=0,
            num_computed_tokens=0,
            max_tokens=8,
            block_hashes=[f"{conversation}-{number}" for number in range(num_blocks)],
            status=RequestStatus.WAITING,
            is_finished=lambda: False,
        )
        self.meter.note_arrived(request)
        return request

    def schedule(self, request: Any, *, found: int, is_new: bool) -> None:
        """Decide a step that computes the rest of a prompt of which ``found`` tokens are cached."""
        num_tokens = request.num_prompt_tokens - found
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, request.num_prompt_tokens
        new = [SimpleNamespace(req_id=request.request_id)] if is_new else []
        scheduled = {request.request_id: num_tokens}
        self.meter.note_scheduled(SimpleNamespace(scheduled_new_reqs=new, num_scheduled_tokens=scheduled))

    def end(self, request: Any, status: RequestStatus = RequestStatus.FINISHED_STOPPED) -> None:
        request.status = status
        self.meter.note_finished(request)
        del self.requests[request.request_id]

    def demand(self) -> KvDemand:
        return self.meter.demand(1.0)


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    """Observed for a second; the clock stands."""
    monkeypatch.setattr(turn_meter, "time", SimpleNamespace(monotonic=lambda: 0.0))
    scheduler = Scheduler()
    monkeypatch.setattr(turn_meter, "time", SimpleNamespace(monotonic=lambda: 1.0))
    return scheduler


def reused(demand: KvDemand) -> float:
    return sum(one.tokens_per_s for one in demand.reuse)


@pytest.mark.parametrize("is_new", [True, False], ids=["second model runner", "first model runner"])
def test_a_turn_that_comes_back_reuses_nothing_and_lost_what_it_did_not_find(
    scheduler: Scheduler, is_new: bool
) -> None:
    turn = scheduler.come("1", "a", 10)
    scheduler.schedule(turn, found=0, is_new=True)
    scheduler.meter.note_preemption("1", turn.num_computed_tokens)
    assert scheduler.demand().preempted_tokens_per_s == 0, "all of it may still lie in the prefix cache"
    scheduler.schedule(turn, found=6 * BLOCK_TOKENS, is_new=is_new)
    demand = scheduler.demand()
    assert reused(demand) == 0
    lost_share = demand.preempted_tokens_per_s / demand.prompt_tokens_per_s
    assert lost_share == pytest.approx((4 * BLOCK_TOKENS + 1) / (10 * BLOCK_TOKENS + 1), rel=0.01)


def test_a_preempted_turn_that_is_aborted_has_lost_nothing(scheduler: Scheduler) -> None:
    turn = scheduler.come("1", "a", 10)
    scheduler.schedule(turn, found=0, is_new=True)
    scheduler.meter.note_preemption("1", turn.num_computed_tokens)
    turn.num_computed_tokens = 0
    scheduler.end(turn, RequestStatus.FINISHED_ABORTED)
    demand = scheduler.demand()
    assert demand.preempted_tokens_per_s == 0
    assert not scheduler.meter._lost_tokens
    assert demand.prompt_tokens_per_s > 0, "it was admitted once"
    scheduler.come("2", "a", 10)
    assert reused(scheduler.demand()) > 0, "and what it had computed lies in the prefix cache"


def test_a_turn_that_is_given_up_while_it_waits_asks_for_nothing_and_leaves_nothing(scheduler: Scheduler) -> None:
    for number in range(5):
        turn = scheduler.come(str(number), "a", 10)
        if number % 2:
            scheduler.demand()  # what reuse would save it has been read
        scheduler.end(turn, RequestStatus.FINISHED_ABORTED)
    assert scheduler.demand().prompt_tokens_per_s == 0
    scheduler.schedule(scheduler.come("last", "a", 10), found=0, is_new=True)
    assert reused(scheduler.demand()) == 0
    assert scheduler.demand().return_share == 0.5, "what is assumed before any turn has ended"


def test_a_turn_that_is_given_up_in_its_prompt_leaves_what_it_had_computed(scheduler: Scheduler) -> None:
    turn = scheduler.come("1", "a", 10)
    scheduler.schedule(turn, found=0, is_new=True)
    turn.num_computed_tokens = 4 * BLOCK_TOKENS + 1
    scheduler.end(turn, RequestStatus.FINISHED_ABORTED)
    scheduler.schedule(scheduler.come("2", "a", 10), found=4 * BLOCK_TOKENS, is_new=True)
    demand = scheduler.demand()
    share = 4 * BLOCK_TOKENS / (2 * (10 * BLOCK_TOKENS + 1))
    assert reused(demand) / demand.prompt_tokens_per_s == pytest.approx(share, rel=0.01)


def test_what_reuse_would_save_a_turn_that_waits_is_read_when_it_is_asked_for(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = scheduler.come("1", "a", 10)
    scheduler.schedule(first, found=0, is_new=True)
    scheduler.end(first)
    reads: list[int] = []
    saved = scheduler.meter._reuse.saved
    monkeypatch.setattr(
        scheduler.meter._reuse, "saved", lambda hashes, **sizes: reads.append(1) or saved(hashes, **sizes)
    )
    waiting = scheduler.come("2", "a", 10)
    assert not reads, "not at its arrival: most turns start at once"
    demand = scheduler.demand()
    assert reused(demand) == pytest.approx(demand.prompt_tokens_per_s / 2, rel=0.01), "one of two prompts, nearly"
    scheduler.demand()
    assert len(reads) == 1
    scheduler.schedule(waiting, found=10 * BLOCK_TOKENS, is_new=True)
    assert len(reads) == 2
    assert reused(scheduler.demand()) == pytest.approx(demand.prompt_tokens_per_s / 2, rel=0.01)


def test_what_running_turns_hold_is_in_the_distance_but_not_what_the_turn_itself_was_given(
    scheduler: Scheduler,
) -> None:
    first = scheduler.come("1", "a", 10)
    scheduler.schedule(first, found=0, is_new=True)
    scheduler.end(first)
    again = scheduler.come("2", "a", 10)
    scheduler.held_blocks["2"], scheduler.balloon.used_blocks = 11, 11 + 20
    scheduler.schedule(again, found=10 * BLOCK_TOKENS, is_new=True)
    distances = [one.blocks for one in scheduler.demand().reuse]
    assert 20 < min(distances) <= 23
    assert 30 <= max(distances) <= 33
