"""KV in host memory, by vLLM's own offloading: what comes back is what left, whatever the balloon does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fixtures import (
    ACTIVATION_BYTES,
    BUDGET_BYTES,
    ENGINE_ARGS,
    MIB,
    PROMPTS,
    SAMPLING,
    Answer,
    answers,
    full_split,
    sampling,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata

from wisp_core.contracts import Outcome, Split
from wisp_core.engine.arguments import paged_engine_args
from wisp_core.engine.host_kv import HostKvMeter, blocks_to_copy, check_holds_a_block, host_blocks, refuse_too_much
from wisp_core.engine.offline import OfflineEngine, _run
from wisp_core.errors import ConfigurationError, IntegrityError
from wisp_core.settings import WispSettings

SETTINGS = WispSettings(
    vram_budget_bytes=BUDGET_BYTES,
    activation_bytes=ACTIVATION_BYTES,
    bypass_if_it_fits=False,
    kv_host_bytes=32 * MIB,
    emulated_link_bytes_per_s=1e9,  # so that a copy takes several steps
)
FLOOR_BLOCKS = 16  # max_model_len 512 / block 32
LONG = range(3, 8)  # prompts of several blocks


@pytest.fixture(scope="module")
def one_engine(tiny_model: Path) -> Iterator[OfflineEngine]:
    engine = OfflineEngine(str(tiny_model), ENGINE_ARGS, SETTINGS)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def resident(one_engine: OfflineEngine) -> list[Answer]:
    """Answers over prefixes that the device still holds."""
    one_by_one(one_engine)
    found, cached = one_by_one(one_engine)
    assert min(cached) > 0
    assert one_engine.snapshot().kv.fetched_tokens_per_s == 0
    return found


@pytest.fixture
def engine(one_engine: OfflineEngine, resident: list[Answer]) -> Iterator[OfflineEngine]:
    """The shared engine at cap 8 with nothing on the device; sound when the test ends."""
    assert one_engine.resize(one_engine.plan(full_split(one_engine.snapshot(), 8))).outcome is Outcome.APPLIED
    assert one_engine.llm.reset_prefix_cache()
    yield one_engine
    one_engine.check_integrity()


def one_by_one(engine: OfflineEngine) -> tuple[list[Answer], list[int]]:
    """Answers that do not depend on what else runs, and the prompt tokens that were not computed."""
    outputs = [engine.generate([PROMPTS[number]], [SAMPLING[number]])[0] for number in LONG]
    return answers(outputs), [output.num_cached_tokens or 0 for output in outputs]


def shrink(engine: OfflineEngine) -> Outcome:
    return engine.resize(engine.plan(Split(cap=8, kv_blocks=FLOOR_BLOCKS))).outcome


def start_all(engine: OfflineEngine) -> None:
    for number in LONG:
        engine.llm.llm_engine.add_request(str(number), PROMPTS[number], SAMPLING[number])


def finish(engine: OfflineEngine) -> None:
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.llm.llm_engine.step()


def test_a_prefix_that_comes_back_gives_the_answers_of_one_that_stayed(
    engine: OfflineEngine, resident: list[Answer]
) -> None:
    found, cached = one_by_one(engine)
    assert found == resident
    assert cached == [len(PROMPTS[number]["prompt_token_ids"]) // 32 * 32 for number in LONG]
    kv = engine.snapshot().kv
    assert kv.fetched_tokens_per_s > 0
    assert 0 < kv.fetch_bytes_per_s <= 1.01e9
    layout = engine.facts.layout
    assert kv.host_blocks == host_blocks(SETTINGS.kv_host_bytes, layout.block_bytes) > layout.max_kv_blocks // 8


def test_what_the_balloon_takes_comes_back(engine: OfflineEngine, resident: list[Answer]) -> None:
    one_by_one(engine)
    assert shrink(engine) is Outcome.APPLIED
    assert one_by_one(engine) == (resident, [len(PROMPTS[number]["prompt_token_ids"]) // 32 * 32 for number in LONG])


def test_blocks_that_are_still_to_be_copied_are_not_taken(engine: OfflineEngine, resident: list[Answer]) -> None:
    scheduler = engine.scheduler
    scheduler.reset_prefix_cache(reset_connector=True)
    engine.generate([PROMPTS[5]], [sampling(5, max_tokens=1)])  # one step: nothing of it is copied yet
    assert scheduler.reset_prefix_cache()  # nothing else makes these blocks worth keeping
    waiting = blocks_to_copy(scheduler)
    assert len(waiting) >= len(PROMPTS[5]["prompt_token_ids"]) // 32
    balloon = scheduler._wisp_balloon
    assert not waiting.intersection(balloon.available_groups())  # groups of one block
    with pytest.raises(IntegrityError, match="still to be copied"):
        balloon.take([next(iter(waiting))])
    # Straight to the resizer: `resize` would let the engine step until the copies are over.
    outcome = _run(engine._paged().resize(engine.plan(Split(cap=8, kv_blocks=FLOOR_BLOCKS))))
    assert outcome.outcome is Outcome.APPLIED
    assert not waiting.intersection(balloon.taken)
    assert blocks_to_copy(scheduler) == waiting
    (output,) = engine.generate([PROMPTS[5]], [SAMPLING[5]])
    assert output.num_cached_tokens == len(PROMPTS[5]["prompt_token_ids"]) // 32 * 32
    assert answers([output]) == resident[LONG.index(5) : LONG.index(5) + 1]


def test_resizes_while_prefixes_come_back_spoil_nothing(engine: OfflineEngine, resident: list[Answer]) -> None:
    one_by_one(engine)
    engine.settle()
    assert engine.llm.reset_prefix_cache()
    start_all(engine)
    engine.llm.llm_engine.step()
    kv = engine.snapshot().kv
    assert not engine.scheduler.running
    assert kv.running_turns == len(LONG)  # they hold blocks already, which nothing takes back
    assert kv.floor_blocks > kv.used_blocks > FLOOR_BLOCKS
    for cap in (20, 4, 12):
        engine.llm.llm_engine.step()
        assert engine.resize(engine.plan(full_split(engine.snapshot(), cap))).outcome is Outcome.APPLIED
        engine.check_integrity()
    finish(engine)
    assert shrink(engine) is Outcome.APPLIED
    assert one_by_one(engine)[0] == resident


def test_the_meter_takes_the_speed_of_fetches_once_there_are_any() -> None:
    meter = HostKvMeter(token_bytes=10, window_s=10)
    assert meter.rates(0.0, 1.0).fetch_bytes_per_s == 0
    meter.note_output(output_of(stored=(1000, 0.5)), 1.0)
    assert meter.rates(1.0, 1.0).fetch_bytes_per_s == 2000
    meter.note_output(output_of(loaded=(900, 0.1)), 1.0)
    meter.note_output(SimpleNamespace(kv_connector_output=None), 1.0)
    rates = meter.rates(1.0, 1.0)
    assert rates.fetch_bytes_per_s == pytest.approx(9000)
    assert rates.fetched_tokens_per_s == pytest.approx(90, rel=0.1)


def output_of(*, stored: tuple[int, float] = (0, 0.0), loaded: tuple[int, float] = (0, 0.0)) -> Any:
    report = OffloadingWorkerMetadata()
    report.transfer_stats.store.record(*stored)
    report.transfer_stats.load.record(*loaded)
    return SimpleNamespace(kv_connector_output=SimpleNamespace(kv_connector_worker_meta=report))


def test_without_a_host_tier_nothing_waits_to_be_copied() -> None:
    assert blocks_to_copy(SimpleNamespace(connector=None)) == set()


def test_host_memory_that_is_not_there_is_refused_with_a_size_that_fits() -> None:
    refuse_too_much(8 * MIB, available_bytes=8 * MIB, shared_bytes=None)
    refuse_too_much(8 * MIB, available_bytes=9 * MIB, shared_bytes=8 * MIB)
    with pytest.raises(ConfigurationError, match=rf"kv_host_bytes {8 * MIB} .* {7 * MIB} bytes available on this host"):
        refuse_too_much(8 * MIB, available_bytes=7 * MIB, shared_bytes=9 * MIB)
    with pytest.raises(ConfigurationError, match=rf"{MIB} bytes free in /dev/shm, which a container's --shm-size"):
        refuse_too_much(8 * MIB, available_bytes=9 * MIB, shared_bytes=MIB)


def test_less_than_a_block_is_refused() -> None:
    check_holds_a_block(64 << 10, 64 << 10)
    with pytest.raises(ConfigurationError, match="kv_host_bytes 65535 holds no KV block of 65536 bytes"):
        check_holds_a_block((64 << 10) - 1, 64 << 10)


def test_a_plain_server_is_told_of_vllm_s_own_option() -> None:
    with pytest.raises(ConfigurationError, match=r"kv_host_bytes needs vram_budget_bytes.*--kv-offloading-size"):
        WispSettings.from_additional_config({"wisp": {"cap": 16, "kv_host_bytes": 1 << 30}})


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_offloading_size", 1.0), ("kv_offloading_backend", "native"), ("enable_prefix_caching", False)],
)
def test_arguments_that_would_cross_it_are_refused(tiny_model: Path, name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}: .*kv_host_bytes"):
        paged_engine_args(str(tiny_model), {name: value}, SETTINGS)


def test_an_engine_without_room_on_its_host_does_not_start(tiny_model: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"kv_host_bytes .* set it to that or less"):
        paged_engine_args(str(tiny_model), {}, SETTINGS.model_copy(update={"kv_host_bytes": 1 << 50}))
