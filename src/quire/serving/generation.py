"""Protocol-independent description of a generation request."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from quire.core.copies import changed
from quire.core.errors import RequestError
from quire.core.kv_format import KVFormat
from quire.core.request import SamplingParams, TokenRules
from quire.core.speculation import Speculation
from quire.serving.answer_grammar import AnswerFormat
from quire.serving.messages import Function, TemplateMessage, TemplateTool
from quire.serving.placing import Prompt
from quire.text.dialects.base import Tool


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether the answer may, must not or must call a tool; `name` is the tool that it must
    call.
    """

    mode: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""

    @property
    def forced(self) -> bool:
        """Whether the answer must consist of calls only."""
        return self.mode in ("required", "named")

    def check(self, names: Collection[str]) -> None:
        """Raise `RequestError` if the choice names a tool that is not offered."""
        if self.mode == "named" and self.name not in names:
            what = f"names '{self.name}', which is not among 'tools'"
        elif self.mode == "required" and not names:
            what = "requires a tool call, but there are no 'tools'"
        else:
            return
        raise RequestError(f"'tool_choice' {what}.", param="tool_choice", code="invalid_value")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Whether and how long the model reasons before it answers.

    Attributes:
        enabled: whether to reason; None leaves it to the template.
        budget: the most reasoning tokens; None takes the share of `max_tokens` that `effort` stands
            for.
        effort: OpenAI's `reasoning_effort`, also passed to the template.
    """

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class FieldNames:
    """A protocol's names of fields that the service may refuse."""

    messages: str = "messages"
    prompt: str = "prompt"
    stops: str = "stop"
    parameters: str = "function.parameters"


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that an encoder reads as one, such as a query and a document."""

    first: str
    second: str

    def __len__(self) -> int:
        """Return the number of characters."""
        return len(self.first) + len(self.second)


@dataclass(frozen=True)  # without slots: see `core.copies`
class Generation:
    """A protocol-independent generation request. It has either `messages` or `prompts`.

    Attributes:
        messages: the conversation. Its files are read before it is rendered.
        prompts: texts, encoded with special tokens added, or token ids as they are. Their answers
            are text as the model writes it: no reasoning, no calls. Encoders also read pairs.
        vector: whether the result is a vector or a score, not text.
        max_prompt: the most tokens of a prompt, as the model's files have it for embeddings; None
            leaves that to the context.
        tools: tools that are shown to the model.
        strict_tools: names of the tools whose calls, if the model makes any, must meet their
            schemas.
        sampling: `seed` is the first choice's; the others' are derived from it.
        n: choices for each prompt.
        keep_alive_s: how long the model stays loaded afterwards; None leaves that as it is.
        max_tokens: the most tokens of an answer; None means the operator's default, or all that the
            context has room for. 0 only reads the prompts into the prefix cache.
        min_tokens: tokens that must come before an end token.
        stop_on_loop: repeats of a cycle that end the answer; 0 means never, None the server's
            default.
        rules: tokens that the client allows or bans.
        include_stop: whether the stop string or the client's own stop token is part of the answer.
        skip_special: whether tokens that are marked special are left out of the answer's text.
        truncate: how many tokens of each prompt are kept; None keeps all, -1 those that fit.
        truncate_left: whether the last ones are kept, not the first; None means that, but the first
            ones where the model is an encoder.
        token_ids: whether the client gets the answer's token ids.
        format: the format that the answer must have.
        show_reasoning: whether the reasoning is part of the answer that the client gets.
        show_progress: whether events report the progress of reading the prompt.
        template_kwargs: further variables of the chat template.
        continue_final: whether to continue the last message instead of starting a new one.
        or_anew: whether to answer a last message that cannot be continued, because the client did
            not ask for `continue_final` by name.
        cache_salt: prompts share cached prefixes only with prompts of the same salt.
        adapter: the LoRA adapter that answers; empty for none.
        caller: the API key that it is counted for.
        session: the conversation or agent that it belongs to; requests of one session prefer one
            replica.
        share: weight of the caller's API key when places and rows are divided.
        priority: see `core.request.Request`; None means 0.
        speculation: which drafters may draft tokens; None means the server's default.
        prediction: the text that the client expects as the answer.
        hold: number of tokens that may wait for each other; see `core.request.Request`.
        names: the protocol's field names, for errors.
    """

    messages: tuple[TemplateMessage, ...] = ()
    prompts: tuple[str | TextPair | tuple[int, ...], ...] = ()
    vector: bool = False
    max_prompt: int | None = None
    tools: tuple[TemplateTool, ...] = ()
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
    truncate_left: bool | None = None
    token_ids: bool = False
    speculation: Speculation | None = None
    prediction: str = ""
    hold: int = 0
    format: AnswerFormat | None = None
    kv_format: KVFormat | None = None
    thinking: Thinking = field(default_factory=Thinking)
    show_reasoning: bool = True
    show_progress: bool = False
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
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
        if self.tool_choice.mode == "none" or not self.tools:
            return ()
        functions = [tool["function"] for tool in self.tools]
        return tuple(Tool(each["name"], each.get("parameters") or {}) for each in functions)

    @property
    def anew(self) -> Generation:
        """A copy that starts a new answer instead of continuing the last message."""
        return changed(self, continue_final=False, or_anew=False)

    @property
    def without_prompt(self) -> Generation:
        """The generation without the fields that only its prompts are made of."""
        offered = () if self.tool_choice.mode == "none" else self.tools
        tools = tuple(_undescribed(tool) for tool in offered)
        return changed(self, messages=(), prompts=(), tools=tools)


def _undescribed(tool: TemplateTool) -> TemplateTool:
    function = tool["function"]
    kept: Function = {"name": function["name"]}
    if "parameters" in function:
        kept["parameters"] = function["parameters"]
    return {"type": "function", "function": kept}


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation with encoded prompts, small enough to cross processes quickly.

    Attributes:
        spec: the generation without the fields that became prompts.
        bare: whether the prompts were texts or tokens, not messages.
        started: the text of the answer that the last message starts, without its reasoning.
        anew: the prompts of `spec.anew`, which is served instead if the format cannot continue
            `started`; empty if that is not allowed.
    """

    spec: Generation
    prompts: tuple[Prompt, ...]
    bare: bool
    started: str = ""
    anew: tuple[Prompt, ...] = ()


class NeedsJob(Exception):
    """Raised if reading the request may block the event loop for too long, so that it needs
    a job.
    """
