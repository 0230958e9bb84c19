"""Translates Ollama's messages and prompts to those of the service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from quire.api.ollama.schema import (
    AnswerFields,
    ChatRequest,
    GenerateRequest,
    Message,
    ModelOptions,
)
from quire.api.shared.access import note_ignored
from quire.api.shared.answered_calls import MadeCalls
from quire.api.shared.content import function_call, read_arguments
from quire.api.shared.context import Context, decoding
from quire.api.shared.headers import headers_of
from quire.api.shared.media_parts import media_part
from quire.api.shared.thinking import offered, template_variables
from quire.api.shared.toolbox import ClientTool, ToolboxBuilder
from quire.api.shared.unsupported_media import newest, without_unsupported_media
from quire.serving import messages
from quire.serving.gaps import Gaps
from quire.serving.generation import Generation

_DATA = "data:image/png;base64,"
"""The start of an image's URL. The format is recognised from the first bytes, not from this."""


def conversation(context: Context, request: Request, fields: ChatRequest) -> Generation:
    """Return the generation that `/api/chat` asks for.

    Raises:
        RequestError: fields that contradict each other or this server's limits.
    """
    context.check_messages(len(fields.messages))
    builder = ToolboxBuilder()
    for index, tool in enumerate(fields.tools or ()):
        about, param = tool.function, f"tools[{index}]"
        builder.add_function(
            ClientTool(about.name), about.description, about.parameters, unique=param
        )
    said = _templated(fields.messages)
    last = newest("messages", fields.messages)
    final = fields.messages[-1]
    return _generation(
        context,
        request,
        fields,
        messages=without_unsupported_media(
            context.service, request.scope, messages=said, newest=last
        ),
        tools=builder.build(choice=None).templates,
        continue_final=final.role == "assistant" and not final.tool_calls,
        or_anew=True,
    )


def prompted(context: Context, request: Request, fields: GenerateRequest) -> Generation:
    """Return the generation that `/api/generate` asks for.

    Raises:
        RequestError: as `conversation`.
    """
    if fields.context:
        note_ignored(request.scope, ["context"])
    if fields.suffix:
        without = [name for name in ("system", "images") if getattr(fields, name)]
        note_ignored(request.scope, without)  # a gap has no conversation around it
        gaps = Gaps(context.service.prompts, "suffix")
        prompt = gaps.prompt(fields.prompt or "", fields.suffix)
        generation = _generation(context, request, fields, prompts=(prompt,))
        return replace(generation, stop_token_ids=generation.stop_token_ids | gaps.ends)
    if fields.raw:
        return _generation(context, request, fields, prompts=(fields.prompt or "",))
    asked: list[messages.TemplateMessage] = []
    if fields.system:
        asked.append({"role": "system", "content": fields.system})
    asked.append({"role": "user", "content": _content(fields.prompt or "", fields.images, "")})
    said = without_unsupported_media(
        context.service, request.scope, messages=asked, newest="images"
    )
    return _generation(context, request, fields, messages=said)


def _generation(
    context: Context, request: Request, fields: AnswerFields, **asked: Any
) -> Generation:
    options, scope = fields.options or ModelOptions(), request.scope
    context.check_model(fields.model)
    options.note(scope)
    drawn = decoding(
        context,
        options.decoding(fields.keep_alive),
        headers_of(request.scope),
        logprobs=fields.alternatives,
    )
    return replace(
        drawn,
        max_tokens=options.max_tokens,
        stops=options.stops,
        format=fields.guided_format(scope, own=None),
        show_reasoning=fields.shows_reasoning,
        thinking=offered(context.service, scope, *fields.wanted()),
        template_kwargs=template_variables(context.service, scope, fields.chat_template_kwargs),
        **asked,
    )


def _templated(said: Sequence[Message]) -> list[messages.TemplateMessage]:
    """Return messages as chat templates read them."""
    shaped: list[messages.TemplateMessage] = []
    made = MadeCalls()
    for number, message in enumerate(said):
        role = "system" if message.role == "developer" else message.role
        content = _content(message.content or "", message.images, f"messages[{number}].")
        each: messages.TemplateMessage = {"role": role, "content": content}
        if message.thinking:
            each["reasoning_content"] = message.thinking
        if message.tool_calls:
            each["tool_calls"] = [
                function_call(
                    call.id or f"call_{number}_{index}",
                    call.function.name,
                    read_arguments(call.function.arguments),
                )
                for index, call in enumerate(message.tool_calls)
            ]
            made.add(each["tool_calls"])
        if role == "tool":
            each["tool_call_id"], called = made.answered(message.tool_call_id, message.tool_name)
            if called is not None:
                each["name"] = called
        shaped.append(each)
    return shaped


def _content(text: str, images: list[str] | None, path: str) -> str | list[messages.Part]:
    if not images:
        return text
    parts: list[messages.Part] = [
        media_part(
            "image",
            each if each.startswith("data:") else _DATA + each,
            param=f"{path}images[{index}]",
            named="images",
        )
        for index, each in enumerate(images)
    ]
    return [*parts, messages.text_part(text)] if text else parts
