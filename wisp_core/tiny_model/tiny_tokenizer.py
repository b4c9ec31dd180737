"""Vocabulary, byte-level BPE tokenizer and chat template of the tiny model; no training, so always the same bytes.

Topic words are two consonant-vowel syllables ("kebo"). With a leading space each is one token: the merges first build
the syllables, then put the space in front of the first one, then join the second. Any other text falls apart into
syllables and bytes, which belong to no topic.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

_SYLLABLES = tuple(c + v for c in "bdfghjklmnprstvz" for v in "aeiou")
_NUM_WORDS = len(_SYLLABLES) ** 2
_WORD_STRIDE = 2731
"""Coprime to the number of words, so that a topic's words do not share their first syllable."""

CHAT_TEMPLATE = """\
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if tools or has_system %}
    {{- '<|im_start|>system\\n' }}
    {%- if has_system %}{{- messages[0].content }}{%- endif %}
    {%- if tools %}
        {{- '\\n# Tools\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
        {{- '\\n</tools>\\nCall one as <tool_call>{"name": name, "arguments": object}</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + (message.content or '') + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}
                {{- call.function.arguments }}
            {%- else %}
                {{- call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def max_topic_words() -> int:
    """How many topic words exist, over all topics."""
    return _NUM_WORDS


def topic_words(topic: int, words_per_topic: int = 192) -> list[str]:
    """The words of ``topic``, counted from 0. They depend on nothing else, so that workloads need no model files."""
    first = topic * words_per_topic
    if topic < 0 or words_per_topic < 1 or first + words_per_topic > _NUM_WORDS:
        raise ValueError(f"no topic {topic} of {words_per_topic} words: there are {_NUM_WORDS} words in all")
    return [_word(index) for index in range(first, first + words_per_topic)]


def _word(index: int) -> str:
    first, second = divmod(index * _WORD_STRIDE % _NUM_WORDS, len(_SYLLABLES))
    return _SYLLABLES[first] + _SYLLABLES[second]


def first_word_id() -> int:
    """Token id of word 0 of topic 0; the words of all topics follow in order."""
    return 256 + 2 * len(_SYLLABLES)


def vocab_size(num_topics: int, words_per_topic: int) -> int:
    """Rows of the embedding: bytes, syllables, words and special tokens, rounded up to 64."""
    used = first_word_id() + num_topics * words_per_topic + len(SPECIAL_TOKENS) + len(TOOL_TOKENS)
    return 64 * math.ceil(used / 64)


def special_token_id(token: str, num_topics: int, words_per_topic: int) -> int:
    """Token id of one of SPECIAL_TOKENS or TOOL_TOKENS."""
    return first_word_id() + num_topics * words_per_topic + (SPECIAL_TOKENS + TOOL_TOKENS).index(token)


def _vocab_and_merges(num_topics: int, words_per_topic: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    space = "Ġ"  # How byte-level BPE writes a space.
    vocab = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []

    def merge(left: str, right: str) -> None:
        vocab[left + right] = len(vocab)
        merges.append((left, right))

    for syllable in _SYLLABLES:
        merge(syllable[0], syllable[1])
    for syllable in _SYLLABLES:
        merge(space, syllable)
    for topic in range(num_topics):
        for word in topic_words(topic, words_per_topic):
            merge(space + word[:2], word[2:])
    return vocab, merges


def write_tokenizer(directory: Path, *, num_topics: int, words_per_topic: int, max_positions: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    vocab, merges = _vocab_and_merges(num_topics, words_per_topic)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    # Not special, so that a parser of tool calls sees them in the text.
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_positions,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
