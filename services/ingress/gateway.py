"""One turn through the ingress: who, what, may it, where, and the answer. No HTTP framework and no Serve in here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

from services.config import ServiceConfig
from services.ingress import request_fields as fields_of
from services.ingress.buffer import SlowClientError, buffered
from services.ingress.errors import ApiError, from_engine, unavailable, unknown_model
from services.ingress.events import ERROR_START, EventFilter, Usage, error_of
from services.ingress.limits import PromptEstimator, TurnLimiter
from services.ingress.metrics import IngressMetrics
from services.ingress.placement import Turn
from services.ingress.replicas import LOST, Answer, ReplicaCall, ReplicaClient
from services.ingress.request_fields import TurnFields
from services.ingress.sessions import (
    SALT_HEADER,
    SESSION_HEADER,
    Session,
    cache_salt,
    identify,
    new_turn_id,
    prompt_key,
)
from services.ingress.tenants import TenantDirectory
from services.ingress.turn import CLIENT_GONE, Arrival, Reply, RunningTurn, status_of
from wisp_core.errors import StoreUnavailableError
from wisp_core.store.interface import SessionStore
from wisp_core.tenant_contracts import Isolation, TenantSpec, TurnRecord

logger = logging.getLogger(__name__)
ResultT = TypeVar("ResultT")

PARSED_HERE_BYTES = 64 << 10
"""Larger bodies are parsed in a thread, one at a time: that can take a tenth of a second."""
MAX_BUFFERED_BYTES = 4 << 20
"""Bytes of one answer that may wait for a slow client."""
DEFAULT_MAX_MODEL_LEN = 4096
"""Where the configuration leaves the context length to the model: what a turn without a limit reserves at most."""
SETTLE_DELAY_S = 0.002
"""Time after a turn at which it stops to count as running: its answer goes out first, and the next turn comes later."""
RECORD_DELAY_S = 0.02
"""Time after a turn at which its use is written down."""
SESSION_FIELD, WEIGHT_FIELD, KV_SHARE_FIELD = "wisp_session", "wisp_weight", "wisp_kv_share"
"""Entries of the body's ``vllm_xargs``: whose tokens these are, and the tenant's share of engine time, and of KV and
batch. The engine looks for them there."""
TURN_HEADER = "x-turn-id"
REQUEST_HEADER = "x-request-id"
"""Both carry the turn's id in an answer; the second name is OpenAI's."""


class Gateway:
    """Everything that a turn needs, wired once per ingress process."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        salt_secret: str,
        tenants: TenantDirectory,
        store: SessionStore,
        limiter: TurnLimiter,
        replicas: ReplicaClient,
        dedicated: Mapping[str, ReplicaClient],
        metrics: IngressMetrics,
    ) -> None:
        """``dedicated``: by tenant id, replicas that serve this tenant alone; ``replicas``: those of all others."""
        self._config = config
        self._salt_secret = salt_secret
        self._tenants = tenants
        self._store = store
        self._limiter = limiter
        self._replicas = replicas
        self._dedicated = dedicated
        self._metrics = metrics
        self._estimator = PromptEstimator()
        self._large_body = asyncio.Lock()
        self._large_body_of: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By tenant: one body of each waits for the common lock, so that tenants take turns."""
        self._background: set[asyncio.Task[Any]] = set()
        asked = config.replica.engine.get("max_model_len")
        self._max_model_len: int = asked if isinstance(asked, int) and asked > 0 else DEFAULT_MAX_MODEL_LEN

    @property
    def model(self) -> str:
        """The name of the model served."""
        return self._config.model.name

    async def authenticate(self, headers: Mapping[str, str]) -> TenantSpec:
        """The tenant of a request. Raises ApiError (401)."""
        return await self._tenants.authenticate(headers.get("authorization"))

    async def turn(self, path: str, headers: Mapping[str, str], raw: bytes, arrival: Arrival) -> Reply:
        """Answer one chat completion or completion. Raises ApiError."""
        began_s = time.monotonic()
        fields = await self._parse(path, raw, arrival)
        if fields.model != self.model:
            raise unknown_model(fields.model)
        tenant_id = arrival.tenant.tenant_id
        session = identify(tenant_id, fields.user, headers.get(SESSION_HEADER))
        salt = cache_salt(self._salt_secret, tenant_id, headers.get(SALT_HEADER))
        running = await self._admit(arrival, session, fields, began_s)
        try:
            reply = await self._answer(path, running, salt)
        except BaseException as error:
            running.mark_error(error)
            self._finish(running)
            raise
        ids = {TURN_HEADER: running.turn_id, REQUEST_HEADER: running.turn_id}
        if session.session_id:
            ids[SESSION_HEADER] = session.session_id
        return Reply(reply.status, {**reply.headers, **ids}, reply.body)

    @contextlib.asynccontextmanager
    async def arriving(self, tenant: TenantSpec) -> AsyncIterator[Arrival]:
        """A request, from before its body is read until its answer is here. Raises ApiError (429).

        However it ends, it takes one of its tenant's, once: as a turn that asks to be admitted, else by its end in
        here. If none is left it is refused for that.
        """
        arrival = Arrival(tenant)
        try:
            await self._limiter.arrive(tenant)
        except ApiError as error:
            self._metrics.count_refusal(tenant.tenant_id, error.status)
            raise
        try:
            yield arrival
        except BaseException as error:
            if not arrival.is_charged:
                arrival.is_charged = True
                charging = self._spawn(self._charge(tenant, error))
                if isinstance(error, ApiError) and (refused := await asyncio.shield(charging)) is not None:
                    raise refused from None
            raise
        finally:
            arrival.when_parsed(lambda: self._limiter.leave(tenant))

    async def _charge(self, tenant: TenantSpec, error: BaseException) -> ApiError | None:
        """Take a request for one that ended by ``error``; what to answer instead if none is left."""
        refused: ApiError | None = None
        try:
            await self._limiter.charge(tenant)
        except ApiError as none_left:
            refused = none_left
        self._metrics.count_refusal(tenant.tenant_id, status_of(refused or error))
        return refused

    async def _parse(self, path: str, raw: bytes, arrival: Arrival) -> TurnFields:
        if len(raw) <= PARSED_HERE_BYTES:
            return fields_of.parse(path, raw)
        own = self._large_body_of[arrival.tenant.tenant_id]
        await own.acquire()
        try:
            await self._large_body.acquire()
        except BaseException:  # a client that has gone
            own.release()
            raise
        # A thread cannot be stopped: until it ends it keeps the locks, and the request its place, whoever has left.
        arrival.parsing = asyncio.get_running_loop().run_in_executor(None, fields_of.parse, path, raw)
        arrival.parsing.add_done_callback(_retrieve)
        arrival.when_parsed(self._large_body.release)
        arrival.when_parsed(own.release)
        return await asyncio.shield(arrival.parsing)

    async def _admit(self, arrival: Arrival, session: Session, fields: TurnFields, began_s: float) -> RunningTurn:
        tenant = arrival.tenant
        prompt_tokens = self._estimator.tokens(tenant.tenant_id, fields)
        reserved_tokens = self._reserve(tenant, fields, prompt_tokens)
        turn_id = new_turn_id(tenant.tenant_id)
        arrival.is_charged = True
        admission = self._limiter.admit(
            tenant, turn_id, reserved_tokens, session.session_key, num_choices=fields.num_choices
        )
        admitting = asyncio.ensure_future(admission)
        try:
            placement = await asyncio.shield(admitting)
        except ApiError as error:
            self._metrics.count_refusal(tenant.tenant_id, error.status)
            raise
        except BaseException:  # above all a client that has gone
            self._spawn(self._undo(admitting, turn_id))
            raise
        self._metrics.begin_turn(tenant.tenant_id)
        return RunningTurn(
            tenant,
            session,
            turn_id,
            fields,
            prompt_tokens=prompt_tokens,
            reserved_tokens=reserved_tokens,
            placement=placement,
            began_s=began_s,
        )

    async def _undo(self, admitting: asyncio.Future[Any], turn_id: str) -> None:
        """End a turn that nobody waits for any more, once it is admitted or refused."""
        await asyncio.wait((admitting,))
        _retrieve(admitting)
        await self._limiter.settle(turn_id, 0)

    def _reserve(self, tenant: TenantSpec, fields: TurnFields, prompt_tokens: int) -> int:
        """Tokens that a turn may use: its prompt and ``n`` answers of the length it asks for."""
        longest = max(1, self._max_model_len - prompt_tokens)
        if fields.max_tokens is not None:
            # The engine refuses what exceeds the context; such a turn costs nothing.
            return prompt_tokens + fields.num_choices * min(fields.max_tokens, self._max_model_len)
        # Without a length a turn may go on to the end of the context, but must not be refused only for that.
        return max(prompt_tokens + 1, min(prompt_tokens + fields.num_choices * longest, tenant.tokens_per_minute))

    def _call(self, path: str, running: RunningTurn, salt: str) -> ReplicaCall:
        fields, session, placement = running.fields, running.session, running.placement
        terms = {
            SESSION_FIELD: session.session_key,
            WEIGHT_FIELD: running.tenant.weight,
            KV_SHARE_FIELD: running.tenant.kv_share,
        }
        return ReplicaCall(
            path=path,
            body=json.dumps({**fields.body, "cache_salt": salt, "vllm_xargs": terms}, ensure_ascii=False).encode(),
            headers={"content-type": "application/json", "x-request-id": running.turn_id},
            turn=Turn(
                turn_id=running.turn_id,
                session_key=session.session_key,
                user_key=session.user_key,
                prompt_key=prompt_key(self._salt_secret, session.tenant_id, fields.body),
                tenant=session.tenant_id,
                prompt_tokens_estimate=running.prompt_tokens,
                max_tokens=fields.max_tokens or 0,
                home=None if placement is None else placement.replica_id,
                home_version=0 if placement is None else placement.version,
            ),
        )

    def _replicas_of(self, tenant: TenantSpec) -> ReplicaClient:
        if tenant.isolation is Isolation.SHARED:
            return self._replicas
        own = self._dedicated.get(tenant.tenant_id)
        if own is None:
            raise unavailable("This tenant's own replicas are not running.", retry_after_s=10.0)
        return own

    async def _answer(self, path: str, running: RunningTurn, salt: str) -> Reply:
        call = self._call(path, running, salt)
        replicas = self._replicas_of(running.tenant)
        if not running.fields.is_stream:
            answer, body = await replicas.collect(call)
            return self._whole(running, answer, body)
        answer = await replicas.open(call)
        self._note_start(running, answer)
        if answer.status == 200 and answer.first.startswith(ERROR_START):
            # vLLM says 200 before it looks at some fields; nothing is sent yet, so the client gets the true status.
            answer.stream.cancel()
            raise error_of(answer.first, has_grammar=running.fields.has_grammar)
        if answer.status == 200:
            running.mark_first_token()
            stream = self._stream(running, answer)
            await anext(stream)  # Only a generator that has begun runs its ending when it is closed.
            return Reply(200, {"content-type": "text/event-stream; charset=utf-8"}, stream)
        try:
            body = b"".join([piece async for piece in answer.pieces()])
        finally:
            answer.stream.cancel()
        raise from_engine(answer.status, body, has_grammar=running.fields.has_grammar)

    def _note_start(self, running: RunningTurn, answer: Answer) -> None:
        running.replica_id = answer.replica_id
        running.status = answer.status

    def _whole(self, running: RunningTurn, answer: Answer, body: bytes) -> Reply:
        self._note_start(running, answer)
        if answer.status >= 400:
            raise from_engine(answer.status, body, has_grammar=running.fields.has_grammar)
        running.usage = Usage.of(json.loads(body))
        self._finish(running)
        return Reply(answer.status, {"content-type": "application/json"}, body)

    async def _stream(self, running: RunningTurn, answer: Answer) -> AsyncGenerator[bytes, None]:
        events = EventFilter(keeps_usage=running.fields.wants_usage, has_grammar=running.fields.has_grammar)
        tenant_id = running.tenant.tenant_id
        running.status = CLIENT_GONE
        try:
            yield b""
            async with contextlib.aclosing(buffered(answer.pieces(), MAX_BUFFERED_BYTES)) as pieces:
                async for piece in pieces:
                    if complete := events.feed(piece):
                        yield complete
            running.status = 200 if events.error is None else events.error.status
            if rest := events.rest():
                yield rest
        except LOST:
            running.status = 502
            self._metrics.count_broken(tenant_id, "replica_lost")
            yield unavailable("The server was lost while answering. The answer is incomplete.").event()
        except SlowClientError:
            self._metrics.count_broken(tenant_id, "slow_client")
            yield ApiError(408, "The answer was not read fast enough and was ended.", code="slow_client").event()
        except Exception:  # a bug here or in the replica; the client must not take a cut stream for a whole one
            running.status = 500
            self._metrics.count_broken(tenant_id, "error")
            logger.exception("a stream ended by an error")
            yield from_engine(500, b"").event()
        finally:
            answer.stream.cancel()
            running.usage, running.tokens_so_far = events.usage, events.so_far
            self._finish(running)

    def _finish(self, running: RunningTurn) -> None:
        """Account for a turn, whatever became of it; does not wait, since its task may be cancelled already."""
        if running.usage is not None:
            self._estimator.learn(running.tenant.tenant_id, running.fields, running.usage.prompt_tokens)
        self._spawn(self._account(running, running.record()))

    async def _account(self, running: RunningTurn, record: TurnRecord) -> None:
        """Soon, not at once: the answer goes out first, and the client's next turn may be on its way here."""
        try:
            await self._limiter.settle(running.turn_id, running.charged_tokens(), delay_s=SETTLE_DELAY_S)
        finally:
            self._metrics.end_turn(running.tenant.tenant_id, running.status, record)
        await asyncio.sleep(RECORD_DELAY_S)
        with contextlib.suppress(StoreUnavailableError):
            await self._store.record_turn(record)

    def _spawn(self, work: Coroutine[Any, Any, ResultT]) -> asyncio.Task[ResultT]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def drain(self) -> None:
        """Wait until every finished turn is accounted for."""
        while self._background:
            await asyncio.wait(self._background)


def _retrieve(work: asyncio.Future[Any]) -> None:
    """Take notice of an error that nobody may be there to take: ``asyncio.shield`` leaves it where its waiter has."""
    if not work.cancelled():
        work.exception()
