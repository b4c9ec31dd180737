"""How many KV blocks prefix reuse needs: LRU stack distances of prefix blocks.

The stack distance of a block is its place in the list of distinct blocks by last use, so a cache of at least that
many blocks would still hold it (Mattson et al., 1970). A prefix is a chain: block ``i`` helps only while blocks
``0..i`` are all there, so its effective distance is the largest among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence

import numpy as np

from wisp_core.contracts import ReuseBin
from wisp_core.working_set.forgetting import Forgetting

_STEPS_PER_OCTAVE = 4
_LEAST_TOKENS_PER_S = 1e-3
"""Reuse rarer than this is forgotten: a bin that only fades would be sent for ever."""


class StackDistances:
    """Distinct keys by last use, with the place of each in O(log n); remembers the ``max_keys`` most recent."""

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self._slot_of: dict[Hashable, int] = {}  # in order of last use
        self._tree = [0] * (2 * max_keys + 1)  # Fenwick tree: 1 at each slot in use
        self._next_slot = 1

    def __len__(self) -> int:
        return len(self._slot_of)

    def distance(self, key: Hashable) -> int | None:
        """Distinct keys used since, the key itself included: 1 for the last one used. None when not remembered."""
        slot = self._slot_of.get(key)
        return None if slot is None else len(self._slot_of) - self._count_up_to(slot) + 1

    def touch(self, key: Hashable) -> None:
        """Make ``key`` the most recent one."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            self._add(slot, -1)
        elif len(self._slot_of) == self._max_keys:
            oldest = next(iter(self._slot_of))
            self._add(self._slot_of.pop(oldest), -1)
        if self._next_slot == len(self._tree):
            self._renumber()
        self._slot_of[key] = self._next_slot
        self._add(self._next_slot, 1)
        self._next_slot += 1

    def _renumber(self) -> None:
        keys = list(self._slot_of)
        self._tree = [0] * len(self._tree)
        for slot, key in enumerate(keys, start=1):
            self._slot_of[key] = slot
            self._add(slot, 1)
        self._next_slot = len(keys) + 1

    def _add(self, slot: int, change: int) -> None:
        while slot < len(self._tree):
            self._tree[slot] += change
            slot += slot & -slot

    def _count_up_to(self, slot: int) -> int:
        count = 0
        while slot > 0:
            count += self._tree[slot]
            slot -= slot & -slot
        return count


class PrefixReuse:
    """Reuse of prompt prefixes by distance; what is ``memory_s`` seconds old weighs 1/e."""

    def __init__(self, *, max_blocks: int, block_tokens: int, pass_tokens: int, memory_s: float) -> None:
        """Remember ``max_blocks`` distinct blocks of ``block_tokens`` tokens; a prefill pass takes ``pass_tokens``."""
        self._block_tokens = block_tokens
        self._pass_tokens = pass_tokens
        self._distances = StackDistances(max_blocks)
        self._edges = block_edges(max_blocks)
        self._memory = Forgetting(memory_s)
        self._saved = np.zeros((len(self._edges), 3))  # by edge: turns, tokens, passes

    def admit(
        self,
        block_hashes: Sequence[Hashable],
        now_s: float,
        *,
        num_reusable: int | None = None,
        prompt_tokens: int | None = None,
    ) -> None:
        """Count a turn that starts: ``block_hashes`` are its prompt's full blocks, first to last.

        Args:
            num_reusable: How many of them vLLM may take from its cache (it computes the last token anyhow).
            prompt_tokens: Length of the prompt; None: its full blocks.
        """
        tokens = self._tokens_by_edge(block_hashes[:num_reusable])
        self._saved *= self._memory.keep(now_s)
        if tokens:
            self._saved[len(tokens) - 1, 0] += 1  # the whole reuse is there only at the deepest distance
            self._saved[: len(tokens), 1] += tokens
            to_compute = len(block_hashes) * self._block_tokens if prompt_tokens is None else prompt_tokens
            self._saved[: len(tokens), 2] += self._passes_by_edge(to_compute, tokens)
        self.touch(block_hashes)

    def touch(self, block_hashes: Sequence[Hashable]) -> None:
        """Note a use without reuse, as when a turn ends and leaves its blocks: the first block is kept longest."""
        for block_hash in reversed(block_hashes):
            self._distances.touch(block_hash)

    def bins(self, now_s: float, observed_s: float) -> tuple[ReuseBin, ...]:
        """Rates by distance; early on over the ``observed_s`` seconds since the start."""
        self._saved *= self._memory.keep(now_s)
        rates = self._saved / self._memory.span_s(observed_s)
        return tuple(
            ReuseBin(blocks=blocks, turns_per_s=turns, tokens_per_s=tokens, passes_per_s=passes)
            for blocks, (turns, tokens, passes) in zip(self._edges, rates.tolist(), strict=True)
            if tokens > _LEAST_TOKENS_PER_S
        )

    def _passes_by_edge(self, to_compute: int, saved_tokens: list[int]) -> list[int]:
        """Passes that each edge's tokens save, when the nearer ones are kept too."""
        passes = []
        before = passes_of(to_compute, self._pass_tokens)
        for tokens in saved_tokens:
            to_compute -= tokens
            after = passes_of(to_compute, self._pass_tokens)
            passes.append(before - after)
            before = after
        return passes

    def _tokens_by_edge(self, block_hashes: Sequence[Hashable]) -> list[int]:
        by_edge: list[int] = []
        deepest = 0
        for block_hash in block_hashes:
            distance = self._distances.distance(block_hash)
            if distance is None:
                break
            deepest = max(deepest, distance)
            edge = bisect_left(self._edges, deepest)
            by_edge.extend([0] * (edge + 1 - len(by_edge)))
            by_edge[edge] += self._block_tokens
        return by_edge


def passes_of(num_tokens: int, pass_tokens: int) -> int:
    """Prefill passes that compute ``num_tokens`` prompt tokens: at least one, for the first new token."""
    return max(1, -(-num_tokens // pass_tokens))


def block_edges(max_blocks: int) -> list[int]:
    """Upper edges of the bins in blocks: every number up to 5, then some 19 % apart."""
    edges = {max_blocks}
    step = 0
    while (edge := round(2 ** (step / _STEPS_PER_OCTAVE))) < max_blocks:
        edges.add(edge)
        step += 1
    return sorted(edges)
