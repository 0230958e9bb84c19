"""Chat templates: render messages to the prompt's text, like `apply_chat_template` of transformers
5.

A template is a program that comes with the model. So it runs in jinja's immutable sandbox and sees
only plain JSON values, and any exception that it raises becomes an error of the request.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils

from quire.core.errors import ModelError, RequestError
from quire.text.controls import SENTINEL
from quire.text.template_calls import (
    CallForm,
    ContentForms,
    Message,
    ToolsForm,
    call_form,
    tools_form,
    with_tools,
)
from quire.text.template_files import DEFAULT, TOOL_USE, template_sources
from quire.text.template_sandbox import TemplateSandbox
from quire.text.template_system import SYSTEM_ROLES, SystemForm, system_form

# Keys of a message's reasoning. The first is the one that most templates read.
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
# Marks the end of a message that the model is to continue. The private-use character does not
# occur in templates.
_CONTINUE = "\ue0f0continue"
_PROBE = "\ue0f1probe"
_NO_MARKS: Mapping[str, str] = {}
# Characters that ASCII JSON escapes, except for the sentinels of `quire.text.controls`.
_NOT_ASCII = re.compile(f"[^\x00-\x7f{SENTINEL}]")


class NotContinued(RequestError):
    """Raised if the last message has no text to continue, or if the template does not show it."""


class ChatTemplate:
    """A model's compiled chat templates.

    Args:
        sources: template texts by name. "tool_use" is used for requests with tools, "default"
            otherwise.
        special_tokens: texts by name, such as `bos_token`, visible to the template.

    Attributes:
        variables: names of the variables that the templates read, such as `enable_thinking`.

    Raises:
        ModelError: a template is not valid jinja.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        self._compiled: dict[str, jinja2.Template] = {}
        self._forms: dict[tuple[str, bool], ContentForms] = {}
        self._call_forms: dict[tuple[bool, bool], CallForm] = {}
        self._system_forms: dict[bool, SystemForm] = {}
        self._tools_form: ToolsForm | None = None
        variables: set[str] = set()
        for name, source in self._sources.items():
            try:
                self._compiled[name] = compiled = environment.from_string(source)
                compiled.globals = dict(compiled.globals)  # of maps, which are slow to copy
                variables |= jinja2.meta.find_undeclared_variables(environment.parse(source))
            except jinja2.TemplateSyntaxError as error:
                raise ModelError(
                    f"chat template {name!r}, line {error.lineno}: {error.message}"
                ) from error
            except (RecursionError, SyntaxError, MemoryError) as error:  # Python's own compiler
                raise ModelError(f"chat template {name!r} is nested too deeply") from error
        self.variables = frozenset(variables - environment.globals.keys())

    @classmethod
    def open(cls, folder: str | Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Compile the templates of a model folder. There may be none, see `exists`.

        Raises:
            ModelError: a file cannot be read.
        """
        return cls(template_sources(Path(folder)), special_tokens)

    @property
    def exists(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._sources)

    @property
    def source(self) -> str:
        """The text of all templates, from which the dialect is chosen."""
        return "\n".join(self._sources.values())

    def content_forms(self, role: str, *, tools: bool = False) -> ContentForms:
        """Return the forms of content that the template renders for messages of this role.

        Some templates write a message's content, some iterate over its parts, some do either. If a
        template shows neither form, both are reported.

        Args:
            tools: whether the request has tools, for which there may be another template.
        """
        key = role, tools
        if key not in self._forms:
            text = self._shows_text(role, _PROBE, tools)
            parts = self._shows_text(role, [_text_part(_PROBE)], tools)
            self._forms[key] = ContentForms(text or not parts, parts or not text)
        return self._forms[key]

    def _shows_text(self, role: str, content: Any, tools: bool) -> bool:
        """Return whether the template shows the probe text that a message's content is, or
        holds.
        """
        messages: list[Message] = [{"role": role, "content": content}]
        if role != "user":
            messages.insert(1 if role in SYSTEM_ROLES else 0, self._probe("user", tools))
        try:
            # The probe contains a character that is escaped if a list is written as Python text.
            return _PROBE in self._render(messages, tools=[] if tools else None)
        except RequestError:
            return False

    def _probe(self, role: str, tools: bool) -> Message:
        """Return a short message that the template can read."""
        text = self.content_forms(role, tools=tools).text
        return {"role": role, "content": "?" if text else [_text_part("?")]}

    def _try(self, messages: list[Message], tools: Sequence[Mapping[str, Any]] | None) -> str:
        return self._render(messages, tools=tools)

    def _with_calls(self, message: Message, tools: bool) -> list[Message]:
        """Return a message with its calls in the form that the template shows."""
        if not message.get("tool_calls"):
            return [message]
        key = "content" not in message, tools
        if key not in self._call_forms:
            user = self._probe("user", tools)
            self._call_forms[key] = call_form(self._try, user, absent=key[0], tools=tools)
        return self._call_forms[key].written(message)

    def _with_system(
        self, messages: Sequence[Mapping[str, Any]], tools: bool
    ) -> Sequence[Mapping[str, Any]]:
        """Return the messages with system messages in the form that the template reads."""
        if not any(each.get("role") in SYSTEM_ROLES for each in messages):
            return messages
        if tools not in self._system_forms:
            readable = partial(self._readable, tools=tools, marks=_NO_MARKS)
            self._system_forms[tools] = system_form(self._try, readable, tools=tools)
        return self._system_forms[tools].written(messages)

    def _with_tools(
        self, messages: list[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[Message]:
        """Return the messages, with the tools in the system message if the template reads them
        there.
        """
        if not tools:
            return messages
        if self._tools_form is None:
            user, system = self._probe("user", tools=True), self._probe("system", tools=True)
            self._tools_form = tools_form(self._try, user, system)
        text = self.content_forms("system", tools=True).text
        return with_tools(messages, tools, self._tools_form, content="" if text else [])

    def _media_text(self, kind: str, mark: str) -> str | None:
        """Return the text that the template writes for one media item, including `mark`.

        Return None if the template takes no parts, or moves media elsewhere.
        """
        parts = [_text_part(_PROBE), {"type": kind}, _text_part(_PROBE)]
        try:
            pieces = self._render([{"role": "user", "content": parts}]).split(_PROBE)
        except RequestError:
            return None
        return pieces[1] if len(pieces) == 3 and mark in pieces[1] else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        marks: Mapping[str, str] = _NO_MARKS,
        **kwargs: Any,
    ) -> str:
        """Return the prompt's text.

        Args:
            messages: messages in OpenAI's form, as plain JSON values. Keys with None are left out.
            tools: tools in OpenAI's form; None for none.
            add_generation_prompt: whether to end with the opening of the assistant's turn.
            continue_final: whether to end with the text of the last message, which the model
                continues, without a generation prompt. White space at its end is kept.
            marks: placeholders of media by kind, for templates that take no parts.
            kwargs: further variables for the template, e.g. `enable_thinking`.

        Raises:
            RequestError: the template refuses the messages, or there is no template.
            NotContinued: the last message cannot be continued.
        """
        if not messages:
            raise RequestError("messages: at least one message is needed", param="messages")
        conversation = [
            self._readable(each, tools is not None, marks)
            for message in self._with_system(messages, tools is not None)
            for each in self._with_calls(_as_template_sees(message), tools is not None)
        ]
        conversation = self._with_tools(conversation, tools)
        if continue_final:
            return self._render_started(conversation, tools=tools, **kwargs)
        kwargs |= {"tools": tools, "add_generation_prompt": add_generation_prompt}
        return self._render(conversation, **kwargs)

    def _render_started(self, conversation: list[Message], **kwargs: Any) -> str:
        """Return the prompt's text up to the end of the last message's text.

        A template may drop the end of a text, such as reasoning that is not closed. The whole text
        is then inserted where the template starts to write the message's text.
        """
        *before, last = conversation
        started = _text_to_continue(last)
        for shown, added in ((started + _CONTINUE, ""), (_CONTINUE, started)):
            messages = [*before, _with_text(last, shown)]
            text = self._render(messages, add_generation_prompt=False, **kwargs)
            if _CONTINUE in text:
                return text[: text.rindex(_CONTINUE)] + added
        raise NotContinued(
            "messages: the model's chat template leaves out the last one, which is to be gone on "
            "with",
            param="messages",
            code="chat_template_error",
        )

    def _readable(
        self, message: dict[str, Any], tools: bool, marks: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return a message with its content in a form that the template reads."""
        content = message.get("content")
        read = self.content_forms(str(message.get("role")), tools=tools)
        if isinstance(content, str) and not read.text:
            return {**message, "content": [_text_part(content)]}
        if isinstance(content, list) and not read.parts:
            return {**message, "content": self._joined(content, marks)}
        return message

    def _joined(self, parts: Sequence[Mapping[str, Any]], marks: Mapping[str, str]) -> str:
        """Join texts and media to one string, for a template that takes
        no parts.

        Media becomes its kind's mark and a line end, or the text that the template writes for it in
        messages of another role.
        """
        kinds = {part["type"] for part in parts} - {"text"}
        written = {kind: self._media_text(kind, marks[kind]) for kind in kinds & marks.keys()}
        known = {kind: text for kind, text in written.items() if text is not None}
        between = "" if known.keys() == kinds else "\n"
        words = dict(marks) | known
        return between.join(
            part["text"] if part["type"] == "text" else words.get(part["type"], "")
            for part in parts
        )

    def _render(
        self,
        conversation: list[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """Render messages without changing them.

        Raises:
            RequestError: the template refuses the messages, or there is no template.
        """
        template = self._choose(tools)
        variables = self._special_tokens | {"documents": None} | kwargs
        variables |= {"messages": conversation, "tools": tools}
        try:
            return template.render(variables, add_generation_prompt=add_generation_prompt)
        except jinja2.TemplateError as error:
            raise _refusal(str(error)) from error
        except Exception as error:  # the template is the model's own program: it may raise anything
            raise _refusal(f"{type(error).__name__}: {error}") from error

    def _choose(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        wanted = (TOOL_USE, DEFAULT) if tools is not None else (DEFAULT,)
        for name in wanted:
            if name in self._compiled:
                return self._compiled[name]
        if self._compiled:
            names = ", ".join(sorted(self._compiled))
            reason = f"this model has no default chat template, only {names}"
        else:
            reason = "this model has no chat template"
        raise RequestError(f"messages: {reason}", param="messages", code="no_chat_template")


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _refusal(reason: str) -> RequestError:
    return RequestError(
        f"messages: the model's chat template refuses them: {reason}",
        param="messages",
        code="chat_template_error",
    )


def _as_template_sees(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without null values, and with its reasoning under each key that templates
    read.
    """
    seen = {key: value for key, value in message.items() if value is not None}
    for name in _REASONING_NAMES:
        if name in seen:
            return {"thinking": seen[name], **seen, "reasoning_content": seen[name]}
    return seen


def _text_to_continue(message: Mapping[str, Any]) -> str:
    """Return the text of a message, or of the last part that has one."""
    content = message.get("content")
    parts = [_text_part(content)] if isinstance(content, str) else content or ()
    for part in reversed(parts):
        if isinstance(text := part.get("text"), str):
            return text
    raise NotContinued("messages: the last message has no text to go on with", param="messages")


def _with_text(message: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the message with another text in place of `_text_to_continue`."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": text}
    at = max(i for i, part in enumerate(content) if isinstance(part.get("text"), str))
    return {
        **message,
        "content": [*content[:at], {**content[at], "text": text}, *content[at + 1 :]],
    }


class _Generation(jinja2.ext.Extension):
    """Renders `{% generation %}`, which marks the assistant's text for training, without effect."""

    tags = {"generation"}  # noqa: RUF012  (jinja's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dict:
    """The function `dict` of templates: it makes dictionaries, but exposes none of the class's
    methods.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """jinja's `namespace`, refusing names that reach into Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` must stay usable as a keyword
        names = dict(*args[1:], **kwargs)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace names must not begin with _: {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize like transformers; jinja's own filter would escape HTML characters."""
    text = json.dumps(
        value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _environment() -> TemplateSandbox:
    environment = TemplateSandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment
