"""How many KV blocks prefix reuse needs: LRU stack distances of prefix blocks.

The stack distance of a block is its place in the list of distinct blocks by last use, so a cache of at least that
many blocks would still hold it (Mattson et al., 1970). A prefix is a chain: block ``i`` helps only while blocks
``0..i`` are all there, so its effective distance is the largest among them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import ReuseBin

_STEPS_PER_OCTAVE = 8
_LEAST_TOKENS_PER_S = 1e-3
"""Reuse rarer than this is forgotten: a bin that only fades would be sent for ever."""


Saved = npt.NDArray[np.float64]
"""Turns, tokens and passes by edge, [edges, 3]."""


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
    """What the prefixes of admitted turns save at every size of the pool.

    A pool of K blocks keeps what was used since, if that and the blocks which running turns hold all the while are at
    most K: blocks in use are never evicted, however long ago they were touched.
    """

    def __init__(self, *, max_blocks: int, block_tokens: int, pass_tokens: int) -> None:
        """Remember ``max_blocks`` distinct blocks of ``block_tokens`` tokens; a prefill pass takes ``pass_tokens``."""
        self._block_tokens = block_tokens
        self._pass_tokens = pass_tokens
        self._distances = StackDistances(max_blocks)
        self._running: dict[Hashable, tuple[Hashable, int]] = {}  # turn: its block touched longest ago, its blocks
        self.edges = block_edges(max_blocks)

    def admit(
        self,
        turn: Hashable,
        block_hashes: Sequence[Hashable],
        *,
        num_reusable: int,
        prompt_tokens: int,
    ) -> Saved:
        """A turn starts: ``block_hashes`` are its prompt's full blocks, first to last.

        ``turn`` is its name, for `end`; the others are those of `saved`. Returns what reuse saves it, by distance.
        """
        saved = self.saved(block_hashes, num_reusable=num_reusable, prompt_tokens=prompt_tokens)
        self.touch(block_hashes)
        if block_hashes:
            self._running[turn] = (block_hashes[-1], len(block_hashes))
        return saved

    def saved(
        self,
        block_hashes: Sequence[Hashable],
        *,
        num_reusable: int,
        prompt_tokens: int,
    ) -> Saved:
        """What reuse would save a turn with these blocks, by distance, if it were admitted now.

        Args:
            block_hashes: Its prompt's full blocks, first to last.
            num_reusable: How many of them vLLM may take from its cache (it computes the last token anyhow).
            prompt_tokens: Length of the prompt.
        """
        saved = np.zeros((len(self.edges), 3))
        tokens = self._tokens_by_edge(block_hashes[:num_reusable])
        if tokens:
            saved[len(tokens) - 1, 0] = 1  # the whole reuse is there only at the deepest distance
            saved[: len(tokens), 1] = tokens
            saved[: len(tokens), 2] = self._passes_by_edge(prompt_tokens, tokens)
        return saved

    def end(self, turn: Hashable, block_hashes: Sequence[Hashable]) -> None:
        """It ends and leaves ``block_hashes``, its output in them: the first block is kept longest."""
        self._running.pop(turn, None)
        self.touch(block_hashes)

    def touch(self, block_hashes: Sequence[Hashable]) -> None:
        """Note a use without reuse."""
        for block_hash in reversed(block_hashes):
            self._distances.touch(block_hash)

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

    def _tokens_by_edge(self, block_hashes: Sequence[Hashable]) -> list[int]:
        by_edge: list[int] = []
        held = self._held_since_before(block_hashes[0]) if block_hashes else 0
        deepest = 0
        for block_hash in block_hashes:
            distance = self._distances.distance(block_hash)
            if distance is None:
                break
            deepest = max(deepest, distance)
            edge = min(bisect_left(self.edges, deepest + held), len(self.edges) - 1)
            by_edge.extend([0] * (edge + 1 - len(by_edge)))
            by_edge[edge] += self._block_tokens
        return by_edge

    def _held_since_before(self, block_hash: Hashable) -> int:
        """Blocks of running turns that were touched before ``block_hash`` was, and so are not in its distance."""
        since = self._distances.distance(block_hash)
        if since is None:
            return 0
        held = 0
        for oldest, num_blocks in self._running.values():
            distance = self._distances.distance(oldest)
            held += num_blocks if distance is None or distance > since else 0
        return held


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
