"""The official OpenAI client against a whole service with real engines: answers and errors as OpenAI's API gives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_service import MAX_MODEL_LEN, MODEL, LiveService

from wisp_core.tiny_model.tiny_tokenizer import topic_words

USER = [{"role": "user", "content": " " + " ".join(topic_words(0)[:20])}]
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"page": {"enum": [1, 2]}},
            "required": ["page"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture
def client(live_service: LiveService) -> Iterator[openai.OpenAI]:
    live_service.wait_ready()
    with live_service.client() as opened:
        yield opened


def test_chat_answers_with_usage_and_repeats_itself_with_a_seed(client: openai.OpenAI) -> None:
    first, second = (
        client.chat.completions.create(model=MODEL, messages=USER, max_tokens=12, temperature=1, seed=7)
        for _ in range(2)
    )
    assert first.choices[0].message.role == "assistant"
    assert first.choices[0].message.content
    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.model == MODEL
    usage = first.usage
    assert usage is not None
    assert usage.completion_tokens <= 12
    assert usage.prompt_tokens > 20
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_stream_sends_the_same_answer_in_pieces(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": USER, "max_tokens": 40, "temperature": 1, "seed": 3}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    deltas = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(deltas) == whole.choices[0].message.content
    assert sum(bool(delta) for delta in deltas) > 1
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_tool_calls_go_round(client: openai.OpenAI) -> None:
    call = client.chat.completions.create(
        model=MODEL,
        messages=USER,
        max_tokens=120,
        temperature=1,
        seed=1,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "find"}},
    )
    choice = call.choices[0]
    assert choice.finish_reason == "stop"
    (tool_call,) = choice.message.tool_calls or ()
    assert tool_call.function.name == "find"
    assert json.loads(tool_call.function.arguments)["page"] in (1, 2)
    result = {"role": "tool", "tool_call_id": tool_call.id, "content": "page"}
    answer = client.chat.completions.create(
        model=MODEL, messages=[*USER, choice.message.model_dump(), result], max_tokens=8, tools=[TOOL]
    )
    assert answer.choices[0].message.content


def test_logprobs_of_each_token_with_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=5, temperature=1, seed=2, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for token in content:
        assert token.logprob <= 0
        alternatives = [one.logprob for one in token.top_logprobs]
        assert len(alternatives) >= 3
        assert max(alternatives) >= token.logprob


def test_stop_ends_before_the_word(client: openai.OpenAI) -> None:
    request = {"model": MODEL, "messages": USER, "max_tokens": 20, "temperature": 1, "seed": 5}
    words = client.chat.completions.create(**request).choices[0].message.content.split()
    stopped = client.chat.completions.create(**request, stop=[words[2]]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content.split() == words[:2]


def test_completions_and_models(client: openai.OpenAI) -> None:
    completion = client.completions.create(model=MODEL, prompt=USER[0]["content"], max_tokens=4, seed=1)
    assert completion.choices[0].text
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-nope", messages=USER)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("num_words", [MAX_MODEL_LEN, 20 * MAX_MODEL_LEN])
def test_a_prompt_that_can_never_fit_is_400_and_blocks_nobody(client: openai.OpenAI, num_words: int) -> None:
    # The first is longer than the context, the second also than the whole KV pool.
    content = " " + " ".join((topic_words(1) * (num_words // 192 + 1))[:num_words])
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=4)
    assert "context length" in str(caught.value)
    started_s = time.monotonic()
    assert client.chat.completions.create(model=MODEL, messages=USER, max_tokens=4).choices
    assert time.monotonic() - started_s < 30


def test_wrong_key_is_401(live_service: LiveService) -> None:
    with live_service.client(api_key="sk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER)
    assert caught.value.code == "invalid_api_key"


def test_over_quota_is_429_with_retry_after(live_service: LiveService) -> None:
    with live_service.client("limited") as client:
        for _ in range(2):
            client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1)
        with pytest.raises(openai.RateLimitError) as caught:
            client.chat.completions.create(model=MODEL, messages=USER, max_tokens=1)
    assert 0 < float(caught.value.response.headers["retry-after"]) <= 60


@pytest.mark.parametrize("field", ["priority", "cache_salt", "vllm_xargs", "kv_transfer_params", "chat_template"])
def test_a_field_that_is_not_allowed_is_400(client: openai.OpenAI, field: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER, extra_body={field: "x"})
    assert caught.value.param == field


@pytest.mark.parametrize(
    "own", [{"top_k": 1}, {"min_p": 1.0, "chat_template_kwargs": {"enable_thinking": False}}], ids=["top_k", "min_p"]
)
def test_vllm_s_own_sampling_fields_reach_the_engine(client: openai.OpenAI, own: dict[str, Any]) -> None:
    request = {"model": MODEL, "messages": USER, "max_tokens": 16, "temperature": 2, "logprobs": True}
    answer = client.chat.completions.create(**request, top_logprobs=1, extra_body=own)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    # Not the greedy answer's tokens: two may be the likeliest.
    assert all(one.logprob == max(top.logprob for top in one.top_logprobs) for one in logprobs.content)


@pytest.mark.parametrize("bad", [{"temperature": 9}, {"max_tokens": -1}, {"top_logprobs": 99, "logprobs": True}])
def test_bad_values_are_400_and_name_the_field(client: openai.OpenAI, bad: dict[str, object]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=USER, **bad)
    assert next(iter(bad)) in str(caught.value)
