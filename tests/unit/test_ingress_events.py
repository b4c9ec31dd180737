"""Streams: usage read and taken out, cut anywhere; a bounded buffer; merged metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.buffer import SlowClientError, buffered
from services.ingress.events import EventFilter, Usage
from services.telemetry import Telemetry, merge_expositions


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TEXT = [event(choices=[{"delta": {"content": f'a "usage": {i}'}}]) for i in range(3)]
USAGE = event(
    choices=[],
    usage={"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}},
)
DONE = b"data: [DONE]\n\n"
STREAM = b"".join([*TEXT, USAGE, DONE])


@given(st.lists(st.integers(0, len(STREAM)), max_size=6), st.booleans())
def test_cuts_do_not_matter(cuts: list[int], keeps_usage: bool) -> None:
    bounds = [0, *sorted(cuts), len(STREAM)]
    events = EventFilter(keeps_usage=keeps_usage)
    out = b"".join(events.feed(STREAM[a:b]) for a, b in pairwise(bounds)) + events.rest()
    assert out == (STREAM if keeps_usage else b"".join([*TEXT, DONE]))
    assert events.usage == Usage(7, 4, 3)
    assert events.error is None


@given(st.lists(st.integers(0, 600), max_size=6))
def test_the_engine_s_word_on_each_event_is_counted_and_taken_out(cuts: list[int]) -> None:
    def counted(index: int, tokens: int, text: str) -> bytes:
        usage = {"prompt_tokens": 9, "completion_tokens": tokens}
        return event(choices=[{"index": index, "delta": {"content": text}}], usage=usage)

    sent = b"".join([counted(0, 1, "a"), counted(1, 2, 'ä "usage": {}'), counted(0, 4, "c")])
    bounds = [0, *sorted(min(cut, len(sent)) for cut in cuts), len(sent)]
    events = EventFilter(keeps_usage=True)
    out = b"".join(events.feed(sent[a:b]) for a, b in pairwise(bounds))
    assert events.so_far == Usage(9, 0, 6)
    assert events.usage is None, "no closing event has come"
    shown = [json.loads(part.removeprefix(b"data: ")) for part in out.split(b"\n\n") if part]
    assert [one["choices"][0]["delta"]["content"] for one in shown] == ["a", 'ä "usage": {}', "c"]
    assert not any("usage" in one for one in shown)


def test_an_unfinished_event_is_kept_back() -> None:
    events = EventFilter(keeps_usage=False)
    assert events.feed(b"data: {") == b""
    assert events.rest() == b"data: {"


def test_an_error_of_the_engine_is_noticed() -> None:
    events = EventFilter(keeps_usage=False)
    assert events.feed(event(error={"message": "x"}))
    assert events.error is not None
    assert events.error.status == 500


async def items(count: int, size: int, error: Exception | None = None) -> AsyncIterator[bytes]:
    for i in range(count):
        yield bytes([i % 256]) * size
        await asyncio.sleep(0)
    if error is not None:
        raise error


def test_an_engine_s_error_in_a_stream_shows_nothing_of_the_inside() -> None:
    inside = b'data: {"error": {"message": "/opt/model/x.py: stack", "type": "E", "param": null, "code": 500}}\n\n'
    refused = b'data: {"error": {"message": "too long", "type": "E", "param": null, "code": 400}}\n\n'
    events = EventFilter(keeps_usage=False)
    shown = events.feed(inside)
    assert events.error is not None
    assert b"/opt" not in shown
    assert json.loads(shown.removeprefix(b"data: "))["error"]["type"] == "server_error"
    assert b"too long" in EventFilter(keeps_usage=False).feed(refused)


@pytest.mark.parametrize("event", [b'data: {"usage":', b'data: ["usage":]', b'data: {"usage": 3}', b': "usage":'])
def test_events_that_are_no_json_pass_as_they_are(event: bytes) -> None:
    events = EventFilter(keeps_usage=False)
    assert events.feed(event + b"\n\n") == event + b"\n\n"
    assert events.usage is None


async def test_a_buffer_passes_everything_in_order() -> None:
    assert [piece[0] async for piece in buffered(items(50, 10), 10_000)] == list(range(50))


async def test_an_error_comes_after_what_was_read() -> None:
    pieces = buffered(items(5, 10, KeyError()), 10_000)
    assert [len(await anext(pieces)) for _ in range(5)] == [10] * 5
    with pytest.raises(KeyError):
        await anext(pieces)


async def test_a_slow_reader_is_ended_with_bounded_memory() -> None:
    produced = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal produced
        while True:
            produced += 1
            yield b"x" * 100
            await asyncio.sleep(0)

    seen = 0

    async def read_slowly() -> None:
        nonlocal seen
        async for _ in buffered(endless(), 1000):
            seen += 1
            await asyncio.sleep(0.01)

    with pytest.raises(SlowClientError):
        await read_slowly()
    assert seen == produced <= 40


async def test_closing_a_buffer_stops_reading() -> None:
    is_closed = asyncio.Event()

    async def source() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0.01)
        finally:
            is_closed.set()

    pieces = buffered(source(), 1000)
    await anext(pieces)
    await pieces.aclose()
    await asyncio.wait_for(is_closed.wait(), 1)


def test_pages_merge_by_family_with_a_replica_on_every_series() -> None:
    pages: list[tuple[str, str]] = []
    for name in ("one", "two"):
        telemetry = Telemetry()
        meter = telemetry.meter("test")
        meter.create_counter("wisp.turns", description="Turns.").add(2, {"tenant": "a"})
        meter.create_histogram("wisp.ttft", unit="s").record(0.3)
        pages.append((name, telemetry.scrape()))
        telemetry.close()
    labelled = '# HELP wisp_turns_total Turns.\n# TYPE wisp_turns_total counter\nwisp_turns_total{replica="r"} 5\n'
    pages.append(("three", labelled))
    lines = merge_expositions(pages).splitlines()
    assert lines.count("# TYPE wisp_turns_total counter") == 1
    assert lines.count("# TYPE wisp_ttft_seconds histogram") == 1
    series = [line for line in lines if line and not line.startswith("#")]
    assert all('replica="' in line for line in series)
    assert 'wisp_turns_total{replica="one",tenant="a"} 2.0' in series
    assert 'wisp_turns_total{replica="r"} 5.0' in series
    assert any('le="0.5"' in line and line.endswith(" 1.0") for line in series)
    turns = [i for i, line in enumerate(lines) if line.startswith("wisp_turns_total")]
    assert turns == list(range(turns[0], turns[0] + 3)), "a family's lines stand together"


async def test_whoever_closes_a_buffer_can_be_cancelled_while_its_source_ends() -> None:
    async def source() -> AsyncIterator[bytes]:
        try:
            yield b"x"
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)

    pieces = buffered(source(), 1000)
    await anext(pieces)
    closing = asyncio.create_task(pieces.aclose())
    await asyncio.sleep(0.01)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
