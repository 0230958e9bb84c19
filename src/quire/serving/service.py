"""From what a client asked for to a stream of events, whatever protocol it spoke.

`Service.prepare` makes prompts of a `Generation`, or refuses it; `Service.begin` queues them, and
the `Run` that it gives back yields the events.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

from quire.core.errors import ContextOverflow, EngineFailure, RequestError
from quire.core.info import ModelInfo
from quire.core.kv_format import KVFormat
from quire.core.request import GrammarSpec, Request, SamplingParams, ThinkingBudget
from quire.serving.bounds import Bound, Wanted
from quire.serving.interface import EngineClient
from quire.serving.media import Pictures, Prompt, as_template_reads, images_of, text_length
from quire.serving.runs import Choice, EventSource, Observer, Run, Unobserved
from quire.serving.sandbox import GrammarSandbox
from quire.text.controls import Controls
from quire.text.dialects.base import Dialect, Tool, Vocabulary
from quire.text.stops import StopStrings
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from quire.text.volatile import drop_from_messages

log = logging.getLogger("quire.service")

_LIGHT, _FEW = 16_384, 256
"""Characters and messages up to which rendering and encoding holds up no stream."""
THINKING_VARIABLES = frozenset({"enable_thinking", "thinking"})
"""What templates call the switch for thoughts."""

RESERVED_VARIABLES = frozenset(
    {"self", "messages", "tools", "add_generation_prompt", "continue_final", "documents"}
)
"""Template variables that only the service sets."""

_EFFORT_SHARES = {"minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.9, "max": 0.9}
_KEPT_SNAPSHOTS = 64


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
        """Raises `RequestError` if no tool of these names can be what it asks for."""
        if self.mode == "named" and self.name not in names:
            what = f"names '{self.name}', which is not among 'tools'"
        elif self.mode == "required" and not names:
            what = "asks for a call, but there are no 'tools'"
        else:
            return
        raise RequestError(f"'tool_choice' {what}.", param="tool_choice", code="invalid_value")


@dataclass(frozen=True, slots=True)
class Thinking:
    """How an answer is thought about first.

    Attributes:
        enabled: None leaves it to the template.
        budget: thought tokens at most; None takes a share of `max_tokens` that `effort` stands for.
        effort: OpenAI's word, also handed to the template.
    """

    enabled: bool | None = None
    budget: int | None = None
    effort: str | None = None


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What a protocol calls the fields that the service may have to refuse."""

    messages: str = "messages"
    stops: str = "stop"
    schema: str = "response_format"
    parameters: str = "function.parameters"


@dataclass(frozen=True, slots=True)
class Generation:
    """What to generate, free of any protocol. Either `messages` or `prompts` is given.

    Attributes:
        messages: in the shape that chat templates read; content is a string, or parts: texts, and
            images as `{"type": "image", "source": ImageSource}`.
        prompts: texts, encoded with special tokens added, or token ids as they are. Their answers
            are text as the model writes it: no thoughts, no calls.
        tools: in the shape that chat templates read.
        strict_tools: names of those whose calls have to meet their schemas though nothing forces
            them.
        sampling: `seed` is the first choice's; the others' are derived from it.
        n: choices a prompt.
        max_tokens: None is the operator's default, or all that the context has room for.
        schema: JSON text of the schema that the answer must meet.
        template_kwargs: further variables of the chat template.
        continue_final: go on with the last message instead of beginning one.
        cache_salt: prompts share what is cached only with those of the same.
        caller: for whom it is counted.
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
    stops: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    schema: str | None = None
    kv_format: KVFormat | None = None
    thinking: Thinking = field(default_factory=Thinking)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    cache_salt: str = ""
    caller: str = ""
    names: FieldNames = field(default_factory=FieldNames)

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """The tools that the model may call, as dialects see them."""
        if self.tool_choice.mode == "none":
            return ()
        functions = [tool["function"] for tool in self.tools]
        return tuple(Tool(each["name"], each.get("parameters") or {}) for each in functions)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A generation whose prompts are encoded: what is left of it crosses processes in little time.

    Attributes:
        spec: without what has become prompts.
        bare: the prompts were no messages.
    """

    spec: Generation
    prompts: tuple[Prompt, ...]
    bare: bool


class Elsewhere(Exception):
    """What is asked for may take longer than the event loop can wait."""


class EventSources(Protocol):
    """Makes what turns one request's outputs into events.

    `goes_on` says that the answer's text goes on from the prompt's, rather than begin one.
    """

    def __call__(
        self,
        dialect: Dialect,
        prompt_ids: Sequence[int],
        tools: Sequence[Tool],
        stops: StopStrings,
        *,
        goes_on: bool,
    ) -> EventSource: ...


class Service:
    """One served model: its tokenizer, template and dialect here, its engine behind `client`.

    Args:
        vocabulary: the tokenizer's, as dialects see it.
        pictures: reads images, if the model takes any.
        controls: keeps what clients write from becoming control tokens.
        sandbox: makes grammars.
        plain: the dialect of answers to bare prompts.
        default_max_tokens: for requests that name no limit; None is what the context has room for.
        deadline_s: seconds after which a request ends with an error; None is never.
        drop_volatile: cut the parts of agents' prompts that change with each request.
        sampling: what holds for what a request does not name; by default OpenAI's.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        vocabulary: Vocabulary,
        dialect: Dialect,
        plain: Dialect,
        sources: EventSources,
        pictures: Pictures,
        controls: Controls,
        sandbox: GrammarSandbox,
        *,
        name: str,
        default_max_tokens: int | None = None,
        deadline_s: float | None = None,
        drop_volatile: bool = True,
        sampling: SamplingParams | None = None,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.template = template
        self.name = name
        self.sampling = sampling or SamplingParams()
        self._vocabulary = vocabulary
        self._dialect = dialect
        self._plain = plain
        self._sources = sources
        self.pictures = pictures
        self._controls = controls
        self._sandbox = sandbox
        self._observer: Callable[[str], Observer] = lambda caller: Unobserved()
        self._default_max_tokens = default_max_tokens
        self._deadline_s = deadline_s
        self._drop_volatile = drop_volatile

    @property
    def info(self) -> ModelInfo:
        """What is served."""
        return self.client.info

    @property
    def can_think(self) -> bool:
        """Whether the model's template or dialect knows thoughts at all."""
        known = THINKING_VARIABLES | {"reasoning_effort"}
        return self._dialect.thought is not None or bool(known & self.template.variables)

    @property
    def can_limit_thoughts(self) -> bool:
        """Whether the end of a thought can be forced."""
        return self._dialect.thought is not None

    async def close(self) -> None:
        """Ends the engine and what else runs for this service. May be called again."""
        await self._sandbox.close()
        await self.client.close()

    def observe(self, observer: Callable[[str], Observer]) -> None:
        """Tells the observer of a generation's caller of everything that starts from now on."""
        self._observer = observer

    async def prepare(self, spec: Generation, *, light: bool = False) -> Prepared:
        """Renders, fetches, decodes and encodes: what costs time by the size of a request.

        Args:
            light: refuse what might take more than a few milliseconds, with `Elsewhere`.

        Raises:
            RequestError: it cannot be served.
            Elsewhere: it is to be done in a job.
        """
        prompts = self._prompts(await self.load_images(spec, light=light))
        for prompt in prompts:
            self._check_prompt(prompt.tokens, spec.names.messages if spec.messages else "prompt")
        return Prepared(_without_prompt(spec), tuple(prompts), bare=not spec.messages)

    async def begin(self, prepared: Prepared) -> Run:
        """Queues what has been prepared, here or in a job.

        Raises:
            RequestError: it cannot be served; nothing has been queued.
            EngineFailure: the engine cannot go on.
        """
        if self.client.failure is not None:
            raise EngineFailure(f"The engine cannot go on: {self.client.failure}")
        spec, prompts = prepared.spec, self.pictures.whole(prepared.prompts)
        bound = await self._bound(spec)
        stops, tools = StopStrings(spec.stops, spec.names.stops), spec.offered_tools
        dialect = self._plain if prepared.bare else self._dialect
        goes_on = spec.continue_final or prepared.bare
        requests: list[Request] = []
        sources: list[EventSource] = []
        for prompt in prompts:
            first = self._request(prepared, prompt, bound.grammar)
            for _ in range(spec.n):
                requests.append(_choice_of(first, len(requests)))
                sources.append(self._sources(dialect, prompt.tokens, tools, stops, goes_on=goes_on))
                await asyncio.sleep(0)  # each looks at the prompt, which may be long
        self.pictures.check_room(prompts)
        observer = self._observer(spec.caller)
        choices = [
            Choice(ticket, source, observer, one_call=not spec.parallel_tool_calls)
            for ticket, source in zip(self.client.submit(requests), sources, strict=True)
        ]
        run = Run([prompt.tokens for prompt in prompts], choices, bound.unenforced)
        self.pictures.hold(run, prompts)
        return run

    @property
    def modalities(self) -> tuple[str, ...]:
        """What messages may hold."""
        return ("text", "image") if self.pictures.offered else ("text",)

    async def load_images(self, spec: Generation, *, light: bool = False) -> Generation:
        """The generation with its images fetched and read, for those that use it more than once.

        Args:
            light: as in `prepare`.

        Raises:
            RequestError: the model takes text only, there are too many, or one cannot be used.
            Elsewhere: it is to be done in a job.
        """
        if light:
            self._check_light(spec)
        messages = await self.pictures.load(spec.messages)
        return spec if messages is spec.messages else replace(spec, messages=messages)

    async def tokens(self, spec: Generation, *, light: bool = False) -> list[tuple[int, ...]]:
        """The token ids of each prompt, of any length; `light` as in `prepare`.

        Raises:
            RequestError: there is neither a message nor a prompt, no tool is what must be called,
                an image cannot be used, or the template refuses the messages.
            Elsewhere: it is to be done in a job.
        """
        loaded = await self.load_images(spec, light=light)
        return [prompt.tokens for prompt in self._prompts(loaded)]

    def _prompts(self, spec: Generation) -> list[Prompt]:
        spec.tool_choice.check([tool.name for tool in spec.offered_tools])
        if not spec.messages and not spec.prompts:
            raise RequestError(
                "The request holds nothing that could be answered.", code="invalid_value"
            )
        return self._encoded(spec)

    def _check_light(self, spec: Generation) -> None:
        """Raises `Elsewhere` for what is large, or holds images."""
        size = sum(text_length(message) for message in spec.messages)
        size += sum(map(len, spec.prompts))
        if size > _LIGHT or len(spec.messages) > _FEW or self.pictures.wanted(spec.messages):
            raise Elsewhere

    def _encoded(self, spec: Generation) -> list[Prompt]:
        if spec.messages:
            return [self._conversation(spec)]
        return [
            Prompt(
                tuple(self.tokenizer.encode(prompt, add_special_tokens=True))
                if isinstance(prompt, str)
                else prompt
            )
            for prompt in spec.prompts
        ]

    def _conversation(self, spec: Generation) -> Prompt:
        """The prompt of messages whose images have been read."""
        images = images_of(spec.messages)
        ids = self._controls.encode(self.render(spec))
        return self.pictures.place(ids, images) if images else Prompt(tuple(ids))

    def render(self, spec: Generation) -> str:
        """What the template makes of the messages; text from outside is covered, see `Controls`."""
        controls = self._controls
        messages: Sequence[Mapping[str, Any]] = spec.messages
        if self._drop_volatile:
            messages = drop_from_messages(messages)
        tools = spec.tools if spec.tool_choice.mode != "none" else ()
        return self.template.render(
            [controls.cover_message(as_template_reads(message)) for message in messages],
            tools=controls.cover(tools) or None,
            add_generation_prompt=not spec.continue_final,
            continue_final=spec.continue_final,
            **controls.cover(self._variables(spec)),
        )

    def _variables(self, spec: Generation) -> dict[str, Any]:
        """The template's variables beside messages and tools."""
        thinking, variables = spec.thinking, dict(spec.template_kwargs)
        if thinking.enabled is not None:
            for name in THINKING_VARIABLES & self.template.variables:
                variables.setdefault(name, thinking.enabled)
        if thinking.effort is not None and "reasoning_effort" in self.template.variables:
            variables.setdefault("reasoning_effort", thinking.effort)
        return variables

    def _check_prompt(self, prompt: tuple[int, ...], param: str) -> None:
        limit = self.info.context_length
        if not prompt:
            raise RequestError(f"'{param}' holds no token.", param=param, code="invalid_value")
        if len(prompt) >= limit:
            raise ContextOverflow(len(prompt), limit, param=param)
        self.check_vocabulary(prompt, param)

    def check_vocabulary(self, ids: Sequence[int], param: str) -> None:
        """Raises `RequestError` if a token id is none of this model's."""
        vocabulary, worst = self.info.vocab_size, max(ids, default=0)
        if worst >= vocabulary:
            raise RequestError(
                f"Token {worst} in '{param}' is not below the vocabulary's size, {vocabulary}.",
                param=param,
                code="invalid_value",
            )

    def _request(self, prepared: Prepared, prompt: Prompt, grammar: GrammarSpec | None) -> Request:
        """The request of a prompt's first choice."""
        spec, tokens = prepared.spec, prompt.tokens
        room = self.info.context_length - len(tokens)
        asked = spec.max_tokens if spec.max_tokens is not None else self._default_max_tokens
        max_tokens = room if asked is None else min(asked, room)
        eos = self.tokenizer.eos_ids
        marks = [i + 1 for i, token in enumerate(tokens) if token in eos]
        thinks = not prepared.bare and self._thinks_at_once(tokens)
        return Request(
            id="",
            prompt=tokens,
            images=prompt.images,
            sampling=spec.sampling,
            max_tokens=max_tokens,
            stop_token_ids=spec.stop_token_ids if spec.ignore_eos else spec.stop_token_ids | eos,
            kv_format=spec.kv_format,
            grammar=None if grammar is None else self._after_thought(spec, grammar, thinks),
            thinking=None
            if prepared.bare
            else self._budget(spec, max_tokens, thinks, bound=grammar is not None),
            cache_salt=spec.cache_salt,
            snapshots=tuple(marks[-_KEPT_SNAPSHOTS:]),
            deadline_s=self._deadline_s,
        )

    def _thinks_at_once(self, prompt: Sequence[int]) -> bool:
        """Whether the prompt leaves a thought open."""
        return self._dialect.parser(prompt, (), self._vocabulary).thinking

    def _may_think(self, spec: Generation) -> bool:
        """Whether a thought is asked for, or what the template has the model do by itself."""
        if spec.thinking.enabled is not None:
            return spec.thinking.enabled
        for name in THINKING_VARIABLES & spec.template_kwargs.keys():
            return bool(spec.template_kwargs[name])
        return self._thinks_by_default

    @cached_property
    def _thinks_by_default(self) -> bool:
        """Whether asking for thoughts changes nothing in a prompt: then they were never off."""
        probe = Generation(messages=({"role": "user", "content": "?"},))
        asked = replace(probe, thinking=Thinking(enabled=True))
        return self.render(probe) == self.render(asked)

    async def _bound(self, spec: Generation) -> Bound:
        """What the answer is bound to; compiled once, so that a bad schema is a 400."""
        if spec.schema is None and not spec.tool_choice.forced and not spec.strict_tools:
            return Bound(None)
        wanted = Wanted(
            schema=spec.schema,
            tools=spec.offered_tools,
            strict=spec.strict_tools,
            forced=spec.tool_choice.forced,
            name=spec.tool_choice.name,
            parallel=spec.parallel_tool_calls,
            schema_field=spec.names.schema,
            parameters_field=spec.names.parameters,
        )
        bound = await self._sandbox.bind(wanted)
        if bound.unenforced:
            log.info("left to the model: %s", "; ".join(bound.unenforced))
        return bound

    def _after_thought(
        self, spec: Generation, grammar: GrammarSpec, thinks_at_once: bool
    ) -> GrammarSpec:
        """The grammar, free until a thought that is open, or that the model opens, has ended."""
        marks = self._dialect.thinking(self._vocabulary)
        if grammar.lazy or self._dialect.frame is not None:
            return grammar
        if marks is None or not (thinks_at_once or self._may_think(spec)):
            return grammar
        opening, closing = marks
        return replace(grammar, start_after=closing, opened_by=() if thinks_at_once else opening)

    def _budget(
        self, spec: Generation, max_tokens: int, thinks_at_once: bool, *, bound: bool
    ) -> ThinkingBudget | None:
        """The limit on a thought, so that tokens are left for the answer.

        A model that opens its thought whatever the template is told is given none to spend.
        """
        marks, thinking = self._dialect.thinking(self._vocabulary), spec.thinking
        budget = thinking.budget
        if budget is None and thinking.effort is not None:
            budget = int(max_tokens * _EFFORT_SHARES[thinking.effort])
        if budget is None and thinking.enabled is False and thinks_at_once:
            budget = 0
        if budget is None:
            return None
        if marks is None:
            if thinking.budget is None:
                return None
            raise RequestError(
                "A thinking budget is not offered: this model marks no thoughts.",
                param="thinking_budget",
                code="unsupported_parameter",
            )
        opening, closing = marks
        if bound and self._dialect.frame is not None:
            closing = self._vocabulary.ids_of(self._dialect.frame.thought_end)
        return ThinkingBudget(budget, () if thinks_at_once else opening, closing)


def _without_prompt(spec: Generation) -> Generation:
    """The generation without what only its prompts are made of."""
    tools = tuple({"function": _undescribed(tool["function"])} for tool in spec.tools)
    return replace(spec, messages=(), prompts=(), tools=tools)


def _undescribed(function: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in function.items() if name != "description"}


def _choice_of(request: Request, index: int) -> Request:
    """The same request for choice `index`."""
    seed = derived_seed(request.sampling.seed, index)
    sampling = replace(request.sampling, seed=seed)
    return replace(request, id=f"{uuid.uuid4().hex}-{index}", sampling=sampling)


def derived_seed(seed: int, index: int) -> int:
    """The seed of a generation's choice `index`; the first one's is the seed itself."""
    return (seed + index * 0x9E3779B97F4A7C15) % 2**63
