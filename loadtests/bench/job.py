"""What a parent asks of a child process: one engine, and what to measure with it. JSON between them."""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

_FIRST_TOKEN_ID = 3  # those before mean something to a tokenizer


class _Job(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TraceJob(_Job):
    """Routing to replay."""

    sessions: int
    positions: int
    layers: int
    experts: int
    top_k: int
    seed: int


class EngineJob(_Job):
    """One engine, and what its prompts and its routing are made of."""

    mode: str = Field(description="Name of the way that experts are kept.")
    model: str = Field(description="Directory with config.json.")
    vocab_size: int
    device: str = Field(description="cpu or cuda.")
    engine_args: dict[str, object] = Field(description="vLLM's arguments by their Python names.")
    wisp: dict[str, object] | None = Field(default=None, description="Settings of an engine that WiSP sizes.")
    has_made_up_weights: bool = Field(description="Draw weights instead of reading a checkpoint.")
    env: dict[str, str] = Field(default={}, description="Environment of this process on top of the usual one.")
    timeout_s: float = Field(description="After this the process is killed; the rows so far count.")
    must_offload: bool = Field(default=False, description="An engine that keeps all its weights on the device fails.")
    trace: TraceJob | None = Field(default=None, description="None: the model's own router decides.")
    seed: int = Field(default=1, description="Of prompts.")

    def prompt(self, session: int, num_tokens: int) -> list[int]:
        """Token ids of a session's prompt."""
        rng = random.Random(f"{self.seed}:{session}:{num_tokens}")
        return [rng.randrange(_FIRST_TOKEN_ID, self.vocab_size) for _ in range(num_tokens)]


class DecodeJob(_Job):
    """Time decode steps."""

    kind: Literal["decode"] = "decode"
    engine: EngineJob
    caps: tuple[int, ...] = Field(description="Caps to run in turn, ascending; one without a pager.")
    batches: tuple[int, ...]
    prompt_tokens: int
    warmup_tokens: int = Field(description="Tokens of each answer that are not timed.")
    timed_tokens: int
    compared_tokens: int = Field(description="First tokens of each answer that the hash covers: the same in all modes.")


class PrefillJob(_Job):
    """Time prompts until their first token."""

    kind: Literal["prefill"] = "prefill"
    engine: EngineJob
    cap: int = Field(description="Reported, and set when the engine has a pager.")
    batches: tuple[int, ...] = Field(description="Prompts at once.")
    prompt_tokens: tuple[int, ...]
    chunk_tokens: tuple[int, ...] = Field(description="Tokens of a pass, at most the engine's.")
    max_total_tokens: int = Field(description="Longer prompts together are left out.")
    repeats: int = Field(description="Runs of each kind that are timed, after one that is not.")
    enough_s: float = Field(description="No further run once they took so long; a single one is timed, though.")
    first_session: int = Field(default=0, description="Session of the trace that the first prompt follows.")


class LatencyJob(_Job):
    """Both of one engine."""

    kind: Literal["latency"] = "latency"
    engine: EngineJob
    decode: DecodeJob
    prefill: PrefillJob | None


class ResizeJob(_Job):
    """Move memory between experts and KV while requests decode."""

    kind: Literal["resize"] = "resize"
    engine: EngineJob
    step_bytes: int = Field(description="Bytes to move at a time, at least.")
    resizes: int = Field(description="Between requests, to and fro.")
    resizes_under_traffic: int = Field(description="To any split, while requests run.")
    batch: int
    prompt_tokens: int


class BudgetJob(_Job):
    """Plan, load, decode, prefill and resize beside a process that leaves no more than the budget."""

    kind: Literal["budget"] = "budget"
    engine: EngineJob = Field(description="Without tokens of a pass: the engine chooses them.")
    decode: DecodeJob = Field(description="Its caps are the plan's.")
    prefill: PrefillJob = Field(description="Its cap and tokens of a pass are the plan's.")
    resizes: int


class IdentityJob(_Job):
    """Answers of many prompts, tokens and log-probabilities, at each cap or split."""

    kind: Literal["identity"] = "identity"
    engine: EngineJob = Field(description="With settings of WiSP it is resized to the caps.")
    caps: tuple[int, ...] = Field(description="One that is not paged has one.")
    batches: tuple[tuple[int, ...], ...] = Field(description="Prompt lengths of the requests that run together.")
    answer_tokens: int


class ReturnJob(_Job):
    """Time second turns of sessions whose prefix is on the device, in host memory, or gone."""

    kind: Literal["return"] = "return"
    engine: EngineJob
    prompt_tokens: int = Field(description="Of a first turn.")
    answer_tokens: int
    new_tokens: tuple[int, ...] = Field(description="That a second turn adds to the first one and its answer.")
    repeats: int = Field(description="Sessions that are timed, after one that is not.")


class OnlineJob(_Job):
    """Play turns in a closed loop at each static split, or while a policy divides the budget."""

    kind: Literal["online"] = "online"
    engine: EngineJob = Field(description="Its trace has a session for each topic.")
    workflow: str
    num_turns: int
    seed: int
    max_context_tokens: int
    time_scale: float
    num_topics: int
    ways: tuple[int | None, ...] = Field(description="Caps of static splits; None: the policy, from the first split.")
    policy: str
    epoch_s: float = Field(description="Seconds between two decisions.")
    deadline_s: float = Field(description="A way is cut after so many seconds.")
    static_limit: float = Field(description="A static split after the policy is cut at so many times the policy's.")


Job = DecodeJob | PrefillJob | LatencyJob | ResizeJob | BudgetJob | IdentityJob | OnlineJob | ReturnJob

JOB: TypeAdapter[Job] = TypeAdapter(Annotated[Job, Field(discriminator="kind")])
"""Reads any of them."""
