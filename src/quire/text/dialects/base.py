"""The interface of dialects: how a family of models writes reasoning and tool calls.

A dialect gives three things: a parser from tokens to deltas, the tokens that open and close a
reasoning, and a grammar that forces tool calls. Each lives in a module of its own and has one line
in the registry of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quire.core.errors import RequestError
from quire.core.request import FinishReason
from quire.text.dialects.schema_types import with_meant_types
from quire.text.events import Delta
from quire.text.tokenizer import Tokenizer

THINK = ("<think>", "</think>")
"""The markers of reasoning that most families have."""

Schema = Mapping[str, Any]
"""A JSON schema, as a client sent it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Schema = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The part of a tokenizer that dialects need.

    Attributes:
        added: text and id of every added token, special or not. A dialect's marker that is in here
            is recognised by its id alone; text that merely spells it stays text.
        encode: ids of a text in which added tokens stand for themselves, without bos or eos.
        decode: text of ids, added tokens included.
        names: `added` the other way round.
    """

    added: Mapping[str, int]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    names: Mapping[int, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = {token_id: text for text, token_id in self.added.items()}
        object.__setattr__(self, "names", names)

    def ids_of(self, text: str) -> tuple[int, ...]:
        """Return the ids of one or several markers: a single id if they are one added token."""
        token_id = self.added.get(text)
        return tuple(self.encode(text)) if token_id is None else (token_id,)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return a tokenizer as dialects see it."""
    return Vocabulary(
        tokenizer.added_tokens,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.decode,
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A complete tool call. `arguments` is the text of one JSON object.

    Attributes:
        id: the id that the model itself gave the call, in grammars that have one.
    """

    name: str
    arguments: str
    id: str | None = None


class Parser(Protocol):
    """Turns one answer's tokens into deltas. Made for one request, used once.

    A call starts when its name is known to be a tool's, and its arguments follow as they are
    written, as far as they can no longer change. `ToolCallEnded` says that it is complete: one that
    is cut off never ends. What turns out to be no call comes as text, whole, unless something of it
    was sent: then `ToolCallBroken` ends the answer.
    """

    @property
    def thinking(self) -> bool | None:
        """Whether the next ordinary token is part of reasoning; None within a header that has yet
        to say what follows it."""
        ...

    @property
    def owned(self) -> frozenset[int]:
        """Ids of the tokens that are structure: never detokenised, see `feed`."""
        ...

    def feed(self, token_id: int, piece: str) -> list[Delta]:
        """Takes one token.

        Args:
            token_id: the token, or -1 for text that comes without one.
            piece: the text that the token completed. For an owned token, text from before it
                that the detokeniser still held.
        """
        ...

    def finish(self, reason: FinishReason) -> list[Delta]:
        """Takes the end. What is held comes out: a complete call as a call, anything else as text,
        except that of a call cut off by anything but an end token only the start comes."""
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """The state in which an answer starts. A request's parser is made from it."""

    prompt_ids: Sequence[int]
    tools: Mapping[str, Tool]
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class Forced:
    """The calls that a grammar forces: one of `tools`, or several if `parallel`.

    Attributes:
        tools: with schemas whose types are JSON Schema's.
        on_unenforced: called with `tool: path: keyword` for what the grammar leaves open.
    """

    tools: Sequence[Tool]
    parallel: bool
    vocabulary: Vocabulary
    on_unenforced: Callable[[str], None] = lambda keyword: None

    def __post_init__(self) -> None:
        meant = [replace(each, parameters=with_meant_types(each.parameters)) for each in self.tools]
        object.__setattr__(self, "tools", meant)


@dataclass(frozen=True, slots=True)
class Frame:
    """Message headers of dialects that write reasoning and answers as separate messages.

    Their grammars hold the headers, and the reasoning before them too.

    Attributes:
        before: the lark term that goes before a bound answer.
        reasoning_end: what ends reasoning under a grammar, which then says what may follow.
    """

    before: Callable[[Vocabulary], str]
    reasoning_end: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """One grammar of reasoning and tool calls.

    Attributes:
        name: what `--dialect` calls it.
        recognises: whether a chat template and a `model_type` speak it.
        build: makes the parser of one request.
        reasoning: texts that open and close reasoning; None if the family has none.
        forced: lark source for llguidance that lets only tool calls through; None if forcing a
            call is not offered.
        openers: markers that start a call; the first that is a token of its own binds strict calls.
        strict: lark source that binds strict calls: of one stretch that starts with an opener, or
            of the whole answer where there are no openers. None: `forced`, from each opener on.
        frame: None where an answer has no header.
    """

    name: str
    recognises: Callable[[str, str], bool]
    build: Callable[[Start], Parser]
    reasoning: tuple[str, str] | None = None
    forced: Callable[[Forced], str] | None = None
    openers: tuple[str, ...] = ()
    strict: Callable[[Forced], str] | None = None
    frame: Frame | None = None

    def parser(
        self, prompt_ids: Sequence[int], tools: Sequence[Tool], vocabulary: Vocabulary
    ) -> Parser:
        """Return a parser in the state that the prompt leaves.

        Args:
            prompt_ids: the prompt. Only what follows its last turn marker is looked at, so a
                marker that a user wrote does not open reasoning.
            tools: what may be called. Without tools, call markers are plain text.
        """
        return self.build(Start(prompt_ids, {tool.name: tool for tool in tools}, vocabulary))

    def thinking(self, vocabulary: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Ids that open and that close reasoning, for thinking budgets; None if it has none."""
        if self.reasoning is None:
            return None
        opening, closing = self.reasoning
        return vocabulary.ids_of(opening), vocabulary.ids_of(closing)

    def opener(self, vocabulary: Vocabulary) -> int | None:
        """Return the token that starts a call; None if calls start with ordinary text."""
        found = (vocabulary.added.get(marker) for marker in self.openers)
        return next((token for token in found if token is not None), None)

    def strict_grammar(
        self,
        tools: Sequence[Tool],
        vocabulary: Vocabulary,
        on_unenforced: Callable[[str], None] = lambda keyword: None,
    ) -> str | None:
        """Return a Lark source that binds unforced calls to the schemas of their tools.

        It binds what starts with `opener`, or if `openers` is empty the whole answer. None if
        nothing tells where a call starts.

        Args:
            on_unenforced: see `Forced`.
        """
        if self.openers and self.opener(vocabulary) is None:
            return None
        make = self.strict or (self.forced if self.openers else None)
        return (
            None
            if make is None
            else make(
                Forced(tools, parallel=True, vocabulary=vocabulary, on_unenforced=on_unenforced)
            )
        )

    def tool_grammar(
        self,
        tools: Sequence[Tool],
        name: str | None,
        parallel: bool,
        vocabulary: Vocabulary,
        on_unenforced: Callable[[str], None] = lambda keyword: None,
    ) -> str:
        """Lark source for llguidance under which the answer is nothing but tool calls.

        Args:
            name: the one tool to call; None lets the model choose.
            parallel: whether several calls may follow each other.
            on_unenforced: see `Forced`.

        Raises:
            RequestError: no such tool, or the dialect cannot force calls.
        """
        if self.forced is None:
            raise RequestError(
                f"tool_choice: dialect {self.name!r} cannot force a call; use 'auto' or 'none'",
                param="tool_choice",
                code="unsupported_value",
            )
        chosen = [tool for tool in tools if name is None or tool.name == name]
        if not chosen:
            wanted = "any tool" if name is None else repr(name)
            raise RequestError(
                f"tool_choice asks for {wanted}, which is not among the tools",
                param="tool_choice",
                code="invalid_value",
            )
        return self.forced(Forced(chosen, parallel, vocabulary, on_unenforced=on_unenforced))
