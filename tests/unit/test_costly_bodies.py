"""No body within the limit of bytes takes long to parse: the parser holds the GIL, whichever thread it runs in."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from services.config import HttpSettings
from services.ingress.errors import ApiError
from services.ingress.request_fields import CHAT_PATH, COMPLETIONS_PATH, MAX_NODES, MAX_VALUES, parse

HELLO = [{"role": "user", "content": "hello"}]
CHAT = {"model": "m", "messages": HELLO}


def with_tools(number: int, values: list[Any]) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"enum": values}}}
    return {**CHAT, "tools": [tool] * number}


def written(body: dict[str, Any]) -> bytes:
    raw = json.dumps(body, separators=(",", ":")).encode()
    assert len(raw) <= HttpSettings().max_body_bytes
    return raw


@contextlib.contextmanager
def soon() -> Iterator[None]:
    since_s = time.thread_time()  # CPU: however busy the machine is
    try:
        yield
    finally:
        assert time.thread_time() - since_s < 0.12


TOO_MANY = {
    "objects": (CHAT_PATH, with_tools(40, [{}] * 15_000)),
    "lists": (CHAT_PATH, {"model": "m", "messages": [[]] * 500_000}),
    "numbers": (CHAT_PATH, with_tools(40, [1] * 15_000)),
    "texts": (CHAT_PATH, {**CHAT, "stop": ["ab"] * 400_000}),
    "names": (CHAT_PATH, {"model": "m", **{f"{number}": 1 for number in range(150_000)}}),
    "token ids": (COMPLETIONS_PATH, {"model": "m", "prompt": [1] * 900_000}),
}
TAKEN = {
    "objects": (CHAT_PATH, with_tools(30, [{}] * 2100)),
    "messages": (CHAT_PATH, {"model": "m", "messages": [{**HELLO[0], "name": "x"}] * 4096}),
    "text that looks like JSON": (
        CHAT_PATH,
        {"model": "m", "messages": [{"role": "user", "content": '{"a\\": [1]}, ' * 120_000}]},
    ),
    "token ids": (COMPLETIONS_PATH, {"model": "m", "prompt": [123456] * (MAX_VALUES[COMPLETIONS_PATH] - 1)}),
}


@pytest.mark.parametrize(("path", "body"), TOO_MANY.values(), ids=TOO_MANY)
def test_too_many_values_are_refused_unparsed(path: str, body: dict[str, Any]) -> None:
    raw = written(body)
    with pytest.raises(ApiError, match="The body has more than") as caught, soon():
        parse(path, raw)
    assert caught.value.status == 400


@pytest.mark.parametrize(("path", "body"), TAKEN.values(), ids=TAKEN)
def test_what_is_taken_is_parsed_soon(path: str, body: dict[str, Any]) -> None:
    raw = written(body)
    with soon():
        parse(path, raw)


@pytest.mark.parametrize(
    "raw",
    [b'{"a":"' + b'\\"' * 900_000, b'{"a":' + b'"\\' * 900_000, b'"' * 1_999_999, b'{"a":"' + b"\\" * 1_999_999],
    ids=["escaped quotes", "open texts", "empty texts", "escapes"],
)
def test_texts_without_an_end_are_refused_soon(raw: bytes) -> None:
    with pytest.raises(ApiError), soon():
        parse(CHAT_PATH, raw)


def test_the_bound_counts_names_texts_lists_and_objects() -> None:
    # {"x": [...]} has two nodes beside the list's and one name.
    fits = b'{"x":[' + b"[]," * (MAX_NODES - 4) + b'""]}'
    for raw, refused in ((fits, "Unknown parameter"), (fits.replace(b"[[]", b"[[],[]"), "The body has more than")):
        with pytest.raises(ApiError, match=refused):
            parse(CHAT_PATH, raw)


def test_a_number_of_many_digits_is_refused_before_it_is_parsed_and_a_text_of_them_is_not() -> None:
    def body(number: str, text: str = "x") -> bytes:
        return json.dumps(with_tools(1, [0])).replace("[0]", f"[{number}]").replace("hello", text).encode()

    for number in ("9" * 65, "0." + "1" * 65, "-" + "1234567890" * 7):
        with pytest.raises(ApiError, match="more than 64 digits"):
            parse(CHAT_PATH, body(number))
    assert parse(CHAT_PATH, body("9" * 64, text="7" * 5000)).model == "m"
