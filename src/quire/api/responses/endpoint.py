"""OpenAI's `/v1/responses`: from its requests to generations, and the endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from quire.api.responses.addition import Addition, new_items
from quire.api.responses.background import (
    BackgroundAnswer,
    BackgroundResponse,
    cancelled,
    resumed,
)
from quire.api.responses.echo import asked_summary, constant_part
from quire.api.responses.items import WireEvent
from quire.api.responses.listing import ItemsQuery, listed, missing
from quire.api.responses.prompt import Translator
from quire.api.responses.render import ResponseChunks, ResponseEvents, ResponseSettings
from quire.api.responses.schema import (
    CountRequest,
    PromptFields,
    ResponsesRequest,
    TextFormat,
)
from quire.api.responses.store import CallerStores, Stored
from quire.api.responses.stored_item import StoredItem
from quire.api.responses.tools import toolbox
from quire.api.shared.access import note_ignored
from quire.api.shared.context import Context, ServerContext, decoding
from quire.api.shared.field_errors import Generating
from quire.api.shared.fold import consume
from quire.api.shared.formats import any_object
from quire.api.shared.kept_streams import CallerStreams
from quire.api.shared.limits import check_count
from quire.api.shared.pieces import compact, pieces, whole
from quire.api.shared.queries import read_query
from quire.api.shared.render import token_names
from quire.api.shared.schema import check_stream_options, note_verbosity
from quire.api.shared.sse import EventStream, run_headers
from quire.api.shared.stored import StoredConversations
from quire.api.shared.thinking import offered
from quire.api.shared.toolbox import Toolbox
from quire.api.shared.unsupported_media import newest, without_unsupported_media
from quire.core.errors import ContextOverflow, NotOffered, RequestError
from quire.serving.answer_grammar import AnswerFormat
from quire.serving.generation import FieldNames, Generation, Prepared, Thinking
from quire.serving.streams import GenerationStream
from quire.text.events import Event

_GENERATING = Generating("/v1/responses", ResponsesRequest)
_NAMES = FieldNames(messages="input", parameters="parameters")
_ROOM = 8  # the share of the context that `truncation: auto` leaves for an answer, one in so many


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


@dataclass(frozen=True, slots=True)
class _Said:
    """A request's input together with the conversation that it continues.

    Attributes:
        prompt: the part of a generation that shapes its prompt.
        items: all items of the conversation so far.
        new: the last of these, which the request brought.
        dropped: ids of reasoning that did not verify.
    """

    prompt: Generation
    items: tuple[StoredItem, ...]
    new: tuple[StoredItem, ...]
    tools: Toolbox
    dropped: Sequence[str]


async def _read(context: Context, request: Request, body: bytes) -> _ReadRequest:
    fields = context.parse(request, body, ResponsesRequest)
    if fields.context_management:
        note_ignored(request.scope, ["context_management"])
    said = _said(context, fields, request)
    spec = replace(said.prompt, **_generation(context, fields, request))
    if fields.truncation == "auto":
        spec = await _truncated(context, spec)
    name = spec.adapter or context.service.name
    constant = constant_part(name, fields, spec.sampling, dropped=said.dropped)
    return _ReadRequest(
        await context.prepare(spec),
        constant["id"],
        compact(constant),
        said.items,
        fields.store is not False,
        replace(said.tools, templates=()),
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
    spec = _said(context, fields, request).prompt
    if fields.truncation == "auto":
        spec = await _truncated(context, spec)
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
                store.add(asked.id, body, asked.items, output)
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
            return self._in_background(request, asked, run, settings)
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
            asked.id, settings, asked.items, store, streams, addition=asked.addition
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
        """Refuse `POST /v1/responses/compact`, which is not offered and not in `/openapi.json`."""
        raise NotOffered(
            "This server shortens no conversation; 'truncation': 'auto' leaves out its beginning.",
            code="not_implemented",
        )

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/responses/{id}`."""
        stored = self._kept(request)
        if request.query_params.get("stream", "false") == "false":
            return await whole(stored.body)
        if not stored.background:
            raise RequestError(
                "'stream' is offered for responses in the background alone.",
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


def _said(context: Context, fields: PromptFields, request: Request) -> _Said:
    """Return the whole conversation and the settings of its answer.

    Raises:
        RequestError: fields contradict each other, or refer to something that is not stored here.
    """
    context.check_model(fields.model)
    stored: StoredConversations[StoredItem] = context.stored(request)
    previous = _previous(fields, stored)
    new = new_items(fields.input, stored, {each.id for each in previous})
    conversation = (*previous, *new)
    check_count(len(conversation), context.config.max_messages, "input")
    items = [each.read() for each in conversation]
    tools, translator = toolbox(fields, items), Translator(context.signer)
    note_ignored(request.scope, tools.left_out)
    if fields.text is not None:
        note_verbosity(request.scope, fields.text.verbosity, "text.verbosity")
    messages = translator.messages(fields.instructions, items, len(new))
    note_ignored(request.scope, translator.left_out)
    last = newest("input", items, len(new) - len(items))
    prompt = Generation(
        messages=without_unsupported_media(context.service, request.scope, messages, newest=last),
        tools=tools.templates,
        strict_tools=tools.strict,
        tool_choice=tools.choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        format=_format(fields),
        thinking=_thinking(context, fields, request.scope),
        names=_NAMES,
    )
    return _Said(prompt, conversation, tuple(new), tools, dropped=translator.dropped)


def _previous(
    fields: PromptFields, stored: StoredConversations[StoredItem]
) -> Sequence[StoredItem]:
    """Return the items before those of the request.

    Raises:
        RequestError: the response or conversation that it continues is not stored.
    """
    response_id, conversation_id = fields.previous_response_id, fields.conversation_id
    if response_id is None and conversation_id is None:
        return ()
    if response_id is not None and conversation_id is not None:
        raise RequestError(
            "'previous_response_id' and 'conversation' both say what comes before: send one.",
            param="conversation",
            code="invalid_value",
        )
    if conversation_id is not None:
        items = stored.conversation(conversation_id)
        if items is None:
            raise missing("conversation", conversation_id, "conversation")
        return items
    assert response_id is not None
    history = stored.history(response_id)
    if history is None:
        raise RequestError(
            f"'previous_response_id' is '{response_id[:80]}', "
            "which is not kept here: send the whole conversation as 'input'. Only the most "
            "recently used responses are kept (--stored-responses).",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return history


def _generation(context: Context, fields: ResponsesRequest, request: Request) -> dict[str, Any]:
    """Return the parts of a `Generation` that do not shape its prompt.

    Raises:
        RequestError: fields that contradict each other or this server's limits.
    """
    check_stream_options(fields.stream_options, stream=fields.stream)
    if fields.background and fields.store is False:
        raise RequestError(
            "'background' needs 'store' to be true.", param="background", code="invalid_value"
        )
    wants_logprobs = bool(fields.top_logprobs) or _includes(fields, "message.output_text.logprobs")
    return {
        "format": fields.guided_format(request.scope, _format(fields)),
        "max_tokens": 0 if _prewarms(fields) else fields.max_output_tokens,
        **decoding(
            context,
            fields,
            request.headers,
            logprobs=fields.top_logprobs or 0 if wants_logprobs else None,
        ),
    }


def _prewarms(fields: ResponsesRequest) -> bool:
    """Return whether the prompt is only to be read into the cache."""
    return fields.prompt_cache_options is not None and fields.prompt_cache_options.prewarm is True


def _includes(fields: ResponsesRequest, what: str) -> bool:
    return what in (fields.include or ())


def _format(fields: PromptFields) -> AnswerFormat | None:
    """Return the format that constrains the answer, if any."""
    match fields.text.format if fields.text is not None else None:
        case TextFormat(type="json_object"):
            return any_object("text.format")
        case TextFormat(type="json_schema", schema_=schema, strict=strict):
            if schema is None:
                raise RequestError(
                    "Missing required parameter: 'text.format.schema'.",
                    param="text.format.schema",
                    code="missing_required_parameter",
                )
            source = compact(schema).decode()
            return AnswerFormat("json_schema", source, "text.format", strict=strict is True)
        case _:
            return None


def _thinking(context: Context, fields: PromptFields, scope: Scope) -> Thinking:
    """Return how to reason first. A model without reasoning is not asked to."""
    effort, param = fields.effort()
    match effort:
        case None:
            return Thinking()
        case "none":
            return Thinking(enabled=False)
        case _:
            return offered(context.service, scope, Thinking(enabled=True, effort=effort), param)


async def _truncated(context: Context, spec: Generation) -> Generation:
    """Return the generation without the oldest messages, for which the context has no room.

    The cut lies before a user's turn; the system prompt stays. If the last turn alone is too long,
    nothing is cut and the service refuses the request.
    """
    spec = await context.load_media(spec)
    limit = context.service.info.context_length
    room = limit - min(spec.max_tokens or limit // _ROOM, limit // 2)
    head = 1 if spec.messages and spec.messages[0]["role"] == "system" else 0
    starts = [
        index
        for index, turn in enumerate(spec.messages)
        if index >= head and turn["role"] == "user"
    ]

    async def within_context(start: int) -> Generation | None:
        cut = replace(spec, messages=(*spec.messages[:head], *spec.messages[start:]))
        try:
            (prompt,) = await context.tokens(cut)
        except ContextOverflow:
            return None
        return cut if len(prompt) <= room else None

    fitting = await within_context(head)
    if fitting is not None:
        return fitting
    low, high = 0, len(starts)
    while low < high:  # the first start from which all fits
        middle = (low + high) // 2
        cut = await within_context(starts[middle])
        if cut is None:
            low = middle + 1
        else:
            fitting, high = cut, middle
    return fitting or spec
