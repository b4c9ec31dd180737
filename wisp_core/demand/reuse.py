"""How many KV blocks prefix reuse needs: LRU stack distances of prefix blocks.

The stack distance of a block is its place in the list of distinct blocks by last use, so a cache of at least that
many blocks would still hold it (Mattson et al., 1970). In a KV pool only blocks that no turn holds can be evicted, the
one that was let go first at first. So a block is still there in a pool that has room for those which were let go after
it and for all that running turns hold: their prompts, what they have written, and the last block of each, which is not
full and has no hash. A prefix is a chain: block ``i`` helps only while blocks ``0..i`` are all there, so its effective
distance is the largest among them. Far behind in a long prompt one key stands for several blocks: all of this is paid
by the scheduler, block by block, while nothing is decoded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import ReuseBin

_STEPS_PER_OCTAVE = 8
_FINE_BLOCKS = 256
"""Blocks of a prompt that are looked at one by one; behind them,"""
_COARSE_BLOCKS = 8
"""so many at a time. Fewer at the end are left out."""
_LEAST_TOKENS_PER_S = 1e-3
"""Reuse rarer than this is forgotten: a bin that only fades would be sent for ever."""


Saved = npt.NDArray[np.float64]
"""Turns, tokens and passes by edge, [edges, 3]."""


class StackDistances:
    """Keys by last use, each of some weight, and the weight of those used since a key was, in O(log n)."""

    def __init__(self, max_weight: int | None = None) -> None:
        """Remember the most recent keys, up to ``max_weight`` together; None: all."""
        self._max_weight = max_weight
        self._entries: dict[Hashable, tuple[int, int]] = {}  # slot and weight, in order of last use
        self._tree = [0] * 257  # Fenwick tree: weights by slot
        self._next_slot = 1
        self._total = 0

    def __len__(self) -> int:
        return len(self._entries)

    def since(self, key: Hashable) -> int | None:
        """Weight of the other keys used since ``key`` was: 0 for the last one used. None when not remembered."""
        entry = self._entries.get(key)
        return None if entry is None else self._total - self._sum_to(entry[0])

    def touch(self, key: Hashable, weight: int = 1) -> None:
        """Make ``key``, of this weight from now on, the most recent one."""
        self.remove(key)
        while self._max_weight is not None and self._entries and self._total + weight > self._max_weight:
            self.remove(next(iter(self._entries)))
        if self._next_slot == len(self._tree):
            self._renumber()
        self._entries[key] = (self._next_slot, weight)
        self._add(self._next_slot, weight)
        self._total += weight
        self._next_slot += 1

    def remove(self, key: Hashable) -> None:
        """Forget ``key``, where it is remembered."""
        if (entry := self._entries.pop(key, None)) is not None:
            slot, weight = entry
            self._add(slot, -weight)
            self._total -= weight

    def _renumber(self) -> None:
        self._tree = [0] * max(len(self._tree), 2 * len(self._entries) + 2)
        for slot, (key, (_, weight)) in enumerate(self._entries.items(), start=1):
            self._entries[key] = (slot, weight)
            self._add(slot, weight)
        self._next_slot = len(self._entries) + 1

    def _add(self, slot: int, change: int) -> None:
        tree, size = self._tree, len(self._tree)
        while slot < size:
            tree[slot] += change
            slot += slot & -slot

    def _sum_to(self, slot: int) -> int:
        tree, total = self._tree, 0
        while slot > 0:
            total += tree[slot]
            slot -= slot & -slot
        return total


class PrefixReuse:
    """What the prefixes of admitted turns save at every size of the pool."""

    def __init__(self, *, max_blocks: int, block_tokens: int, pass_tokens: int) -> None:
        """Remember ``max_blocks`` distinct blocks of ``block_tokens`` tokens; a prefill pass takes ``pass_tokens``."""
        self._block_tokens = block_tokens
        self._pass_tokens = pass_tokens
        self._let_go = StackDistances(max_blocks)
        self._held: Counter[Hashable] = Counter()  # by how many running turns
        self._running: dict[Hashable, list[tuple[Hashable, int]]] = {}
        self.edges = block_edges(max_blocks)

    def admit(
        self,
        turn: Hashable,
        block_hashes: Sequence[Hashable],
        *,
        num_reusable: int,
        prompt_tokens: int,
        used_blocks: int,
    ) -> Saved:
        """A turn starts: ``block_hashes`` are its prompt's full blocks, first to last.

        ``turn`` is its name, for `end`; the others are those of `saved`. Returns what reuse saves it, by distance.
        """
        saved = self.saved(
            block_hashes, num_reusable=num_reusable, prompt_tokens=prompt_tokens, used_blocks=used_blocks
        )
        self._running[turn] = _keys(block_hashes)
        for key, _ in self._running[turn]:
            self._held[key] += 1
            self._let_go.remove(key)
        return saved

    def saved(
        self,
        block_hashes: Sequence[Hashable],
        *,
        num_reusable: int,
        prompt_tokens: int,
        used_blocks: int,
    ) -> Saved:
        """What reuse would save a turn with these blocks, by distance, if it were admitted now.

        Args:
            block_hashes: Its prompt's full blocks, first to last.
            num_reusable: How many of them vLLM may take from its cache (it computes the last token anyhow).
            prompt_tokens: Length of the prompt.
            used_blocks: Blocks that running turns hold now, those without a hash too; this turn's are not among them.
        """
        saved = np.zeros((len(self.edges), 3))
        tokens = self._tokens_by_edge(block_hashes[:num_reusable], used_blocks)
        if tokens:
            saved[len(tokens) - 1, 0] = 1  # the whole reuse is there only at the deepest distance
            saved[: len(tokens), 1] = tokens
            saved[: len(tokens), 2] = self._passes_by_edge(prompt_tokens, tokens)
        return saved

    def end(self, turn: Hashable, block_hashes: Sequence[Hashable]) -> None:
        """It ends and leaves ``block_hashes``, its output in them: the first block is kept longest."""
        for key, _ in self._running.pop(turn, ()):
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
        for key, num_blocks in reversed(_keys(block_hashes)):
            if key not in self._held:
                self._let_go.touch(key, num_blocks)

    def bins(self, rates: Saved) -> tuple[ReuseBin, ...]:
        """``rates``, sums of what `admit` returned over seconds, as bins."""
        return tuple(
            ReuseBin(blocks=blocks, turns_per_s=turns, tokens_per_s=tokens, passes_per_s=passes)
            for blocks, (turns, tokens, passes) in zip(self.edges, rates.tolist(), strict=True)
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

    def _tokens_by_edge(self, block_hashes: Sequence[Hashable], used_blocks: int) -> list[int]:
        by_edge: list[int] = []
        deepest = 0
        for key, num_blocks in _keys(block_hashes):
            if key not in self._held:
                since = self._let_go.since(key)
                if since is None:
                    break
                deepest = max(deepest, since + num_blocks)
            edge = min(bisect_left(self.edges, deepest + used_blocks), len(self.edges) - 1)
            by_edge.extend([0] * (edge + 1 - len(by_edge)))
            by_edge[edge] += num_blocks * self._block_tokens
        return by_edge


def _keys(block_hashes: Sequence[Hashable]) -> list[tuple[Hashable, int]]:
    """Hashes that are looked at, first to last, and how many blocks each stands for: those up to its own."""
    fine = [(block_hash, 1) for block_hash in block_hashes[:_FINE_BLOCKS]]
    coarse = block_hashes[_FINE_BLOCKS + _COARSE_BLOCKS - 1 :: _COARSE_BLOCKS]
    return fine + [(block_hash, _COARSE_BLOCKS) for block_hash in coarse]


def passes_of(num_tokens: int, pass_tokens: int) -> int:
    """Prefill passes that compute ``num_tokens`` prompt tokens: at least one, for the first new token."""
    return max(1, -(-num_tokens // pass_tokens))


def block_edges(max_blocks: int) -> list[int]:
    """Upper edges of the bins in blocks: every number up to 11, then some 9 % apart."""
    edges = {max_blocks}
    step = 0
    while (edge := round(2 ** (step / _STEPS_PER_OCTAVE))) < max_blocks:
        edges.add(edge)
        step += 1
    return sorted(edges)
