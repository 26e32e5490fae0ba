"""One model call: read, placed, asked of engines until one answers, and passed back."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from starlette.types import Receive, Scope, Send

from vllm_thunder.asgi import has_json_body, identity_headers, new_turn_id, path_of
from vllm_thunder.coordinator.fleet.backend import Backend
from vllm_thunder.coordinator.fleet.dispatch import Dispatch, Overloaded, Unavailable
from vllm_thunder.coordinator.prompts.prompts import Prompt
from vllm_thunder.coordinator.prompts.usage import AnswerTokens
from vllm_thunder.coordinator.proxy.answers import STREAM_PATHS
from vllm_thunder.coordinator.proxy.codings import gunzipped
from vllm_thunder.coordinator.proxy.connection import EngineLost
from vllm_thunder.coordinator.proxy.exchange import Exchange, Outcome
from vllm_thunder.coordinator.proxy.heads import (
    RequestHead,
    request_id_of,
    trace_id_of,
    value_of,
)
from vllm_thunder.coordinator.proxy.reply import Departure, Reply, is_stream, rest_of
from vllm_thunder.coordinator.proxy.request_body import BodyTooLarge, body_within
from vllm_thunder.coordinator.proxy.upstream import Upstream
from vllm_thunder.coordinator.replicas.replicas import Replicas
from vllm_thunder.program.body import acceptable_body
from vllm_thunder.program.endpoints import REPLICA_HEADER, WAITED_HEADER
from vllm_thunder.program.errors import IdentityError
from vllm_thunder.program.identity import RoutingFields, decode_routing_fields, resolve_turn
from vllm_thunder.program.turn import Turn

if TYPE_CHECKING:
    from vllm_thunder.coordinator.proxy.proxy import Proxy

__all__ = ["ModelCall"]

#: The endpoint whose calls may go on from a stored response.
_RESPONSES = "/v1/responses"
_REPLICA = REPLICA_HEADER.encode()

#: How often a call may be lost by engines that are up before it is the call that is at fault.
_MOST_LOSSES = 3


class ModelCall:
    """Serves one request; :meth:`run` leaves nothing behind however it ends."""

    __slots__ = (
        "_answer_tokens",
        "_arrived",
        "_at",
        "_body",
        "_call_id",
        "_counted",
        "_dispatch",
        "_exchange",
        "_failed",
        "_fields",
        "_head",
        "_losses",
        "_path",
        "_prompt",
        "_proxy",
        "_refused",
        "_reply",
        "_scope",
        "_span",
        "_suspect",
        "_text",
        "_turn",
        "_upstream",
    )

    def __init__(self, proxy: Proxy, scope: Scope, send: Send):
        self._proxy = proxy
        self._scope = scope
        self._path = path_of(scope)
        headers = scope["headers"]
        self._span = None if proxy.tracing is None else proxy.tracing.begin(headers)
        #: A turn's is the turn's.
        self._call_id = new_turn_id()
        span = self._span
        self._exchange = Exchange(
            self._path,
            model_call=True,
            request_id=request_id_of(headers) or self._call_id,
            trace_id=trace_id_of(headers) if span is None else span.trace_id,
        )
        self._reply = Reply(scope, send, self._exchange)
        self._upstream = Upstream(proxy.pool, proxy.ongoing, proxy.connect_seconds)
        self._arrived = 0.0
        self._head: RequestHead
        #: As it came, and with its content coding undone.
        self._body = self._text = b""
        self._fields: RoutingFields | None = None
        self._turn: Turn | None = None
        self._prompt: Prompt | None = None
        #: The engine that has the call, as far as the books go.
        self._at: Backend | None = None
        self._answer_tokens: AnswerTokens | None = None
        self._dispatch: Dispatch | None = None
        #: The engine that has the call without being a program's home; which engines lost it, or
        #: do not have what it goes on from.
        self._counted: Backend | None = None
        self._failed: list[Backend] = []
        self._losses = 0
        #: The engine said that the request is wrong.
        self._refused = False
        #: An engine that was lost when it was too late to ask another.
        self._suspect: Backend | None = None

    async def run(self, receive: Receive) -> None:
        exchange = self._exchange
        began = monotonic()
        departure: Departure | None = None
        try:
            if not await self._read(receive):
                return
            self._arrived = monotonic()
            exchange.read_seconds = self._arrived - began
            departure = Departure(receive)
            await self._serve()
        except asyncio.CancelledError:
            if departure is None or not departure.caused_it():
                raise
        finally:
            if departure is not None:
                departure.close()
            self._reply.silence()
            self._leave()
            exchange.total_seconds = monotonic() - began
            if self._span is not None:
                self._span.end(exchange)
            self._proxy.on_done(exchange)
        if self._suspect is not None and self._suspect.usable:
            await self._proxy.on_failure(self._suspect)

    # -- the request -------------------------------------------------------------------

    async def _read(self, receive: Receive) -> bool:
        """Read the request and whose it is; False when that was the end of it."""
        limit = self._proxy.max_body_bytes
        try:
            body = await body_within(limit, self._scope, receive)
            if body is None:
                return False
            self._body = self._text = body
            self._exchange.prompt_bytes = len(body)
            if has_json_body(self._scope):
                coding = value_of(self._scope["headers"], b"content-encoding").lower()
                if coding in (b"gzip", b"x-gzip"):
                    self._text = gunzipped(body, limit)
                self._fields = decode_routing_fields(self._text)
        except BodyTooLarge as error:
            await self._reply.refuse(413, str(error))
            return False
        named = identity_headers(self._scope)
        named.pop(WAITED_HEADER, None)  # that is for us to say
        try:
            self._turn = resolve_turn(
                named, self._fields, path=self._path, new_turn_id=lambda: self._call_id
            )
        except IdentityError as error:
            await self._reply.refuse(400, str(error), error.field)
            return False
        self._head = self._traced(RequestHead(self._scope, self._proxy.engine_key))
        return True

    def _traced(self, head: RequestHead) -> RequestHead:
        """Whoever gets it continues the trace from here."""
        if self._span is not None and self._span.headers:
            head.in_trace(self._span.headers)
        return head

    # -- engines -----------------------------------------------------------------------

    async def _serve(self) -> None:
        fields, replicas = self._fields, self._proxy.replicas
        passed_on = replicas is not None and bool(value_of(self._scope["headers"], _REPLICA))
        streams = fields is not None and fields.stream is True and self._path in STREAM_PATHS
        if streams and not passed_on:
            self._reply.hold(self._proxy.keepalive_seconds)
        try:
            if replicas is None or passed_on or not await self._ask_owner(replicas):
                await self._ask_engines()
        except Overloaded as error:
            await self._reply.refuse(429, str(error))
        except Unavailable as error:
            await self._reply.refuse(503, str(error))

    async def _ask_owner(self, replicas: Replicas) -> bool:
        """Whether the program is another replica's that answered; else nothing has come, and the
        call is served here: what there is to know of the program the engines tell."""
        exchange, turn = self._exchange, self._turn
        owner = None if turn is None else replicas.owner(turn.program_id)
        if turn is None or owner is None:
            return False
        exchange.program_id, exchange.replica = turn.program_id, owner.url
        sent = monotonic()
        try:
            head = self._traced(RequestHead(self._scope, passed_on_by=replicas.own))
            await self._upstream.ask(owner, head, self._body, 0.0)
            chunk = await self._upstream.first_chunk(partial(replicas.still_well, owner))
            chunk = await self._begun(chunk, sent)
        except EngineLost:
            self._upstream.drop()
            replicas.look(owner)
            exchange.replica = exchange.first_byte_seconds = None
            return False
        await self._answer(None, chunk)
        if exchange.outcome is Outcome.ENGINE_LOST:
            replicas.look(owner)
        return True

    async def _ask_engines(self) -> None:
        """One after the other until one answers."""
        backend = await self._waited_for(self._placed())
        while backend is not None:
            try:
                chunk = await self._asked(backend)
            except EngineLost as lost:
                self._upstream.drop()
                self._note_ended()
                if await self._at_fault(backend, lost):
                    return
                backend = await self._waited_for(self._placed_again(backend))
                continue
            other = self._may_be_stored_at(backend)
            if other is None:
                self._settle_at(backend)
                await self._answer(backend, chunk)
                return
            self._upstream.drop()
            self._note_ended()
            self._exchange.attempts -= 1  # that one has answered
            backend = self._count_at(other)
        raise Unavailable("no engine can be used now; try again later")

    async def _waited_for(self, placed: Awaitable[Backend | None]) -> Backend | None:
        """What is awaited; the time counts, too, if nothing comes of it."""
        try:
            return await placed
        finally:
            self._exchange.queue_seconds = monotonic() - self._arrived

    async def _placed(self) -> Backend | None:
        turn, exchange = self._turn, self._exchange
        if turn is None:
            await self._proxy.dispatcher.weights_updated(self._body_bytes())
            return self._count_at(self._proxy.fleet.least_busy())
        exchange.program_id, exchange.turn_id = turn.program_id, turn.turn_id
        prompt = self._prompt = self._proxy.calls.look(turn, self._json_text())
        self._dispatch = await self._proxy.dispatcher.place(
            turn, prompt.tokens, prompt.cached, self._body_bytes()
        )
        return self._dispatch.backend

    async def _placed_again(self, backend: Backend) -> Backend | None:
        if self._dispatch is None:
            self._failed.append(backend)
            self._count_at(None)
            await self._proxy.dispatcher.weights_updated(self._body_bytes())
            other = self._proxy.fleet.least_busy(self._failed)
            return self._count_at(other or (backend if backend.usable else None))
        if self._counted is not None:
            self._failed.append(backend)
            self._count_at(None)
        # If it is cancelled there, the turn has ended there.
        dispatch, self._dispatch = self._dispatch, None
        self._dispatch = await self._proxy.dispatcher.place_again(dispatch, self._body_bytes())
        return self._dispatch.backend

    def _json_text(self) -> bytes | None:
        """The body where engines read it as JSON."""
        return None if self._fields is None else self._text

    def _body_bytes(self) -> int:
        """What the body takes in memory until an engine answers."""
        return len(self._body) + (0 if self._text is self._body else len(self._text))

    async def _asked(self, backend: Backend) -> bytes:
        """The first of what the engine answers, b"" for nothing; EngineLost if the call has to go
        elsewhere."""
        exchange = self._exchange
        sent = monotonic()
        exchange.attempts += 1
        exchange.backend_id = backend.backend_id
        exchange.queue_seconds = sent - self._arrived
        exchange.first_byte_seconds = None
        dispatch = self._dispatch
        waited = 0.0 if dispatch is None else dispatch.waited + dispatch.credit
        self._note_sent(backend)
        await self._upstream.ask(backend, self._head, self._body_for(backend), waited)
        chunk = await self._upstream.first_chunk(partial(self._proxy.on_failure, backend))
        chunk = await self._begun(chunk, sent)
        assert self._upstream.connection is not None
        if is_stream(self._upstream.connection):
            self._proxy.calls.first_byte(backend, self._call_id)
        return chunk

    async def _begun(self, chunk: bytes, sent: float) -> bytes:
        """The first of an answer came: as much as there has to be before it is passed back."""
        connection = self._upstream.connection
        assert connection is not None
        self._exchange.first_byte_seconds = monotonic() - sent
        if self._reply.holding and not is_stream(connection):
            return await rest_of(connection, chunk)  # to be an event, it has to be whole
        return chunk

    def _may_be_stored_at(self, backend: Backend) -> Backend | None:
        """Which engine to ask next when this one does not have the response that the call goes on
        from; None: its answer stands."""
        connection, fields = self._upstream.connection, self._fields
        assert connection is not None
        if connection.status != 404 or self._path != _RESPONSES or fields is None:
            return None
        if fields.previous_response_id is None:
            return None
        self._failed.append(backend)
        return self._proxy.fleet.least_busy(self._failed)

    def _settle_at(self, backend: Backend) -> None:
        """The turn of a program that was answered where it was not placed has moved there."""
        dispatch, connection = self._dispatch, self._upstream.connection
        assert connection is not None
        if dispatch is None or dispatch.backend is backend or connection.status == 404:
            return
        if backend.usable:
            self._count_at(None)
            self._dispatch = self._proxy.dispatcher.redirected(dispatch, backend)

    async def _at_fault(self, backend: Backend, lost: EngineLost) -> bool:
        """Whether the call itself seems to be why an engine was lost; then it is refused."""
        if backend.usable and (await self._proxy.on_failure(backend) or backend.usable):
            self._losses += 1
        if self._losses < _MOST_LOSSES:
            return False
        await self._reply.refuse(
            502,
            f"engines that are up lost this request {self._losses} times, the last time "
            f"{backend.backend_id}: {lost}",
        )
        return True

    async def _answer(self, backend: Backend | None, chunk: bytes) -> None:
        """Pass an engine's answer back; None: another replica's."""
        reply, connection = self._reply, self._upstream.connection
        assert connection is not None
        self._refused = 400 <= connection.status < 500
        self._body = self._text = b""  # it is not sent again, and answers take minutes
        self._fields = None
        await reply.hush()
        if backend is not None and backend.stock and connection.status == 200:
            self._answer_tokens = AnswerTokens()
            reply.reader = self._answer_tokens.feed
        try:
            if reply.begun and not is_stream(connection):
                await reply.end_with_answer(connection, chunk)
            else:
                await reply.relay(connection, chunk)
        except EngineLost as lost:
            self._answer_tokens = None
            self._suspect = backend
            who = "engine" if backend is not None else "replica that has the program"
            await reply.cut(
                502, f"the {who} was lost while it answered ({lost}); send the request again"
            )

    def _body_for(self, backend: Backend) -> bytes:
        """What a stock engine would refuse is replaced in a labelled call."""
        if not backend.stock or self._turn is None or self._fields is None:
            return self._body
        accepted = acceptable_body(self._text, self._fields)
        if accepted is self._text:
            return self._body
        if self._body is not self._text:
            self._head.without_content_coding()
        self._body = self._text = accepted
        return accepted

    # -- the books ---------------------------------------------------------------------

    def _note_sent(self, backend: Backend) -> None:
        calls = self._proxy.calls
        if self._prompt is None:
            if not backend.stock:
                return  # nobody wants to know
            self._prompt = calls.look(None, self._json_text())
        calls.sent(backend, self._turn, self._call_id, self._prompt)
        self._at = backend

    def _note_ended(self) -> None:
        backend, self._at = self._at, None
        if backend is not None and self._prompt is not None:
            self._proxy.calls.ended(backend, self._call_id, self._prompt, self._answer_tokens)

    def _count_at(self, backend: Backend | None) -> Backend | None:
        if self._counted is not None:
            self._counted.unlabelled -= 1
        if backend is not None:
            backend.unlabelled += 1
        self._counted = backend
        return backend

    def _leave(self) -> None:
        self._upstream.drop()
        self._note_ended()
        self._count_at(None)
        if self._dispatch is not None:
            gone = self._exchange.outcome is Outcome.CLIENT_GONE
            self._proxy.dispatcher.ended(self._dispatch, refused=self._refused, cancelled=gone)
            self._dispatch = None
