"""Protocol-independent description of a generation request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from quire.core.errors import RequestError
from quire.core.kv_format import KVFormat
from quire.core.request import SamplingParams, TokenRules
from quire.core.speculation import Speculation
from quire.serving.answer_grammar import AnswerFormat
from quire.serving.placing import Prompt
from quire.text.dialects.base import Tool


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer may, must not or must call a tool; `name` when it must be that one."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""

    @property
    def forced(self) -> bool:
        """Whether the answer is nothing but calls."""
        return self.mode in ("required", "named")

    def check(self, names: Collection[str]) -> None:
        """Raise `RequestError` if the choice names none of these tools."""
        if self.mode == "named" and self.name not in names:
            what = f"names '{self.name}', which is not among 'tools'"
        elif self.mode == "required" and not names:
            what = "asks for a call, but there are no 'tools'"
        else:
            return
        raise RequestError(f"'tool_choice' {what}.", param="tool_choice", code="invalid_value")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether and how long the model reasons before it answers.

    Attributes:
        enabled: None leaves it to the template.
        budget: reasoning tokens at most; None takes the share of `max_tokens` that `effort` names.
        effort: OpenAI's word, also handed to the template.
    """

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class FieldNames:
    """A protocol's names of the fields that the service may have to refuse."""

    messages: str = "messages"
    stops: str = "stop"
    parameters: str = "function.parameters"


@dataclass(frozen=True, slots=True)
class Generation:
    """A protocol-independent generation request. It has either `messages` or `prompts`.

    Attributes:
        messages: in the shape that chat templates read; content is a string, or parts: texts, and
            media as `{"type": "image", "source": MediaSource}`.
        prompts: texts, encoded with special tokens added, or token ids as they are. Their answers
            are text as the model writes it: no reasoning, no calls.
        tools: in the shape that chat templates read.
        strict_tools: names of those whose calls have to meet their schemas though nothing forces
            them.
        sampling: `seed` is the first choice's; the others' are derived from it.
        n: choices a prompt.
        keep_alive_s: how long the model stays loaded afterwards; None leaves that as it is.
        max_tokens: None is the operator's default, or all that the context has room for. 0 reads
            the prompts, so that later ones find them in the cache, and answers nothing.
        min_tokens: before which no end token comes.
        stop_on_loop: repeats of a cycle that end the answer; 0 is never, None the server's.
        rules: tokens that the client allows or bans.
        include_stop: whether the stop string or the client's own stop token is part of the answer.
        skip_special: whether tokens that are marked special are left out of the answer's text.
        truncate: how many tokens of each prompt are kept; None keeps all, -1 those that fit.
        truncate_left: whether the last ones are kept, not the first.
        token_ids: whether the client gets the answer's token ids.
        format: what the answer must meet.
        show_reasoning: whether the reasoning is part of the answer that the client gets.
        show_progress: whether events tell how far the reading of the prompt has come.
        template_kwargs: further variables of the chat template.
        continue_final: go on with the last message instead of start one.
        or_anew: of a `continue_final` that nobody asked for by name: a last message that cannot be
            gone on with is answered.
        cache_salt: prompts share what is cached only with those of the same.
        adapter: the LoRA adapter that answers; empty is none.
        caller: for whom it is counted.
        session: the conversation or agent that it belongs to; of several replicas one answers it.
        share: of the caller's API key, of places and rows.
        priority: None is 0; see `core.request.Request`.
        speculation: what may guess tokens of the answer; None is the server's default.
        prediction: the text that the client expects as the answer.
        names: for errors.
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    strict_tools: frozenset[str] = frozenset()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    stop_on_loop: int | None = None
    rules: TokenRules = field(default_factory=TokenRules)
    include_stop: bool = False
    skip_special: bool = True
    truncate: int | None = None
    truncate_left: bool = True
    token_ids: bool = False
    speculation: Speculation | None = None
    prediction: str = ""
    format: AnswerFormat | None = None
    kv_format: KVFormat | None = None
    thinking: Thinking = field(default_factory=Thinking)
    show_reasoning: bool = True
    show_progress: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    or_anew: bool = False
    cache_salt: str = ""
    keep_alive_s: float | None = None
    adapter: str = ""
    caller: str = ""
    session: str = ""
    share: float = 1.0
    priority: int | None = None
    names: FieldNames = field(default_factory=FieldNames)

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call, as dialects see them."""
        if self.tool_choice.mode == "none":
            return ()
        functions = [tool["function"] for tool in self.tools]
        return tuple(Tool(each["name"], each.get("parameters") or {}) for each in functions)

    @property
    def anew(self) -> Generation:
        """The same generation, with an answer that starts after the last message."""
        return replace(self, continue_final=False, or_anew=False)

    @property
    def without_prompt(self) -> Generation:
        """The generation without what only its prompts are made of."""
        offered = () if self.tool_choice.mode == "none" else self.tools
        tools = tuple({"function": _undescribed(tool["function"])} for tool in offered)
        return replace(self, messages=(), prompts=(), tools=tools)


def _undescribed(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in function.items() if name != "description"}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation with encoded prompts, small enough to cross processes quickly.

    Attributes:
        spec: without what has become prompts.
        bare: the prompts were no messages.
        started: the text of the answer that the last message starts, without its reasoning.
        anew: the prompts of `spec.anew`, which is served instead if the format leaves no way to go
            on from `started`; empty if it is not to be.
    """

    spec: Generation
    prompts: tuple[Prompt, ...]
    bare: bool
    started: str = ""
    anew: tuple[Prompt, ...] = ()


class NeedsJob(Exception):
    """Reading the request may block the event loop for too long, so it needs a job."""
