"""From a client's body to the body that vLLM gets: parsed strictly, allow-listed, written anew."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError
from pydantic_core import from_json

from services.ingress.chat_fields import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_PROMPTS,
    MAX_SCHEMA_BYTES,
    MAX_TOOL_CALLS,
    ChatFields,
    CommonFields,
    CompletionFields,
)
from services.ingress.errors import ApiError, bad_request

CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"

MAX_NAMED_ERRORS = 100
"""A body with more faults is not told the first: to list them takes longer than to find them."""
MAX_NODES = 1 << 16
"""Texts, names of fields, lists and objects in one body: more take longer to parse than others should wait."""
MAX_VALUES = {CHAT_PATH: 1 << 16, COMPLETIONS_PATH: 1 << 18}
"""Values in one body, numbers among them; a prompt may be the token ids of the longest contexts."""
MAX_DIGITS = 64
"""Digits of one number in a row: to read and to write a number takes the square of its length."""
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of the completions endpoint."""

_FIELDS: dict[str, type[CommonFields]] = {CHAT_PATH: ChatFields, COMPLETIONS_PATH: CompletionFields}
_DROPPED = {
    "best_of",
    "metadata",
    "modalities",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
}
"""Taken for compatibility, with values that leave the answer as it is; nothing here uses them."""
_UNSUPPORTED = {
    "audio",
    "function_call",
    "functions",
    "prediction",
    "suffix",
    "verbosity",
    "web_search_options",
}
"""OpenAI's fields that would change the answer if they were followed: refused rather than left out."""
_ECHOED = {"reasoning", "reasoning_content", "refusal", "annotations", "audio", "function_call"}
"""What an assistant's message carries besides its content; clients send whole messages back."""


@dataclass(frozen=True, kw_only=True)
class TurnFields:
    """A valid request."""

    body: dict[str, Any]
    model: str
    user: str
    is_stream: bool
    wants_usage: bool
    num_choices: int
    """Answers to generate: ``n`` times the number of prompts."""
    max_tokens: int | None
    """Per answer; None: up to the context length."""
    text_bytes: int
    token_ids: int
    has_grammar: bool = False
    """Whether the answer, or a part of it, has to follow a schema."""


def parse(path: str, raw: bytes) -> TurnFields:
    """Validate the body of a request to ``path``. Raises ApiError (400) that names the first bad field."""
    _refuse_many(raw, MAX_VALUES[path])
    body = _load(raw)
    allowed = _FIELDS[path].model_fields
    for name, value in body.items():
        if name in _UNSUPPORTED:
            if value is not None:
                raise _unsupported(name, "is not supported")
        elif name not in allowed:
            raise _unknown(name[:64], allowed)
    body = {name: value for name, value in body.items() if value is not None}
    messages = body.get("messages")
    if isinstance(messages, list) and len(messages) <= MAX_MESSAGES:
        _check_number(messages, "content", "parts of content", MAX_PARTS)
        _check_number(messages, "tool_calls", "tool calls", MAX_TOOL_CALLS)
        body["messages"] = [_clean_message(index, message) for index, message in enumerate(messages)]
    try:
        fields = _FIELDS[path].model_validate(body)
    except ValidationError as error:
        _refuse(error)
    return _turn_fields(fields)


def _unknown(name: str, allowed: Iterable[str]) -> ApiError:
    near = difflib.get_close_matches(name, allowed, n=1)
    message = f"Unknown parameter: '{name}'." + (f" Did you mean '{near[0]}'?" if near else "")
    return bad_request(message, param=name, code="unknown_parameter")


def _unsupported(name: str, why: str) -> ApiError:
    return bad_request(f"'{name}' {why}.", param=name, code="unsupported_parameter")


_TEXT = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON text as it is written, or one that does not end: every byte is looked at once."""
_ZEROS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER = b"0" * (MAX_DIGITS + 1)
"""Searched for in what has zeros for all its digits: that takes less than an expression would."""


def _refuse_many(raw: bytes, max_values: int) -> None:
    """Raises ApiError (400) for what would take long to parse: a parser holds the GIL, in whatever thread it runs."""
    quotes, opened, commas = raw.count(b'"'), raw.count(b"{") + raw.count(b"["), raw.count(b",")
    has_long = _LONG_NUMBER in raw.translate(_ZEROS)
    if quotes // 2 + opened <= MAX_NODES and commas < max_values and not has_long:
        return
    bare, texts = _TEXT.subn(b"", raw, count=MAX_NODES + 1)
    opened, commas = bare.count(b"{") + bare.count(b"["), bare.count(b",")
    if texts + opened > MAX_NODES or commas >= max_values:
        raise bad_request(
            f"The body has more than {max_values} values, or {MAX_NODES} texts, names, lists and objects."
        )
    if has_long and _LONG_NUMBER in bare.translate(_ZEROS):
        raise bad_request(f"The body has a number of more than {MAX_DIGITS} digits.", code="invalid_value")


def _load(raw: bytes) -> dict[str, Any]:
    try:
        # Unlike json it refuses lone surrogates, NaN and depths at which others recurse too far.
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request("The body is not valid JSON in UTF-8, or is nested too deep.") from error
    if not isinstance(body, dict):
        raise bad_request("The body must be a JSON object.")
    return body


def _check_number(messages: list[Any], field: str, what: str, most: int) -> None:
    """Raises ApiError for messages whose lists of this name have more than ``most`` items together."""
    lists = (message.get(field) for message in messages if isinstance(message, dict))
    number = sum(len(one) for one in lists if isinstance(one, list))
    if number > most:
        message = f"Invalid value for 'messages': {number} {what} ('messages[].{field}') in all, at most {most} fit."
        raise bad_request(message, param="messages", code="invalid_value")


def _clean_message(index: int, message: Any) -> Any:
    """Drop nulls and what assistants echo; refuse media by name."""
    if not isinstance(message, dict):
        return message
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise bad_request(
                f"Content of type '{kind[:32]}' is not supported: this model takes text only.",
                param=f"messages[{index}].content",
                code="unsupported_content",
            )
    is_assistant = message.get("role") == "assistant"
    return {
        name: value
        for name, value in message.items()
        if value is not None and not (is_assistant and (name in _ECHOED or (name == "tool_calls" and value == [])))
    }


def _refuse(error: ValidationError) -> NoReturn:
    if error.error_count() > MAX_NAMED_ERRORS:
        raise bad_request(f"The body has {error.error_count()} unknown parameters or invalid values.")
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _param(first["loc"])
    if first["loc"] == ("prompt", "str"):  # None of the kinds that a prompt may be; the others' words come after it.
        message = f"Invalid value for 'prompt': text, token ids, or 1 to {MAX_PROMPTS} of either, no token ids empty."
        raise bad_request(message, param=param, code="invalid_value")
    if first["type"] == "missing":
        raise bad_request(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        raise bad_request(f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    # Some messages repeat what was given, which may be long.
    raise bad_request(f"Invalid value for '{param}': {first['msg'][:512]}.", param=param, code="invalid_value")


_BRANCHES = {"system", "developer", "user", "assistant", "tool", "text", "json_object", "json_schema"}


def _param(location: tuple[int | str, ...]) -> str:
    """``messages[0].content``; the names that pydantic gives to branches of a union are left out."""
    name = ""
    for position, part in enumerate(location):
        if isinstance(part, int):
            name += f"[{part}]"
        elif position == 0:
            name = part[:64]
        elif isinstance(location[position - 1], int) and part in _BRANCHES:
            continue
        elif not part.isidentifier() or part in {"str", "list", "int"} or not part.islower():
            break
        else:
            name += f".{part[:64]}"
    return name


def _turn_fields(fields: CommonFields) -> TurnFields:
    body = fields.model_dump(mode="json", exclude_unset=True, exclude_none=True, by_alias=True, exclude=_DROPPED)
    wants_usage = fields.stream_options is not None and fields.stream_options.include_usage
    if fields.stream_options is not None and not fields.stream:
        raise bad_request("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    if isinstance(fields, CompletionFields) and fields.best_of not in (None, fields.n):
        raise _unsupported("best_of", "is not supported, unless it equals 'n'")
    if isinstance(fields, ChatFields) and set(fields.modalities or ["text"]) != {"text"}:
        raise _unsupported("modalities", "other than text are not supported")
    if fields.stream:
        # Always asked of the engine: quotas and metrics need it, and streams that end early the tokens so far; taken
        # out again if the client did not ask.
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if isinstance(fields, ChatFields) and fields.tool_choice == "required":
        _check_tools(fields)
    text_bytes, token_ids, num_prompts = _prompt_size(fields, body)
    max_tokens = fields.max_tokens
    if isinstance(fields, ChatFields):
        max_tokens = fields.max_completion_tokens or max_tokens
    elif max_tokens is None:
        max_tokens = DEFAULT_COMPLETION_TOKENS
    return TurnFields(
        body=body,
        model=fields.model,
        user=fields.user or "",
        is_stream=fields.stream,
        wants_usage=wants_usage,
        num_choices=fields.n * num_prompts,
        max_tokens=max_tokens,
        text_bytes=text_bytes,
        token_ids=token_ids,
        has_grammar=isinstance(fields, ChatFields) and _has_grammar(fields),
    )


def _check_tools(fields: ChatFields) -> None:
    """Raises ApiError where one grammar is made of all tools' schemas, and these are too long together."""
    if len(json.dumps([tool.function.parameters for tool in fields.tools or ()])) > MAX_SCHEMA_BYTES:
        message = f"With 'tool_choice' required the schemas of all 'tools' may have at most {MAX_SCHEMA_BYTES} bytes."
        raise bad_request(message, param="tools", code="invalid_value")


def _has_grammar(fields: ChatFields) -> bool:
    is_format = fields.response_format is not None and fields.response_format.type != "text"
    return is_format or (bool(fields.tools) and fields.tool_choice != "none")


def _prompt_size(fields: CommonFields, body: dict[str, Any]) -> tuple[int, int, int]:
    """UTF-8 bytes of text, token ids, and the number of prompts."""
    if isinstance(fields, ChatFields):
        texts = json.dumps([body["messages"], body.get("tools", [])], ensure_ascii=False)
        return len(texts.encode()), 0, 1
    assert isinstance(fields, CompletionFields)
    prompt = fields.prompt
    if isinstance(prompt, str):
        return len(prompt.encode()), 0, 1
    if isinstance(prompt[0], int):
        return 0, len(prompt), 1
    text_bytes = sum(len(part.encode()) for part in prompt if isinstance(part, str))
    return text_bytes, sum(len(part) for part in prompt if isinstance(part, list)), len(prompt)
