"""The interface of dialects: how a family of models writes reasoning and tool calls.

A dialect has a parser from tokens to deltas, the markers that open and close reasoning, and a
grammar that forces tool calls. Each dialect is one module and one line in this package's registry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from quire.core.errors import RequestError
from quire.core.request import FinishReason
from quire.text.dialects.schema_types import with_meant_types
from quire.text.events import Delta, Reasoning, Text
from quire.text.tokenizer import Tokenizer

THINK = ("<think>", "</think>")
"""The markers of reasoning that most families use."""

Schema = Mapping[str, Any]
"""A JSON schema, as a client sent it."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Schema = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Vocabulary:
    """The part of a tokenizer that dialects need.

    Attributes:
        added: ids of all added tokens by text. A marker among them is recognised by its id alone;
            text that merely spells it stays text.
        encode: encodes a text, matching added tokens, without bos or eos.
        decode: decodes ids, including added tokens.
        names: texts of all added tokens by id.
    """

    added: Mapping[str, int]
    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    names: Mapping[int, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        names = {token_id: text for text, token_id in self.added.items()}
        object.__setattr__(self, "names", names)

    def ids_of(self, text: str) -> tuple[int, ...]:
        """Return the ids of a text of markers: a single id if the text is one added token."""
        token_id = self.added.get(text)
        return tuple(self.encode(text)) if token_id is None else (token_id,)


def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """Return the part of a tokenizer that dialects need."""
    return Vocabulary(
        tokenizer.added_tokens,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        tokenizer.decode,
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A complete tool call. `arguments` is the text of one JSON object.

    Attributes:
        id: the id that the model wrote, in dialects whose calls have ids.
    """

    name: str
    arguments: str
    id: str | None = None


class Parser(Protocol):
    """Turns one answer's tokens into deltas. Made for one request, used once.

    A call starts once its name is known to be a tool's. Its arguments follow as they are written,
    as far as they cannot change any more. `ToolCallEnded` marks a complete call; a truncated call
    has none. Text that turns out not to be a call is emitted as text, unless a part of it was sent
    as a call: then `ToolCallBroken` ends the answer.
    """

    @property
    def thinking(self) -> bool | None:
        """Whether the next ordinary token belongs to reasoning; None within a message header that
        has not yet said what follows.
        """
        ...

    @property
    def owned(self) -> frozenset[int]:
        """Ids of structural tokens, which are never detokenized; see `feed`."""
        ...

    def feed(self, token_id: int, piece: str) -> list[Delta]:
        """Process one token. Return the deltas that it completes.

        Args:
            token_id: the token, or -1 for text without a token.
            piece: the text that the token completes. For an owned token, earlier text that the
                detokenizer still held.
        """
        ...

    def flowing(self, text: str) -> Text | Reasoning | None:
        """Return the only delta of tokens with this text, none of which is owned, if they leave the
        parser as it is; else None, and `feed` must process them.
        """
        ...

    def finish(self, reason: FinishReason) -> list[Delta]:
        """Process the end of the answer. Return the remaining deltas.

        Held text becomes a call if it is complete, else text. Of a call that was truncated by
        anything but an end token only the start is emitted.
        """
        ...


@dataclass(frozen=True, slots=True)
class Start:
    """The state in which an answer starts: the prompt and the tools. A parser is made from it."""

    prompt_ids: Sequence[int]
    tools: Mapping[str, Tool]
    vocabulary: Vocabulary


@dataclass(frozen=True, slots=True)
class Forced:
    """The calls that a grammar must enforce: one of `tools`, or several if `parallel`.

    Attributes:
        tools: the tools; types in their schemas are mapped to JSON Schema's.
        on_unenforced: called with `tool: path: keyword` for each keyword that the grammar does not
            enforce.
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
    """Message headers, for dialects that write reasoning and answer as separate messages.

    Grammars of these dialects include the headers, and the reasoning before them.

    Attributes:
        before: returns the lark term that precedes a constrained answer.
        reasoning_end: the marker that ends reasoning under a grammar.
    """

    before: Callable[[Vocabulary], str]
    reasoning_end: str


@dataclass(frozen=True, slots=True)
class Dialect:
    """One notation of reasoning and tool calls.

    Attributes:
        name: the name for `--dialect`.
        recognises: whether a chat template or a `model_type` uses this dialect.
        build: makes the parser of one request.
        reasoning: the texts that open and close reasoning; None if the family does not reason.
        forced: returns a lark grammar for llguidance that allows only tool calls; None if calls
            cannot be forced.
        openers: markers that start a call. Strict calls are constrained from the first of them that
            is one token.
        strict: returns a lark grammar of strict calls: of the text from an opener on, or of the
            whole answer if there are no openers. None means that `forced` is used from each opener
            on.
        frame: message headers; None if answers have none.
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
        """Return a parser in the state in which the prompt leaves the answer.

        Args:
            prompt_ids: the prompt. Only the part after its last turn marker matters, so a marker
                that a user wrote does not open reasoning.
            tools: the tools that may be called. Without any, call markers are plain text.
        """
        return self.build(Start(prompt_ids, {tool.name: tool for tool in tools}, vocabulary))

    def thinking(self, vocabulary: Vocabulary) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the ids that open and that close reasoning, for thinking budgets; None if it has
        none.
        """
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
        """Return a lark grammar that constrains unforced calls to the schemas of their tools.

        It applies from `opener` on, or to the whole answer if `openers` is empty. Return None if no
        token marks where a call starts.

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
        """Return a lark grammar for llguidance that allows nothing but tool calls.

        Args:
            name: the tool to call; None lets the model choose.
            parallel: whether several calls may follow each other.
            on_unenforced: see `Forced`.

        Raises:
            RequestError: there is no such tool, or the dialect cannot force calls.
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
