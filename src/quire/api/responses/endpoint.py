"""OpenAI's `/v1/responses`: from its requests to generations, and the endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire.api.responses.addition import Addition
from quire.api.responses.background import (
    BackgroundAnswer,
    BackgroundResponse,
    cancelled,
    resumed,
)
from quire.api.responses.compaction import compacted, read_compaction
from quire.api.responses.echo import asked_summary, constant_part
from quire.api.responses.items import WireEvent
from quire.api.responses.listing import ItemsQuery, listed, missing
from quire.api.responses.render import ResponseChunks, ResponseEvents, ResponseSettings
from quire.api.responses.said import read_said, truncated
from quire.api.responses.schema import (
    CountRequest,
    ResponsesRequest,
)
from quire.api.responses.store import CallerStores, Stored
from quire.api.responses.stored_item import StoredItem
from quire.api.shared.access import note_ignored
from quire.api.shared.context import Context, ServerContext, decoding
from quire.api.shared.field_errors import Generating
from quire.api.shared.fold import collect, consume
from quire.api.shared.headers import headers_of
from quire.api.shared.kept_streams import CallerStreams
from quire.api.shared.pieces import compact, pieces, whole
from quire.api.shared.queries import read_query
from quire.api.shared.render import NoLogprobs, token_names
from quire.api.shared.schema import check_stream_options
from quire.api.shared.sse import EventStream, run_headers
from quire.api.shared.toolbox import Toolbox
from quire.core.copies import changed
from quire.core.errors import RequestError
from quire.serving.generation import Generation, Prepared
from quire.serving.streams import GenerationStream
from quire.text.events import Event

_GENERATING = Generating("/v1/responses", ResponsesRequest)


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """A prepared request and the settings of its answer.

    Attributes:
        id: the response's id.
        constant: the constant part of the response, as JSON.
        items: all items of the conversation so far.
        store: whether to keep the response.
        summary: whether the client sees reasoning.
        signed: whether the client gets packed reasoning to carry.
        prewarms: whether the prompt is only read into the cache.
        background: whether the answer continues without its client.
        addition: what joins the request's conversation, if it has one.
    """

    prepared: Prepared
    id: str
    constant: bytes
    items: tuple[StoredItem, ...]
    store: bool
    tools: Toolbox
    stream: bool
    summary: bool
    signed: bool
    prewarms: bool
    numbered: bool
    background: bool
    addition: Addition


async def _read(context: Context, request: Request, body: bytes) -> _ReadRequest:
    fields = context.parse(request, body, ResponsesRequest)
    if fields.context_management:
        note_ignored(request.scope, ["context_management"])
    said = read_said(context, fields, request)
    spec = _generation(context, fields, request, prompt=said.prompt)
    if fields.truncation == "auto":
        spec = await truncated(context, spec)
    name = spec.adapter or context.service.name
    constant = constant_part(
        name, fields, said.configuration, sampling=spec.sampling, dropped=said.dropped
    )
    return _ReadRequest(
        await context.prepare(spec),
        str(constant["id"]),
        compact(constant),
        items=said.items,
        store=fields.store is not False,
        tools=replace(said.tools, templates=()),
        stream=fields.stream is True,
        summary=asked_summary(fields.reasoning) is not None,
        signed=_includes(fields, "reasoning.encrypted_content"),
        prewarms=_prewarms(fields),
        numbered=fields.return_tokens_as_token_ids is True,
        background=fields.background is True,
        addition=Addition(fields.conversation_id, said.new),
    )


async def _count(context: Context, request: Request, body: bytes) -> WireEvent:
    fields = context.parse(request, body, CountRequest, generating=_GENERATING)
    if fields.personality is not None:
        note_ignored(request.scope, ["personality"])
    spec = read_said(context, fields, request).prompt
    if fields.truncation == "auto":
        spec = await truncated(context, spec)
    (prompt,) = await context.tokens(spec)
    return {"object": "response.input_tokens", "input_tokens": len(prompt)}


class Responses:
    """The endpoints of responses."""

    def __init__(self, server: ServerContext, stores: CallerStores, streams: CallerStreams) -> None:
        self._server = server
        self._stores = stores
        self._streams = streams

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/responses`."""
        store = self._stores.of(request)
        context, asked = await self._server.read(request, _read, store.answers)
        run = await context.start(request, asked.prepared)

        def keep(body: Sequence[bytes], output: Sequence[StoredItem]) -> None:
            if asked.store:
                store.add(asked.id, body, asked.items, output=output)
            asked.addition.join(store, output)

        settings = ResponseSettings(
            asked.constant,
            asked.tools,
            token_names(context.service.tokenizer, numbered=asked.numbered),
            summary=asked.summary,
            signer=context.signer if asked.signed else None,
            keep=keep,
            prewarms=asked.prewarms,
        )
        if asked.background:
            return self._in_background(request, asked, run, settings=settings)
        events = ResponseEvents(settings)
        if asked.stream:
            chunks = ResponseChunks(events)
            return EventStream(run, chunks, keepalive=chunks.waiting)
        last: WireEvent = {}

        def take(_: int, event: Event) -> None:
            nonlocal last
            for each in events.feed(event):
                last = each

        await consume(request, run, take)
        return await whole(pieces(last["response"]), run_headers(run))

    def _in_background(
        self,
        request: Request,
        asked: _ReadRequest,
        run: GenerationStream,
        settings: ResponseSettings,
    ) -> Response:
        """Return the answer to a background request."""
        store, streams = self._stores.of(request), self._streams.of(request.scope)
        background = BackgroundResponse(
            asked.id, settings, asked.items, store=store, streams=streams, addition=asked.addition
        )
        chunks = ResponseChunks(ResponseEvents(replace(settings, keep=background.keep)))
        events = EventStream(run, chunks, keepalive=chunks.waiting)
        return BackgroundAnswer(background, run, events, streamed=asked.stream)

    async def count_tokens(self, request: Request) -> Response:
        """Answer `POST /v1/responses/input_tokens`. The count is exact: it uses the chat
        template.
        """
        answers = self._stores.of(request).answers
        _, counted = await self._server.read(request, _count, answers)
        return JSONResponse(counted)

    async def compaction(self, request: Request) -> Response:
        """Answer `POST /v1/responses/compact` with the user's messages and a summary of all."""
        answers = self._stores.of(request).answers
        context, asked = await self._server.read(request, read_compaction, answers)
        run = await context.start(request, asked.prepared)
        slots = self._server.slots
        (answer,) = await collect(request, run, [NoLogprobs()], slots=slots)
        body = compacted(asked, answer.text, run.usage, signer=context.signer)
        return await whole(pieces(body), run_headers(run))

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/responses/{id}`."""
        stored = self._kept(request)
        if request.query_params.get("stream", "false") == "false":
            return await whole(stored.body)
        if not stored.background:
            raise RequestError(
                "'stream' is supported only for responses with 'background': true.",
                param="stream",
                code="unsupported_parameter",
            )
        return resumed(request, self._streams.of(request.scope))

    async def cancel(self, request: Request) -> Response:
        """Answer `POST /v1/responses/{id}/cancel`."""
        stored, response_id = self._kept(request), request.path_params["id"]
        await cancelled(stored, response_id, self._streams.of(request.scope))
        return await whole(self._kept(request).body)

    async def input_items(self, request: Request) -> Response:
        """Answer `GET /v1/responses/{id}/input_items`."""
        return await whole(
            pieces(listed(self._kept(request).said, read_query(request, ItemsQuery)))
        )

    async def delete(self, request: Request) -> Response:
        """Answer `DELETE /v1/responses/{id}`."""
        response_id, stored = request.path_params["id"], self._kept(request)
        self._stores.of(request).remove(response_id)
        if stored.running:
            self._streams.of(request.scope).get(response_id).stopped.set()
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _kept(self, request: Request) -> Stored:
        """Return the stored response that a path names."""
        response_id = request.path_params["id"]
        stored = self._stores.of(request).get(response_id)
        if stored is None:
            raise missing("response", response_id, "id")
        return stored


def _generation(
    context: Context, fields: ResponsesRequest, request: Request, prompt: Generation
) -> Generation:
    """Return a generation of a prompt with the fields that do not shape it.

    Raises:
        RequestError: fields that contradict each other or this server's limits.
    """
    check_stream_options(fields.stream_options, stream=fields.stream)
    if fields.background and fields.store is False:
        raise RequestError(
            "'background' needs 'store' to be true.", param="background", code="invalid_value"
        )
    wants_logprobs = bool(fields.top_logprobs) or _includes(fields, "message.output_text.logprobs")
    logprobs = fields.top_logprobs or 0 if wants_logprobs else None
    return changed(
        decoding(context, fields, headers_of(request.scope), logprobs=logprobs, prompt=prompt),
        format=fields.guided_format(request.scope, prompt.format),
        max_tokens=0 if _prewarms(fields) else fields.max_output_tokens,
    )


def _prewarms(fields: ResponsesRequest) -> bool:
    """Return whether the prompt is only to be read into the cache."""
    return fields.prompt_cache_options is not None and fields.prompt_cache_options.prewarm is True


def _includes(fields: ResponsesRequest, what: str) -> bool:
    return what in (fields.include or ())
