"""Reads vLLM's scheduler state into the KV demand meters of `wisp_core.demand`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.request import RequestStatus

from wisp_core.contracts import DemandBin, KvDemand
from wisp_core.demand.meter import DemandMeter, TimeShares, Turn
from wisp_core.demand.returns import Returns
from wisp_core.demand.reuse import PrefixReuse, Saved, block_edges, passes_of
from wisp_core.demand.turn_window import Amounts, TurnWindow
from wisp_core.engine.block_balloon import BlockBalloon
from wisp_core.engine.host_kv import HostKvMeter, HostKvRates, host_blocks
from wisp_core.working_set.forgetting import DecayedSum

_REMEMBERED_POOLS = 4
"""Prefix blocks are remembered up to this many times the largest pool: reuse further apart is out of reach anyhow."""

_NUM_AMOUNTS = 4
"""Of a turn: itself, prompt tokens, passes without a cache, output tokens; then what reuse saves, by distance."""
_OUTPUT_TOKENS = 3


class TurnMeter:
    """What running and waiting turns ask of the KV pool: work at a turn's start and end, none per step."""

    def __init__(
        self,
        scheduler: Any,
        balloon: BlockBalloon,
        *,
        block_tokens: int,
        max_blocks: int,
        window_s: float,
        kv_host_bytes: int = 0,
    ) -> None:
        self._scheduler = scheduler
        self._balloon = balloon
        self._block_tokens = block_tokens
        self._demand = DemandMeter(window_s=window_s, block_tokens=block_tokens, max_model_len=scheduler.max_model_len)
        self._pass_tokens = int(scheduler.max_num_scheduled_tokens)
        self._host_blocks: int | None = None
        self._host: HostKvMeter | None = None
        if kv_host_bytes:
            # Any tensor's ``size`` is that of the one allocation that all layers share.
            block_bytes = scheduler.kv_cache_config.kv_cache_tensors[0].size // max_blocks
            self._host_blocks = host_blocks(kv_host_bytes, block_bytes)
            self._host = HostKvMeter(token_bytes=block_bytes / block_tokens, window_s=window_s)
        num_remembered = max(_REMEMBERED_POOLS * max_blocks, self._host_blocks or 0)
        self._reuse = PrefixReuse(
            max_blocks=num_remembered,
            block_tokens=block_tokens,
            pass_tokens=self._pass_tokens,
        )
        self._asked = TurnWindow(_NUM_AMOUNTS + 3 * len(self._reuse.edges), window_s)
        self._returns = Returns()
        self._shares = TimeShares(block_edges(num_remembered), window_s)
        self._preempted_tokens = DecayedSum(window_s)
        self._lost_tokens: dict[str, int] = {}
        """What preempted turns that have not come back had computed."""
        self._waiting: set[str] = set()
        """Turns that were never admitted."""
        self._unread: set[str] = set()
        """Those of them of which it is not known what reuse would save them."""
        self._started_s = time.monotonic()
        self._preemptions = 0

    def floor_blocks(self) -> int:
        """κ_min of the turns that run now, without the null block."""
        running, _ = self._turns()
        return self._demand.floor_blocks(self._balloon.used_blocks, running)

    def demand(self, now_s: float) -> KvDemand:
        """Everything measured; ``now_s`` on the monotonic clock."""
        running, waiting = self._turns()
        used_blocks = self._balloon.used_blocks
        self._observe(now_s, running, waiting)
        self._read_waiting()
        observed_s = now_s - self._started_s
        self._expect_outputs()
        asked = self._asked.rates(now_s, observed_s)
        turns, prompt_tokens, prompt_passes, output_tokens = asked[:_NUM_AMOUNTS].tolist()
        host = self._host.rates(now_s, observed_s) if self._host is not None else HostKvRates()
        return KvDemand(
            running_turns=len(running),
            waiting_turns=len(waiting),
            floor_blocks=self._demand.floor_blocks(used_blocks, running),
            demand_blocks=self._demand.peak_demand_blocks(now_s),
            used_blocks=used_blocks,
            cached_blocks=self._balloon.num_cached_blocks(),
            mean_turns=self._demand.mean_turns(now_s),
            preemptions=self._preemptions,
            prompt_tokens_per_s=prompt_tokens,
            prompt_passes_per_s=prompt_passes,
            turns_per_s=turns,
            output_tokens_per_s=output_tokens,
            preempted_tokens_per_s=self._preempted_tokens.per_s(now_s, observed_s),
            fetch_bytes_per_s=host.fetch_bytes_per_s,
            fetched_tokens_per_s=host.fetched_tokens_per_s,
            host_blocks=self._host_blocks,
            demand=tuple(DemandBin(blocks=blocks, share=share) for blocks, share in self._shares.bins()),
            reuse=self._reuse.bins(asked[_NUM_AMOUNTS:].reshape(-1, 3)),
            return_share=self._returns.share(now_s),
        )

    def note_change(self) -> None:
        """Turns came or went."""
        self._observe(time.monotonic(), *self._turns())

    def note_arrived(self, request: Any) -> None:
        """A turn is queued: what it asks for is known now; what reuse saves it is read when it starts, or is asked for.

        Reading takes long, and most turns start at once.
        """
        now_s = time.monotonic()
        if self._uses_prefixes(request):
            self._returns.begin(reversed(self._prompt_hashes(request)), now_s)
            self._unread.add(request.request_id)
        self._waiting.add(request.request_id)
        kind = request.num_prompt_tokens.bit_length()
        self._asked.begin(request.request_id, self._amounts(request, self._nothing()), now_s, kind)
        self.note_change()

    def note_scheduled(self, output: Any) -> None:
        """A step is decided: turns get their first blocks, or come back after a preemption."""
        now_s = time.monotonic()
        back = [request_id for request_id in self._lost_tokens if request_id in output.num_scheduled_tokens]
        # On a GPU vLLM has those that come back among the new ones.
        admitted = [new.req_id for new in output.scheduled_new_reqs if new.req_id not in self._lost_tokens]
        for request_id in back:
            # Blocks that lay in the prefix cache meanwhile, or came from host memory, are not computed again.
            found = self._scheduler.requests[request_id].num_computed_tokens - output.num_scheduled_tokens[request_id]
            self._preempted_tokens.add(now_s, max(0, self._lost_tokens.pop(request_id) - found))
        if admitted:
            self._admit([self._scheduler.requests[request_id] for request_id in admitted])
        if back or admitted:
            self.note_change()

    def _admit(self, requests: list[Any]) -> None:
        """Of one step: they hold their blocks already, which each of them found taken by those before it only."""
        held_blocks = [self._turn(request).held_blocks for request in requests]
        used_blocks = max(0, self._balloon.used_blocks - sum(held_blocks))
        for request, held in zip(requests, held_blocks, strict=True):
            self._unread.discard(request.request_id)
            self._waiting.discard(request.request_id)
            saved = self._nothing()
            if self._uses_prefixes(request):
                sizes = self._prompt_sizes(request)
                hashes = self._prompt_hashes(request)
                saved = self._reuse.admit(request.request_id, hashes, used_blocks=used_blocks, **sizes)
            self._asked.revise(request.request_id, self._amounts(request, saved))
            used_blocks += held

    def _read_waiting(self) -> None:
        used_blocks = self._balloon.used_blocks
        for request_id in self._unread:
            request = self._scheduler.requests[request_id]
            sizes = self._prompt_sizes(request)
            saved = self._reuse.saved(self._prompt_hashes(request), used_blocks=used_blocks, **sizes)
            self._asked.revise(request_id, self._amounts(request, saved))
        self._unread.clear()

    def _amounts(self, request: Any, saved: Saved) -> Amounts:
        """What a turn asks for; ``saved`` is what the prefix cache could save it at every size of the pool."""
        num_tokens = request.num_prompt_tokens
        passes, output_tokens = (
            passes_of(num_tokens, self._pass_tokens),
            self._demand.lengths.expect(self._turn(request)),
        )
        return np.concatenate(((1, num_tokens, passes, output_tokens), saved.reshape(-1)))

    def _nothing(self) -> Saved:
        return np.zeros((len(self._reuse.edges), 3))

    def _uses_prefixes(self, request: Any) -> bool:
        return bool(self._scheduler.kv_cache_manager.prefix_cache_lookup_enabled(request))

    def _prompt_sizes(self, request: Any) -> dict[str, int]:
        num_tokens = int(request.num_prompt_tokens)
        return {"num_reusable": (num_tokens - 1) // self._block_tokens, "prompt_tokens": num_tokens}

    def note_output(self, model_runner_output: Any) -> None:
        """The worker has run a step: what came from host memory."""
        if self._host is not None:
            self._host.note_output(model_runner_output, time.monotonic())

    def note_preemption(self, request_id: str, computed_tokens: int) -> None:
        """A running turn lost its blocks, with ``computed_tokens`` in them; some may be found again."""
        self._preemptions += 1
        self._lost_tokens[request_id] = computed_tokens

    def note_finished(self, request: Any) -> None:
        """A turn ends; what it has computed stays cached, its output too. One that never began leaves nothing."""
        self._unread.discard(request.request_id)
        if request.request_id in self._waiting:
            self._waiting.remove(request.request_id)
            self._asked.forget(request.request_id)
            return
        computed_tokens = self._lost_tokens.pop(request.request_id, request.num_computed_tokens)
        if request.status != RequestStatus.FINISHED_ABORTED:
            self._demand.lengths.observe(request.num_output_tokens, request.max_tokens)
        self._asked.learn(request.request_id, _OUTPUT_TOKENS, request.num_output_tokens)
        self._asked.end(request.request_id, time.monotonic())
        if self._scheduler.kv_cache_manager.enable_caching:
            self._reuse.end(request.request_id, self._hashes(request)[: computed_tokens // self._block_tokens])
            if prompt_hashes := self._prompt_hashes(request):
                # The next turn repeats the prompt; of the answer it may repeat a part, or other tokens for its text.
                self._returns.end(prompt_hashes[-1], time.monotonic())

    def _expect_outputs(self) -> None:
        """Turns write more than was expected when they came, as the first ones of a new kind."""
        for request in self._scheduler.requests.values():
            if not request.is_finished():
                expected = self._demand.lengths.expect(self._turn(request))
                self._asked.learn(request.request_id, _OUTPUT_TOKENS, expected)

    def _observe(self, now_s: float, running: list[Turn], waiting: list[Turn]) -> None:
        used_blocks = self._balloon.used_blocks
        self._demand.observe(now_s, used_blocks=used_blocks, running=running, waiting=waiting)
        self._shares.observe(now_s, self._demand.demand_blocks)

    def _hashes(self, request: Any) -> list[Any]:
        """One hash per full block; vLLM may hash at a finer grain, each hash covering all before it."""
        grain = self._block_tokens // self._scheduler.hash_block_size
        hashes: list[Any] = request.block_hashes[grain - 1 :: grain]
        return hashes

    def _prompt_hashes(self, request: Any) -> list[Any]:
        """Of the prompt's full blocks."""
        return self._hashes(request)[: request.num_prompt_tokens // self._block_tokens]

    def _turns(self) -> tuple[list[Turn], list[Turn]]:
        running: list[Turn] = []
        waiting: list[Turn] = []
        for request in self._scheduler.requests.values():
            if not request.is_finished():
                turn = self._turn(request)
                # A turn whose prefix comes from host memory holds blocks before it runs, and nothing preempts it.
                is_running = request.status == RequestStatus.RUNNING or turn.held_blocks > 0
                (running if is_running else waiting).append(turn)
        return running, waiting

    def _turn(self, request: Any) -> Turn:
        blocks = self._scheduler.kv_cache_manager.get_blocks(request.request_id).blocks
        return Turn(
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            max_output_tokens=request.max_tokens,
            held_blocks=max(map(len, blocks), default=0),
        )
