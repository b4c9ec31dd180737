"""Seeded weights of the tiny model, with topics planted where the router can see them.

- Each topic has a direction; the embeddings of its words are that direction plus noise of their own.
- The gate rows of the experts that a topic prefers in a layer lean towards the topic's direction.
- Tokens of no topic (bytes, syllables, markup) share one more direction and its experts: what is alike routes alike.
- One attention head averages the topic part of the context and writes it back, so that a topic lasts.
- The output head leans the same way, so that sampling at temperature 1 stays within the topic.
- Everything else is noise, small enough for the topic to survive all layers, large enough for a wrong expert or a
  wrong KV block to change the log-probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wisp_core.tiny_model import tiny_tokenizer

if TYPE_CHECKING:
    from wisp_core.tiny_model.tiny import TinyModelConfig

Array = NDArray[np.float32]

EMBEDDING_TOPIC = 0.65
"""Share of a word's embedding that is its topic's direction; the rest, sqrt(1 - 0.65²), is the word's own noise."""
SUBLAYER_GAIN = 0.25
"""Root mean square of what one attention or expert layer adds, relative to the embedding's."""
COPY_GAIN = 0.35
"""How strongly the context's mean topic is written back, relative to the embedding."""
GATE_TOPIC = 3.0
"""Router logit that a pure topic vector gives its most preferred expert; others get noise of deviation 1."""
GATE_SLOPE = 0.2
"""How much of it the least preferred of a topic's experts lacks, so that a topic's experts differ in popularity."""
HEAD_TOPIC = 10.0
"""Output logit that a pure topic vector gives its words."""
HEAD_NOISE = 1.5
"""Standard deviation of the output logits within a topic."""
END_OF_TURN = 0.9
"""Logit of the end of a turn, relative to a topic's words: some tenths of a percent per token."""


class TinyWeights:
    """Generates the tensors of one checkpoint, each from its own seed, so that shapes of others do not matter."""

    def __init__(self, config: TinyModelConfig) -> None:
        self._config = config
        # Orthonormal rows [topics + 1, hidden]: topics do not leak into each other. The last one is of no topic.
        columns = self._rng("topics").standard_normal((config.hidden, config.topics + 1))
        directions = np.linalg.qr(columns)[0].T.astype(np.float32)
        self._topic_rows, self._plain_row = directions[:-1], directions[-1]

    def _rng(self, *path: str | int) -> np.random.Generator:
        words = [part if isinstance(part, int) else int.from_bytes(part.encode()[:8], "little") for part in path]
        return np.random.Generator(np.random.PCG64(np.random.SeedSequence([self._config.seed, *words])))

    def _noise(self, shape: tuple[int, ...], std: float, *path: str | int) -> Array:
        return (self._rng(*path).standard_normal(shape, dtype=np.float32) * np.float32(std)).astype(np.float32)

    def topic_experts(self, layer: int, topic: int) -> list[int]:
        """Experts that ``topic`` prefers in ``layer``, the most preferred first; the number of topics means none."""
        order = self._rng("prefer", layer, topic).permutation(self._config.experts)
        return [int(expert) for expert in order[: self._config.experts_per_topic]]

    def _word_rows(self) -> Iterator[tuple[int, slice]]:
        first, count = tiny_tokenizer.first_word_id(), self._config.words_per_topic
        for topic in range(self._config.topics):
            yield topic, slice(first + topic * count, first + (topic + 1) * count)

    def embedding(self) -> Array:
        """``[vocab, hidden]`` with root mean square 1 per entry."""
        config = self._config
        rows = self._noise((config.vocab_size, config.hidden), 1.0, "embed")
        shared = np.broadcast_to(self._plain_row, rows.shape).copy()
        for topic, words in self._word_rows():
            shared[words] = self._topic_rows[topic]
        own = np.float32(math.sqrt(1 - EMBEDDING_TOPIC**2))
        unit = np.float32(EMBEDDING_TOPIC * math.sqrt(config.hidden))
        return (own * rows + unit * shared).astype(np.float32)

    def output_head(self) -> Array:
        """``[vocab, hidden]``; its input is normalised to root mean square 1."""
        config = self._config
        rows = self._noise((config.vocab_size, config.hidden), HEAD_NOISE / math.sqrt(config.hidden), "head")
        unit = HEAD_TOPIC / math.sqrt(config.hidden)
        for topic, words in self._word_rows():
            rows[words] += unit * self._topic_rows[topic]
        rows[config.eos_token_id] = END_OF_TURN * unit * self._topic_rows.sum(axis=0)
        return rows

    def gate(self, layer: int) -> Array:
        """``[experts, hidden]``; its input is normalised to root mean square 1."""
        config = self._config
        rows = self._noise((config.experts, config.hidden), 1 / math.sqrt(config.hidden), "gate", layer)
        unit = GATE_TOPIC / math.sqrt(config.hidden)
        for topic, direction in enumerate([*self._topic_rows, self._plain_row]):
            preferred = self.topic_experts(layer, topic)
            for rank, expert in enumerate(preferred):
                rows[expert] += unit * (1 - GATE_SLOPE * rank / len(preferred)) * direction
        return rows

    def attention(self, layer: int) -> dict[str, Array]:
        """``q``, ``k``, ``v`` ``[heads · head_dim, hidden]`` and ``o`` ``[hidden, heads · head_dim]``."""
        config = self._config
        q_rows, kv_rows = config.heads * config.head_dim, config.kv_heads * config.head_dim
        std = 1 / math.sqrt(config.hidden)
        value = self._noise((kv_rows, config.hidden), std, "v", layer)
        out = self._noise((config.hidden, q_rows), SUBLAYER_GAIN / math.sqrt(q_rows), "o", layer)
        # Dimensions 0..topics-1 of head 0 carry the topic coordinates of the context.
        value[: config.topics] = self._topic_rows
        out[:, : config.topics] = COPY_GAIN * self._topic_rows.T
        return {
            "q": self._noise((q_rows, config.hidden), std, "q", layer),
            "k": self._noise((kv_rows, config.hidden), std, "k", layer),
            "v": value,
            "o": out,
        }

    def expert(self, layer: int, expert: int) -> dict[str, Array]:
        """``gate``, ``up`` ``[intermediate, hidden]`` and ``down`` ``[hidden, intermediate]``."""
        config = self._config
        std_in = 1.5 / math.sqrt(config.hidden)
        std_out = SUBLAYER_GAIN / math.sqrt(config.moe_intermediate)
        return {
            "gate": self._noise((config.moe_intermediate, config.hidden), std_in, "w1", layer, expert),
            "up": self._noise((config.moe_intermediate, config.hidden), std_in, "w3", layer, expert),
            "down": self._noise((config.hidden, config.moe_intermediate), std_out, "w2", layer, expert),
        }
