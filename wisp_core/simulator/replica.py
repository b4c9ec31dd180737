"""One replica as a discrete-event model: admission, prefill passes, decode steps, misses, prefix reuse, resizes.

Events are few: a turn comes, a pass ends, a turn ends. Between them every running turn gets one token per step and a
step takes the same time, so a whole stretch of decode steps is one event. Turns are admitted first come, first served
when what they hold on average fits the KV pool: they grow at different times, and nothing is preempted. A pass takes
prompts in order, up to the engine's limit of tokens; running turns ride along with a token each.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wisp_core.contracts import Split
from wisp_core.demand.meter import TimeShares
from wisp_core.demand.returns import Returns
from wisp_core.demand.reuse import StackDistances, block_edges, passes_of
from wisp_core.demand.turn_window import TurnWindow
from wisp_core.memory.resize_plan import Move, Refusal, plan_moves
from wisp_core.simulator.engine_model import EngineModel
from wisp_core.simulator.prefix_cache import PrefixCache
from wisp_core.simulator.totals import Totals

_EPSILON = 1e-6  # of a step


class Job(NamedTuple):
    """A turn as a replica sees it."""

    turn: int
    session: int
    topic: int
    prompt_tokens: int
    prefix_tokens: int
    output_tokens: int
    blocks: int
    """KV blocks at its full length."""
    held_blocks: int
    """Those that it holds while it runs, mean over its tokens."""


NUM_AMOUNTS = 4
"""Of a turn: itself, prompt tokens, passes without a cache, output tokens; then what reuse saves, by distance."""
_REUSE_PIECES = 4  # of a prefix: its first blocks are kept longest, so each piece has a distance of its own


class Prefill:
    """An admitted turn with the prompt tokens that are still to be computed."""

    __slots__ = ("job", "left")

    def __init__(self, job: Job, left: int) -> None:
        self.job = job
        self.left = left


class Mode(IntEnum):
    """What a replica does until its next event."""

    IDLE = 0
    DECODE = 1
    PASS = 2


class Replica:
    """Call `arrive` and `wake`; both return when to wake it next, or None for no change."""

    def __init__(
        self,
        model: EngineModel,
        split: Split,
        *,
        on_first_token: Callable[[int, float], None],
        on_end: Callable[[int, float], None],
        measures_reuse: bool,
        window_s: float = 60.0,
    ) -> None:
        """Callbacks get the turn's number and the time."""
        self.model = model
        self.window_s = window_s
        self.cap = split.cap
        self.cache = PrefixCache(split.kv_blocks)
        self.waiting: deque[Job] = deque()
        self.prefilling: deque[Prefill] = deque()
        self.mode = Mode.IDLE
        self.waiting_blocks = 0
        self.admitted_blocks = 0  # at full length
        self.peak_demand_blocks = 0
        self.topics: Counter[int] = Counter()  # of decoding turns
        self.stack: StackDistances | None = StackDistances() if measures_reuse else None
        self.edges = block_edges(4 * model.layout.max_kv_blocks)
        self.demand = TimeShares(self.edges, window_s)  # of blocks needed in full
        self.asked = TurnWindow(NUM_AMOUNTS + 3 * len(self.edges), window_s)
        self.returns = Returns()
        self.totals = Totals()
        self.mix: dict[tuple[int, int], float] = {}  # decode steps by batch and mix of topics
        self.comebacks: Counter[int] = Counter()  # of topics, by how many others ran in between
        self._is_cold = model.starts_cold
        self._decoding: list[tuple[float, int, Job]] = []
        self._steps = 0.0  # every decoding turn has had this many since the start
        self._target = 0.0  # how many there will be at the next event
        self._since_s = 0.0
        self._demand_since_s = 0.0
        self._recent_turns = 0.0  # mean over the window, recent times weighing more
        self._step_s = 0.0
        self._stall_s = 0.0  # owed by the next stretch: comebacks, resizes
        self._pass: list[tuple[Prefill, int]] = []
        self._recent_topics: OrderedDict[int, None] = OrderedDict()
        self._on_first_token = on_first_token
        self._on_end = on_end

    @property
    def split(self) -> Split:
        """The split now."""
        return Split(cap=self.cap, kv_blocks=self.cache.capacity)

    @property
    def demand_blocks(self) -> int:
        """Blocks that all turns need at full length."""
        return self.admitted_blocks + self.waiting_blocks

    @property
    def floor_blocks(self) -> int:
        """κ_min: the longest request, or what admitted turns need in full of the pool."""
        return max(self.model.layout.longest_request_blocks, min(self.admitted_blocks, self.cache.capacity))

    @property
    def num_running(self) -> int:
        """Admitted turns."""
        return len(self.prefilling) + len(self._decoding)

    @property
    def num_turns(self) -> int:
        """Admitted and waiting turns."""
        return self.num_running + len(self.waiting)

    def arrive(self, job: Job, now_s: float) -> float | None:
        """A turn comes."""
        self.observe(now_s)
        if self.stack is not None:
            self.returns.begin((job.session,), now_s)
            self.asked.begin(job.turn, self._amounts(job, self._saved(job)), now_s, job.prompt_tokens.bit_length())
        self.waiting.append(job)
        self.waiting_blocks += job.blocks
        self.peak_demand_blocks = max(self.peak_demand_blocks, self.demand_blocks)
        if self.mode is Mode.PASS:
            return None
        if self.mode is Mode.IDLE:
            return now_s  # together with whatever else comes at this moment
        if len(self.waiting) > 1 or not self._admit(now_s):
            return None
        # The step that runs ends first.
        self._advance(now_s)
        self._target = math.ceil(self._steps - _EPSILON)
        return self._since_s + (self._target - self._steps) * self._step_s

    def wake(self, now_s: float) -> float | None:
        """The stretch that was planned ends."""
        self.observe(now_s)
        if self.mode is Mode.PASS:
            self._end_pass(now_s)
        elif self.mode is Mode.DECODE:
            self._take_steps(self._target - self._steps, now_s)
            self._steps = self._target  # exactly: time and steps round differently
        while self._decoding and self._decoding[0][0] <= self._steps + _EPSILON:
            self._end(heappop(self._decoding)[2], now_s)
        self._admit(now_s)
        return self._plan(now_s)

    def resize(self, split: Split, now_s: float) -> tuple[int, float | None] | None:
        """Move towards ``split`` as far as running turns leave KV groups free: bytes moved and the next event.

        None where that is nowhere.
        """
        move = self._possible_move(split)
        if move is None:
            return None
        # New slots are empty: what they will hold is copied once.
        filled = max(0, move.cap_after - move.cap_before) * self.model.layout.num_layers
        moved_s = self.model.resize_s + move.bytes_moved * self.model.resize_s_per_byte
        if self.mode is Mode.DECODE:
            self._advance(now_s)
        self.cap = move.cap_after
        self._stall_s += moved_s + filled * self.model.copy_s
        if self.mode is Mode.PASS:
            return move.bytes_moved, None
        self._admit(now_s)
        return move.bytes_moved, self._plan(now_s)

    def _possible_move(self, target: Split) -> Move | None:
        """The first of an engine's moves for which the pool has groups, which it then has given or got."""
        layout = self.model.layout
        moves = plan_moves(
            layout,
            budget_bytes=self.model.budget_bytes,
            before=self.split,
            target=target,
            floor_blocks=self.floor_blocks,
        )
        if isinstance(moves, Refusal):
            return None
        return next((one for one in moves if self.cache.resize(layout.usable_blocks(one.groups_after))), None)

    def recent_turns(self, now_s: float) -> float:
        """Mean number of turns over the last window, recent times weighing more."""
        keep = math.exp((self._demand_since_s - now_s) / self.window_s)
        return self._recent_turns * keep + self.num_turns * (1.0 - keep)

    def observe(self, now_s: float) -> None:
        """Charge the time since the last call to the turns that were there."""
        self._recent_turns = self.recent_turns(now_s)
        self.totals.observe_turns(now_s, self.num_turns)
        if self.stack is not None:
            self.demand.observe(self._demand_since_s, self.demand_blocks)
            self.demand.advance(now_s)
        self._demand_since_s = now_s

    # -- inside -----------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        """Give every decoding turn the tokens of the time that has passed."""
        if now_s > self._since_s and self._step_s > 0:
            self._take_steps((now_s - self._since_s) / self._step_s, now_s)

    def _take_steps(self, steps: float, now_s: float) -> None:
        self._since_s = now_s
        self._steps += steps
        batch, mix = len(self._decoding), self.model.curves.mix(self.topics)
        self.mix[batch, mix] = self.mix.get((batch, mix), 0.0) + steps
        self.totals.add_decode(steps, batch, self.model.decode_step(self.cap, batch, mix))

    def _plan(self, now_s: float) -> float | None:
        """What to do next, from ``now_s`` on."""
        if self._is_cold and self._decoding and not self.prefilling:
            self._is_cold = False
            self._stall_s += self.cap * self.model.layout.num_layers * self.model.copy_s
        now_s = max(now_s, self._since_s) + self._stall_s  # a stall that is under way goes on
        self._since_s = now_s
        step_end = math.ceil(self._steps - _EPSILON)
        is_within_step = bool(self._decoding) and step_end > self._steps + _EPSILON  # a resize came in its midst
        if self.prefilling and not is_within_step:
            self.totals.stall_s += self._stall_s
            self._stall_s = 0.0
            self.mode = Mode.PASS
            return now_s + self._begin_pass()
        if not self._decoding:
            self.mode = Mode.IDLE
            return None
        self.totals.stall_s += self._stall_s
        self._stall_s = 0.0
        self.mode = Mode.DECODE
        mix = self.model.curves.mix(self.topics)
        self._step_s = self.model.decode_step(self.cap, len(self._decoding), mix).seconds
        self._target = step_end if self.prefilling else self._decoding[0][0]
        return now_s + (self._target - self._steps) * self._step_s

    def _begin_pass(self) -> float:
        """Choose the prompts of the next pass; returns its seconds."""
        left = max(1, self.model.pass_tokens - len(self._decoding))
        tokens, self._pass, by_topic = 0, [], Counter[int]()
        for entry in self.prefilling:
            share = min(left - tokens, entry.left)
            self._pass.append((entry, share))
            by_topic[entry.job.topic] += share
            tokens += share
            if tokens == left:
                break
        misses = self.model.pass_misses(0 if self._is_cold else self.cap, tokens, by_topic)
        seconds = self.model.prefill_pass_s(tokens, misses)
        self.totals.add_pass(tokens, misses, misses * self.model.pass_copy_s(tokens), seconds)
        return seconds

    def _end_pass(self, now_s: float) -> None:
        self._steps += 1.0 if self._decoding else 0.0
        self.totals.decode_tokens_in_passes += len(self._decoding)
        for entry, share in self._pass:
            entry.left -= share
            if entry.left == 0:
                self.prefilling.popleft()
                self._begin_decode(entry.job, now_s)

    def _begin_decode(self, job: Job, now_s: float) -> None:
        self._on_first_token(job.turn, now_s)
        self._note_topic(job.topic)
        if job.output_tokens <= 1:
            self._end(job, now_s)
        else:
            heappush(self._decoding, (self._steps + job.output_tokens - 1, job.turn, job))

    def _note_topic(self, topic: int) -> None:
        """A topic that comes back finds its experts gone as far as others have run."""
        if self.topics[topic] == 0 and self._recent_topics:
            others = 0
            for recent in reversed(self._recent_topics):
                if recent == topic:
                    break
                others += 1
            self.comebacks[others] += 1
            misses = self.model.curves.comeback_misses(others, self.cap)
            self._stall_s += misses * self.model.copy_s
            self.totals.comeback_misses += misses
        self._recent_topics[topic] = None
        self._recent_topics.move_to_end(topic)
        self.topics[topic] += 1

    def _end(self, job: Job, now_s: float) -> None:
        self.topics[job.topic] -= 1
        if self.topics[job.topic] == 0:
            del self.topics[job.topic]
        self.admitted_blocks -= job.blocks
        self.cache.finish(job.session, job.held_blocks, job.blocks)
        if self.stack is not None:
            self.stack.touch(job.session, job.blocks)
            self.asked.end(job.turn, now_s)
            self.returns.end(job.session, now_s)
        self._on_end(job.turn, now_s)

    def _admit(self, now_s: float) -> bool:
        """Admit waiting turns in order while they fit; whether any was."""
        layout, has_admitted = self.model.layout, False
        while (
            self.waiting
            and self.num_running < layout.max_num_seqs
            and self.cache.can_admit(self.waiting[0].held_blocks)
        ):
            job = self.waiting.popleft()
            self.waiting_blocks -= job.blocks
            if self.stack is not None:
                self._note_reuse(job)
            self.admitted_blocks += job.blocks
            own = self.cache.admit(job.session, job.held_blocks)
            reusable = min(job.prefix_tokens, job.prompt_tokens - 1) // layout.block_tokens
            hit_tokens = min(own, reusable) * layout.block_tokens
            self.totals.prompt_tokens += job.prompt_tokens
            self.totals.prompt_passes += self._passes(job.prompt_tokens)
            self.totals.hit_tokens += hit_tokens
            self.prefilling.append(Prefill(job, job.prompt_tokens - hit_tokens))
            has_admitted = True
        return has_admitted

    def _passes(self, tokens: int) -> int:
        return passes_of(tokens, self.model.pass_tokens)

    def _note_reuse(self, job: Job) -> None:
        """An admitted turn: its distances of reuse are final."""
        assert self.stack is not None
        self.asked.revise(job.turn, self._amounts(job, self._saved(job)))
        self.stack.remove(job.session)  # a running turn holds it

    def _amounts(self, job: Job, saved: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """What the turn asks for."""
        amounts = (1, job.prompt_tokens, self._passes(job.prompt_tokens), job.output_tokens)
        return np.concatenate((amounts, saved.reshape(-1)))

    def _saved(self, job: Job) -> npt.NDArray[np.float64]:
        """What reuse could save it, [edges, 3]: each piece of its prefix at its own distance."""
        assert self.stack is not None
        block_tokens = self.model.layout.block_tokens
        saved = np.zeros((len(self.edges), 3))
        blocks = min(job.prefix_tokens, job.prompt_tokens - 1) // block_tokens
        others = self.stack.since(job.session) if blocks else None
        if others is not None:
            tokens = blocks * block_tokens
            passes = self._passes(job.prompt_tokens) - self._passes(job.prompt_tokens - tokens)
            others += self.cache.running_blocks
            for piece in range(1, _REUSE_PIECES + 1):
                edge = min(bisect_left(self.edges, others + -(-blocks * piece // _REUSE_PIECES)), len(self.edges) - 1)
                saved[edge] += (piece == _REUSE_PIECES, tokens / _REUSE_PIECES, passes / _REUSE_PIECES)
        return saved
