"""What a client may send, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.errors import ApiError
from services.ingress.request_fields import CHAT_PATH, COMPLETIONS_PATH, TurnFields, parse

HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> TurnFields:
    return parse(CHAT_PATH, json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> TurnFields:
    return parse(COMPLETIONS_PATH, json.dumps({"model": "m", "prompt": "hello", **fields}).encode())


def refusal(**fields: Any) -> dict[str, Any]:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    assert caught.value.error["type"] == "invalid_request_error"
    return caught.value.error


def test_openai_s_fields_and_three_of_vllm_s_pass_unchanged() -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 2,
        "stop": ["a", "b"],
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 3,
        "max_completion_tokens": 20,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "logit_bias": {"5": -100},
        "parallel_tool_calls": False,
        "user": "ann",
        "reasoning_effort": "low",
        "top_k": 20,
        "min_p": 0.05,
        "chat_template_kwargs": {"enable_thinking": False},
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": [1, {}]}}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}},
    }
    parsed = chat(**fields)
    assert parsed.body == {"model": "m", "messages": HELLO, **fields}
    assert (parsed.num_choices, parsed.max_tokens, parsed.user, parsed.is_stream) == (2, 20, "ann", False)


@pytest.mark.parametrize(
    "name",
    [
        "priority",
        "cache_salt",
        "vllm_xargs",
        "kv_transfer_params",
        "chat_template",
        "repetition_penalty",
        "ignore_eos",
        "prompt_logprobs",
        "structured_outputs",
        "return_token_ids",
        "mm_processor_kwargs",
        "request_id",
        "session_id",
        "routed_experts_prompt_start",
        "no_such_thing",
    ],
)
def test_every_other_field_is_refused_by_name(name: str) -> None:
    error = refusal(**{name: 1})
    assert error["param"] == name
    assert error["code"] == "unknown_parameter"
    assert refusal(**{name: None})["param"] == name


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"top_k": 1 << 31}, "top_k", "less than"),
        ({"top_k": "5"}, "top_k", "integer"),
        ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
        ({"chat_template_kwargs": {"enable_thinking": "no"}}, "chat_template_kwargs.enable_thinking", "boolean"),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs.enable_thinking", "Missing"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs", "Invalid value"),
        (
            {"chat_template_kwargs": {"enable_thinking": True, "chat_template": "{{ 1 }}"}},
            "chat_template_kwargs.chat_template",
            "Unknown parameter",
        ),
    ],
)
def test_vllm_s_own_fields_are_bounded(fields: dict[str, Any], param: str, says: str) -> None:
    error = refusal(**fields)
    assert error["param"] == param
    assert says in error["message"]


def test_nothing_else_that_vllm_adds_to_openai_s_fields_passes() -> None:
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    allowed = 0
    for name in protocol.ChatCompletionRequest.model_fields:
        try:
            chat(**{name: "x"})
        except ApiError as error:
            allowed += error.error["code"] not in ("unknown_parameter", "unsupported_parameter")
        else:
            allowed += 1
    assert allowed <= 25, "model, messages and the fields of the test above"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "weight": 1}, "messages[0].weight"),
        ({"role": "robot", "content": "x"}, "messages[0]"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}, "messages[0].content"),
        ("text", "messages[0]"),
    ],
)
def test_messages_are_checked_to_the_bottom(message: Any, param: str) -> None:
    assert str(refusal(messages=[message])["param"]).startswith(param)


def test_media_is_refused_by_name() -> None:
    error = refusal(messages=[{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "file:///"}}]}])
    assert "video_url" in error["message"]
    assert "file" not in error["message"]


def test_an_answer_may_be_sent_back_whole() -> None:
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": "because",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    result = {"role": "tool", "tool_call_id": "c1", "content": "5"}
    parsed = chat(messages=[*HELLO, answer, result])
    assert parsed.body["messages"] == [*HELLO, {"role": "assistant", "tool_calls": answer["tool_calls"]}, result]
    plain = {"role": "assistant", "content": "hi", "tool_calls": []}
    assert chat(messages=[*HELLO, plain]).body["messages"][1] == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
        ({"user": "u" * 257}, "user"),
        ({"seed": 2**63}, "seed"),
        ({"messages": []}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ],
)
def test_bounds(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert str(error["param"]).startswith(param)
    assert param.split("[", 1)[0].split(".", 1)[0] in error["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "m", "temperature": NaN}',
        b'{"model": "m", "temperature": 1e999}',
        b"[" * 100_000,
        b'{"model": ' + b"[" * 100_000,
    ],
)
def test_bodies_that_are_no_json_object(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse(CHAT_PATH, raw)
    assert caught.value.status == 400


@pytest.mark.parametrize("depth", [65, 260, 900])
def test_deep_nesting_is_the_client_s_error(depth: int) -> None:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"a": schema}
    error = refusal(tools=[{"type": "function", "function": {"name": "f", "parameters": schema}}])
    assert "nested" in error["message"]


def test_schemas_that_compile_for_minutes_are_refused() -> None:
    schema = {"enum": [f"value {i}" for i in range(10_000)]}
    function = {"name": "f", "parameters": schema}
    assert "65536 bytes" in refusal(tools=[{"type": "function", "function": function}])["message"]
    spec = {"name": "f", "schema": schema}
    assert "65536 bytes" in refusal(response_format={"type": "json_schema", "json_schema": spec})["message"]


def test_a_field_that_is_nearly_right_is_told_the_right_one() -> None:
    error = refusal(max_token=5)
    assert (error["param"], error["message"]) == (
        "max_token",
        "Unknown parameter: 'max_token'. Did you mean 'max_tokens'?",
    )
    assert refusal(colour=5)["message"] == "Unknown parameter: 'colour'."


def test_a_long_bad_value_is_not_repeated_whole() -> None:
    assert len(refusal(messages=[{"role": "x" * 100_000, "content": "a"}])["message"]) < 1000


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        parse(CHAT_PATH, b'{"model": "m"}')
    assert caught.value.error["message"] == "Missing required parameter: 'messages'."


def test_a_refusal_does_not_repeat_the_prompt() -> None:
    secret = "my-secret-prompt"
    assert secret not in json.dumps(refusal(messages=[{"role": "user", "content": {"deep": secret}}]))


def test_usage_is_always_asked_of_the_engine_in_a_stream() -> None:
    silent = chat(stream=True)
    asked = chat(stream=True, stream_options={"include_usage": True})
    always = {"include_usage": True, "continuous_usage_stats": True}
    assert silent.body["stream_options"] == asked.body["stream_options"] == always
    assert (silent.wants_usage, asked.wants_usage) == (False, True)
    assert "stream_options" not in chat().body


def test_completions_count_their_prompts() -> None:
    assert completion(prompt=[1, 2, 3]).token_ids == 3
    several = completion(prompt=[[1, 2], [3]], n=2, max_tokens=5)
    assert (several.token_ids, several.num_choices, several.max_tokens) == (3, 4, 5)
    texts = completion(prompt=["ab", "cdé"])
    assert (texts.text_bytes, texts.num_choices) == (6, 2)
    assert completion().max_tokens == 16, "OpenAI's default"


@pytest.mark.parametrize("name", ["suffix", "messages", "prompt_embeds", "tools"])
def test_completions_refuse_other_fields(name: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**{name: 1})
    assert caught.value.error["param"] == name


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"a": "b"}},
        {"modalities": ["text"]},
        {"prompt_cache_key": "k"},
        {"prompt_cache_retention": "24h"},
        {"safety_identifier": "s"},
        {"service_tier": "auto"},
        {"store": False},
    ],
)
def test_what_leaves_the_answer_as_it_is_is_taken_and_dropped(fields: dict[str, Any]) -> None:
    assert chat(**fields).body == chat().body


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["text", "audio"]},
        {"prediction": {"type": "content", "content": "x"}},
        {"verbosity": "low"},
        {"web_search_options": {}},
        {"functions": []},
    ],
)
def test_openai_s_fields_that_would_change_the_answer_are_refused_as_not_supported(fields: dict[str, Any]) -> None:
    (name,) = fields
    error = refusal(**fields)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert "not supported" in error["message"]
    assert chat(**{name: None}).body == chat().body


def test_best_of_is_taken_where_it_is_n() -> None:
    assert completion(best_of=2, n=2).body == completion(n=2).body
    for fields in ({"best_of": 2}, {"best_of": 1, "n": 2}):
        with pytest.raises(ApiError, match="best_of") as caught:
            completion(**fields)
        assert caught.value.error["code"] == "unsupported_parameter"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    ["model", "messages", "n", "stop", "tools", "tool_choice", "response_format", "logit_bias", "stream", "prompt", "x"]
)


@given(st.dictionaries(names, json_values, max_size=6), st.sampled_from([CHAT_PATH, COMPLETIONS_PATH]))
def test_any_json_is_taken_or_refused_with_400(body: dict[str, Any], path: str) -> None:
    try:
        parsed = parse(path, json.dumps(body).encode())
    except ApiError as error:
        refused = error
    else:
        assert set(parsed.body) <= {*body, "stream_options"}
        return
    assert refused.status == 400
    assert json.loads(refused.body())["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": "5"},
        {"max_tokens": 5.0},
        {"temperature": "0.5"},
        {"stream": "true"},
        {"stream": 1},
        {"n": "2"},
        {"n": True},
        {"seed": "7"},
        {"logprobs": "yes"},
        {"user": 5},
        {"logit_bias": {"5": "1"}},
        {"stop": [5]},
        {"parallel_tool_calls": 0},
    ],
)
def test_text_is_no_number_and_a_number_is_no_text(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.error["code"]) == (400, "invalid_value")


def test_whole_numbers_serve_where_fractions_do() -> None:
    assert chat(temperature=1, top_p=1).body["temperature"] == 1


def test_turns_that_follow_a_schema_are_known() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    assert chat(response_format=schema).has_grammar
    assert chat(response_format={"type": "json_object"}).has_grammar
    assert chat(tools=[tool]).has_grammar
    assert not chat(tools=[tool], tool_choice="none").has_grammar
    assert not chat(response_format={"type": "text"}).has_grammar
