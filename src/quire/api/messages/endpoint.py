"""Anthropic's `/v1/messages`: from its requests to generations, and the endpoints.

Reasoning is sent signed and comes back with later requests. Reasoning that does not verify, because
another server or an earlier process made it, is left out of the prompt, and the answer says so in
`input_transformations`. A request with `thinking.block_binding` gets a 400 instead.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Scope

from quire.api.messages.edits import edited
from quire.api.messages.loaded_tools import loaded_tools
from quire.api.messages.prompt import (
    Conversation,
    continues,
    conversation,
    without_effect,
)
from quire.api.messages.render import (
    MessageChunks,
    MessageEvents,
    MessageFold,
    MessageSettings,
    ReasoningShown,
    WireEvent,
)
from quire.api.messages.schema import (
    CountRequest,
    MessagesRequest,
    ThinkingAdaptive,
    ThinkingDisabled,
    ThinkingEnabled,
)
from quire.api.messages.schema import ToolChoice as WireToolChoice
from quire.api.shared.access import note_ignored
from quire.api.shared.context import Context, ServerContext, decoding
from quire.api.shared.field_errors import Generating
from quire.api.shared.fold import consume
from quire.api.shared.headers import headers_of
from quire.api.shared.lenient_json import parse_lenient
from quire.api.shared.notes import note
from quire.api.shared.pieces import compact, pieces, whole
from quire.api.shared.sse import EventStream, run_headers
from quire.api.shared.thinking import offered
from quire.api.shared.unsupported_media import newest, without_unsupported_media
from quire.core.copies import changed
from quire.core.errors import RequestError
from quire.core.ids import new_id
from quire.serving.answer_grammar import AnswerFormat
from quire.serving.generation import FieldNames, Generation, Prepared, Thinking, ToolChoice
from quire.text.events import Event

Fields = TypeVar("Fields", bound=CountRequest)

VERSIONS = ("2026-10-21", "2023-06-01")
"""Versions of the API that are accepted, and served alike. Anthropic's later draft drops
`temperature`, `top_p` and `top_k`; here they work in both.
"""

_GENERATING = Generating("/v1/messages", MessagesRequest)
_NAMES = FieldNames(stops="stop_sequences", parameters="input_schema")
_INTERLEAVED = "interleaved-thinking-"  # a beta of any date
_SHARE = 0.8  # of `max_tokens`, for reasoning whose length is left to the model


@dataclass(frozen=True, slots=True)
class _ReadRequest:
    """A prepared request and the settings of its answer."""

    prepared: Prepared
    stream: bool
    max_tokens: int
    reasoning: ReasoningShown
    dropped: tuple[str, ...]
    applied_edits: tuple[WireEvent, ...] | None


async def _read(context: Context, request: Request, body: bytes) -> _ReadRequest:
    parsed = await edited(
        _parse(context, request, body=body, schema=MessagesRequest), _counter(context)
    )
    fields = parsed.fields
    said = conversation(fields, context.signer)
    return _ReadRequest(
        await context.prepare(_generation(context, fields, said=said, request=request)),
        stream=fields.stream is True,
        max_tokens=fields.max_tokens,
        reasoning=_reasoning_shown(fields),
        dropped=said.dropped,
        applied_edits=None if fields.context_management is None else tuple(parsed.applied),
    )


async def _count(context: Context, request: Request, body: bytes) -> WireEvent:
    parsed = await edited(
        _parse(context, request, body=body, schema=CountRequest), _counter(context)
    )
    tokens = await _counter(context, request.scope)(parsed.fields)
    counted: WireEvent = {"input_tokens": tokens}
    if parsed.fields.context_management is not None:
        original = tokens if parsed.original_tokens is None else parsed.original_tokens
        counted["context_management"] = {"original_input_tokens": original}
    return counted


def _counter(
    context: Context, scope: Scope | None = None
) -> Callable[[CountRequest], Awaitable[int]]:
    """Return a function that counts the tokens of a request's prompt.

    Args:
        scope: ASGI scope of the request whose ignored fields are noted; None notes none.
    """

    async def count(fields: CountRequest) -> int:
        said = conversation(fields, context.signer)
        noted: Scope = {} if scope is None else scope
        (prompt,) = await context.tokens(_prompt(context, fields, said, scope=noted))
        return len(prompt)

    return count


def _parse(context: Context, request: Request, body: bytes, schema: type[Fields]) -> Fields:
    version = request.headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        raise RequestError(
            f"The header 'anthropic-version' is '{version[:40]}'; "
            f"served are: {', '.join(VERSIONS)}.",
            param="anthropic-version",
        )
    fields = context.parse(request, body, schema, decode=parse_lenient, generating=_GENERATING)
    if fields.thread is not None:
        raise _no_threads()
    context.check_model(fields.model)
    context.check_messages(len(fields.messages))
    return fields


class Messages:
    """The endpoints of messages."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/messages`."""
        context, asked = await self._server.read(request, _read)
        if asked.dropped:
            note(request.scope, {"dropped_thoughts": len(asked.dropped)})
        run = await context.start(request, asked.prepared)
        answering = MessageSettings(
            id=f"msg_{new_id()}",
            model=context.answering(asked.prepared),
            max_tokens=asked.max_tokens,
            reasoning=asked.reasoning,
            dropped=asked.dropped,
            applied_edits=asked.applied_edits,
        )
        events = MessageEvents(answering, run, context.signer)
        if asked.stream:
            chunks = MessageChunks(events)
            return EventStream(run, chunks, keepalive=chunks.waiting)
        folding = MessageFold()

        def take(_: int, event: Event) -> None:
            for each in (*events.start(), *events.feed(event)):
                folding.add(each)

        await consume(request, run, take)
        return await whole(pieces(folding.message()), run_headers(run))

    async def count_tokens(self, request: Request) -> Response:
        """Answer `POST /v1/messages/count_tokens`. The count is exact: it uses the chat
        template.
        """
        _, counted = await self._server.read(request, _count)
        return JSONResponse(counted)


def _no_threads() -> RequestError:
    """Return the refusal that makes SDKs send whole conversations, which are cached here."""
    return RequestError(
        "'thread' is not offered by this server; send the whole conversation.",
        param="thread",
        code="thread_unsupported_request",
    )


def _prompt(context: Context, fields: CountRequest, said: Conversation, scope: Scope) -> Generation:
    """Return the part of a generation that shapes its prompt.

    Raises:
        RequestError: a tool choice without the name that it needs.
    """
    choice = fields.tool_choice
    tools = loaded_tools(fields)
    last = newest("messages", fields.messages)
    note_ignored(scope, [*without_effect(fields), *said.left_out])
    return Generation(
        messages=without_unsupported_media(context.service, scope, said.messages, newest=last),
        tools=tuple(tool.to_template() for tool in tools),
        strict_tools=frozenset(tool.name for tool in tools if tool.strict),
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=choice is None or choice.disable_parallel_tool_use is not True,
        thinking=_thinking(context, fields, scope),
        continue_final=continues(fields.messages),
        names=_NAMES,
    )


def _generation(
    context: Context, fields: MessagesRequest, said: Conversation, request: Request
) -> Generation:
    """Return the protocol-independent generation request.

    Raises:
        RequestError: fields that contradict each other or this server's limits.
    """
    prompt = _prompt(context, fields, said, scope=request.scope)
    return changed(
        decoding(context, fields, headers_of(request.scope), prompt=prompt),
        max_tokens=fields.max_tokens,
        stops=tuple(fields.stop_sequences or ()),
        format=fields.guided_format(request.scope, _format(fields)),
        thinking=_limited(context, fields, prompt.thinking, headers=request.headers),
    )


def _tool_choice(choice: WireToolChoice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    if choice.type == "tool":
        if choice.name is None:
            raise RequestError(
                "Missing required parameter: 'tool_choice.name'.",
                param="tool_choice.name",
                code="missing_required_parameter",
            )
        return ToolChoice("named", choice.name)
    return ToolChoice("required" if choice.type == "any" else choice.type)


def _thinking(context: Context, fields: CountRequest, scope: Scope) -> Thinking:
    """Return whether to reason first. A model without reasoning keeps any budget."""
    effort = fields.effort
    match fields.thinking:
        case ThinkingDisabled():
            return Thinking(enabled=False, effort=effort)
        case ThinkingEnabled() | ThinkingAdaptive():
            asked = Thinking(enabled=True, effort=effort)
            return offered(context.service, scope, thinking=asked, param="thinking")
        case _:
            return Thinking(effort=effort)


def _limited(
    context: Context, fields: MessagesRequest, thinking: Thinking, headers: Headers
) -> Thinking:
    """Return the limit on reasoning. Without one, some tokens are still reserved for the answer.

    A budget of the beta "interleaved thinking" is for all answers to a question together. It may be
    more than the `max_tokens` of one of them, and then does not limit this one.

    Raises:
        RequestError: the budget leaves nothing for the answer, or cannot be enforced.
    """
    if not thinking.enabled:
        return thinking
    asked = fields.thinking
    budget = asked.budget_tokens if isinstance(asked, ThinkingEnabled) else None
    if budget is not None and budget >= fields.max_tokens:
        if not any(_INTERLEAVED in each for each in headers.getlist("anthropic-beta")):
            raise RequestError(
                f"'thinking.budget_tokens' is {budget}, but it must be below 'max_tokens', "
                f"{fields.max_tokens}.",
                param="thinking.budget_tokens",
                code="above_max_value",
            )
        budget = None
    if not context.service.constraints.can_limit_reasoning:
        if budget is None:
            return thinking
        raise RequestError(
            "'thinking.budget_tokens' is not supported: the served model does not mark its "
            "reasoning.",
            param="thinking.budget_tokens",
            code="unsupported_parameter",
        )
    if budget is None and thinking.effort is None:
        budget = int(fields.max_tokens * _SHARE)
    return replace(thinking, budget=budget)


def _format(fields: MessagesRequest) -> AnswerFormat | None:
    """Return the format that constrains the answer, if any."""
    config = fields.output_config
    wanted = fields.output_format if config is None or config.format is None else config.format
    if wanted is None:
        return None
    return AnswerFormat("json_schema", compact(wanted.schema_).decode(), "output_config.format")


def _reasoning_shown(fields: CountRequest) -> ReasoningShown:
    """Return how reasoning is shown to the client. If not at all, the client gets its signature
    only.
    """
    match fields.thinking:
        case ThinkingDisabled():
            return "redacted"
        case (
            ThinkingEnabled(display="omitted" | "updates")
            | ThinkingAdaptive(display="omitted" | "updates")
        ):
            return "omitted"
        case _:
            return "shown"
