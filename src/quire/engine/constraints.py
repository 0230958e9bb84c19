"""What holds a sequence's next token: a grammar, a thinking budget, or both."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from quire.constraints.grammar import GrammarCompiler, GrammarState
from quire.constraints.masks import TokenMask, mask_of
from quire.constraints.thinking import ThinkingState
from quire.core.request import Request
from quire.scheduler.sequence import TokenConstraint


class AnswerConstraint:
    """Follows one answer; a `scheduler.sequence.TokenConstraint`. A forced token goes first.

    Args:
        going_on: allows all tokens but those that end an answer. It holds while a grammar leaves a
            thought free: an answer that ended there would not meet the grammar.
    """

    def __init__(
        self,
        grammar: GrammarState | None,
        thinking: ThinkingState | None,
        going_on: TokenMask,
        vocab_size: int,
    ) -> None:
        self._grammar = grammar
        self._thinking = thinking
        self._going_on = going_on
        self._vocab_size = vocab_size

    def mask(self) -> TokenMask | None:
        """The tokens that may come next; None allows all."""
        forced = self._thinking.forced() if self._thinking is not None else None
        if forced is not None:
            return mask_of((forced,), self._vocab_size)
        if self._grammar is None:
            return None
        return self._going_on if self._grammar.pending else self._grammar.mask()

    def accept(self, token: int) -> None:
        """Takes the next token of the answer."""
        if self._thinking is not None:
            self._thinking.accept(token)
        if self._grammar is not None:
            self._grammar.accept(token)


class ConstraintFactory:
    """Makes guides for one model. The grammar compiler is made when first needed.

    Args:
        folder: holds `tokenizer.json`.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._folder / "tokenizer.json", self._vocab_size, self._eos_ids)

    @cached_property
    def _going_on(self) -> TokenMask:
        return ~mask_of(self._eos_ids, self._vocab_size)

    def make(self, request: Request) -> TokenConstraint | None:
        """The guide that a request asks for, or None.

        Raises:
            RequestError: its grammar cannot be compiled.
        """
        if request.grammar is None and request.thinking is None:
            return None
        grammar = self._compiler.compile(request.grammar) if request.grammar is not None else None
        thinking = ThinkingState(request.thinking) if request.thinking is not None else None
        return AnswerConstraint(grammar, thinking, self._going_on, self._vocab_size)
