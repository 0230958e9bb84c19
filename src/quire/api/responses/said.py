"""Reads what a request says: its whole conversation, the tools, and the format of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.requests import Request
from starlette.types import Scope

from quire.api.responses.addition import new_items
from quire.api.responses.configuration import Configuration, ConfigurationUpdateItem
from quire.api.responses.listing import missing
from quire.api.responses.prompt import Translator
from quire.api.responses.schema import Item, PromptFields
from quire.api.responses.stored_item import StoredItem
from quire.api.responses.tools import toolbox
from quire.api.shared.access import note_ignored
from quire.api.shared.context import Context
from quire.api.shared.limits import check_count
from quire.api.shared.schema import note_verbosity
from quire.api.shared.stored import StoredConversations
from quire.api.shared.thinking import offered, template_variables
from quire.api.shared.toolbox import Toolbox
from quire.api.shared.unsupported_media import newest, without_unsupported_media
from quire.core.errors import ContextOverflow, RequestError
from quire.serving.generation import FieldNames, Generation, Thinking

_NAMES = FieldNames(messages="input", parameters="parameters")
_ROOM = 8
"""Divisor of the context that gives the tokens which `truncated` leaves for an answer."""


@dataclass(frozen=True, slots=True)
class Said:
    """A request's input together with the conversation that it continues.

    Attributes:
        prompt: the part of a generation that shapes its prompt.
        items: all items of the conversation so far.
        new: the last of these, which the request brought.
        configuration: reasoning effort and text format of the answer.
        dropped: ids of reasoning that did not verify.
    """

    prompt: Generation
    items: tuple[StoredItem, ...]
    new: tuple[StoredItem, ...]
    tools: Toolbox
    configuration: Configuration
    dropped: Sequence[str]


def read_said(context: Context, fields: PromptFields, request: Request) -> Said:
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
    configuration = _configuration(fields, items, len(new))
    last = newest("input", items, len(new) - len(items))
    prompt = Generation(
        messages=without_unsupported_media(context.service, request.scope, messages, newest=last),
        tools=tools.templates,
        strict_tools=tools.strict,
        tool_choice=tools.choice,
        parallel_tool_calls=fields.parallel_tool_calls is not False,
        format=configuration.answer_format(),
        thinking=_thinking(context, configuration, request.scope),
        template_kwargs=template_variables(
            context.service, request.scope, fields.chat_template_kwargs
        ),
        names=_NAMES,
    )
    return Said(
        prompt,
        conversation,
        tuple(new),
        tools=tools,
        configuration=configuration,
        dropped=translator.dropped,
    )


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
            "'previous_response_id' and 'conversation' exclude each other: send one of them.",
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


def _configuration(fields: PromptFields, items: Sequence[Item], new: int) -> Configuration:
    """Return what the request and its conversation ask of the answer.

    Args:
        new: number of items that are the request's own. Errors count from the first of these.
    """
    text = None if fields.text is None else fields.text.format
    configuration = Configuration(*fields.effort(), text)
    for index, item in enumerate(items, new - len(items)):
        if isinstance(item, ConfigurationUpdateItem):
            configuration = configuration.updated(item, f"input[{index}]")
    return configuration


def _thinking(context: Context, asked: Configuration, scope: Scope) -> Thinking:
    """Return how to reason first. A model without reasoning is not asked to."""
    match asked.effort:
        case None:
            return Thinking()
        case "none":
            return Thinking(enabled=False)
        case effort:
            thinking = Thinking(enabled=True, effort=effort)
            return offered(context.service, scope, thinking, param=asked.effort_field)


async def truncated(context: Context, spec: Generation) -> Generation:
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
