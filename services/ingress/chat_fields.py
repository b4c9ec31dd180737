"""The fields of OpenAI's API that a client may set, and three of vLLM's. Everything else is refused, at every level.

Of what vLLM takes beyond OpenAI's API there are ``top_k``, ``min_p`` and, in ``chat_template_kwargs``,
``enable_thinking``; priority, cache salt, transfer parameters, chat templates and the like have no field here.
Everything that may be long ends at its first fault (``fail_fast``): a list of a million faults takes a second.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

MAX_MESSAGES = 4096
MAX_PARTS = 1024
"""Parts of content in all messages together: vLLM looks at each in the loop that all of a replica's turns share."""
MAX_TOOL_CALLS = 1024
"""Tool calls in all messages together."""
MAX_CHOICES = 8
MAX_STOPS = 4
MAX_PROMPTS = 32
MAX_SCHEMA_BYTES = 64 << 10
"""Of one JSON schema. Compiling one into a grammar takes time that grows with its square: 0.1 s at this size."""
MAX_SCHEMA_DEPTH = 64
"""Levels of nesting of one JSON schema: serializers and grammar compilers recurse."""

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
LogitBias = Annotated[
    dict[Annotated[str, StringConstraints(pattern=r"^\d{1,7}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=300, fail_fast=True),
]
Identifier = Annotated[str, Field(max_length=256)]
Stop = str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)]


class Fields(BaseModel):
    """Base of all: unknown fields refused, no NaN or infinity, and no text where a number or a truth value belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class TextPart(Fields):
    """A part of a message; other types are media."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1, max_length=256, fail_fast=True)]


class CalledFunction(Fields):
    """The function of a tool call, arguments as the model wrote them."""

    name: FunctionName
    arguments: str


class ToolCall(Fields):
    """A call in an assistant's earlier message."""

    id: Annotated[str, Field(max_length=128)]
    type: Literal["function"] = "function"
    function: CalledFunction


class InputMessage(Fields):
    """From the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Annotated[str, Field(max_length=64)] | None = None


class AssistantMessage(Fields):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    name: Annotated[str, Field(max_length=64)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None


class ToolMessage(Fields):
    """The result of a tool call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[str, Field(max_length=128)]


Message = Annotated[InputMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    if len(json.dumps(schema, allow_nan=False)) > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema may have at most {MAX_SCHEMA_BYTES} bytes")
    if _is_deeper(schema, MAX_SCHEMA_DEPTH):
        raise ValueError(f"a schema may be nested at most {MAX_SCHEMA_DEPTH} levels deep")
    return schema


def _is_deeper(value: dict[str, Any], limit: int) -> bool:
    """Whether containers are nested more than ``limit`` deep, ``value`` included; does not recurse."""
    level: list[Any] = [value]
    for _ in range(limit):
        children = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
        level = [child for child in children if isinstance(child, dict | list)]
    return bool(level)


JsonSchema = Annotated[dict[str, Any], AfterValidator(_bounded)]


class FunctionSpec(Fields):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class Tool(Fields):
    """A tool; only functions."""

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Fields):
    """A function by its name."""

    name: FunctionName


class NamedTool(Fields):
    """The tool that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class PlainFormat(Fields):
    """Any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaSpec(Fields):
    """A JSON schema that the answer follows."""

    name: FunctionName
    description: str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class SchemaFormat(Fields):
    """An answer that follows a schema."""

    type: Literal["json_schema"]
    json_schema: SchemaSpec


class StreamOptions(Fields):
    """What a stream carries besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TemplateArguments(Fields):
    """The one argument of a chat template that is a client's to give: Qwen3's and others' switch."""

    enable_thinking: bool


class CommonFields(Fields):
    """Fields of both endpoints."""

    model: Annotated[str, Field(max_length=512)]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31, description="vLLM's; 0 or -1: every token.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, description="vLLM's; least share of the likeliest's.")] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stop | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    user: Identifier | None = None


class ChatFields(CommonFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    chat_template_kwargs: TemplateArguments | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: (
        Annotated[list[Annotated[str, Field(max_length=16)]], Field(min_length=1, max_length=4, fail_fast=True)] | None
    ) = None
    metadata: Annotated[dict[str, str], Field(max_length=16, fail_fast=True)] | None = None
    store: Literal[False] | None = None
    prompt_cache_key: Identifier | None = None
    prompt_cache_retention: Annotated[str, Field(max_length=16)] | None = None
    safety_identifier: Identifier | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None


TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, fail_fast=True)]


class CompletionFields(CommonFields):
    """POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
