"""Constraints on a sequence's next token: grammar, thinking budget, minimum length, token rules."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property
from pathlib import Path

from quire.constraints.grammar import GrammarCompiler, GrammarState
from quire.constraints.masks import TokenMask, allows, mask_of
from quire.constraints.sequence import Spelling
from quire.constraints.thinking import ThinkingState
from quire.constraints.token_rules import TokenRulesState
from quire.core.errors import RequestError
from quire.core.request import Request, ThinkingBudget, TokenRules
from quire.scheduler.sequence import TokenConstraint

log = logging.getLogger("quire.engine")


class AnswerConstraint:
    """The constraint of one answer: a `scheduler.sequence.TokenConstraint`.

    Forced tokens come first.

    Args:
        endless: mask of all tokens except those that end an answer. It applies while a grammar
            leaves reasoning free, because an answer that ended there would not meet the grammar.
        min_tokens: tokens that must come before an end token.
        rules: tokens that the client allows or bans.
    """

    def __init__(
        self,
        grammar: GrammarState | None,
        thinking: ThinkingState | None,
        endless: TokenMask,
        vocab_size: int,
        min_tokens: int = 0,
        rules: TokenRulesState | None = None,
    ) -> None:
        self._grammar = grammar
        self._thinking = thinking
        self._endless = endless
        self._vocab_size = vocab_size
        self._missing = min_tokens
        self._rules = rules

    def mask(self) -> TokenMask | None:
        """Return the mask of tokens that may come next; None allows all.

        Raises:
            RequestError: no token is allowed (code `no_token_allowed`), or the grammar failed.
        """
        forced = self._thinking.forced() if self._thinking is not None else None
        if forced is not None:
            return mask_of((forced,), self._vocab_size)
        mask = self._by_format()
        if self._rules is None:
            return mask
        ruled = self._rules.mask() if mask is None else self._rules.mask() & mask
        if not ruled.any():
            raise RequestError(
                "No token may come next: 'allowed_token_ids' and 'bad_words' exclude all "
                "tokens that the answer's format and 'min_tokens' allow.",
                param="allowed_token_ids",
                code="no_token_allowed",
            )
        return ruled

    def _by_format(self) -> TokenMask | None:
        """Return the tokens that the grammar and the minimum length allow; None allows all."""
        if self._grammar is not None and self._grammar.pending:
            return self._endless
        mask = None if self._grammar is None else self._grammar.mask()
        if self._missing <= 0:
            return mask
        if mask is None:
            return self._endless
        longer = mask & self._endless
        return longer if longer.any() else mask  # a grammar that has been met goes no further

    def accept(self, token: int) -> None:
        """Advance by the next token of the answer."""
        self._missing -= 1
        if self._thinking is not None:
            self._thinking.accept(token)
        if self._grammar is not None:
            self._grammar.accept(token)
        if self._rules is not None:
            self._rules.accept(token)

    def follow(self, drafts: Sequence[int]) -> list[TokenMask | None]:
        masks: list[TokenMask | None] = []
        ahead = self._copy()
        mask = ahead.mask()
        try:
            for token in drafts:
                if mask is not None and not allows(mask, token):
                    break
                ahead.accept(token)
                mask = ahead.mask()
                masks.append(mask)
        except (RequestError, ValueError):
            pass  # it is raised again if the draft is right
        return masks

    def _copy(self) -> AnswerConstraint:
        """Return an independent copy of the state."""
        other = copy(self)
        other._grammar = None if self._grammar is None else self._grammar.copy()
        other._thinking = None if self._thinking is None else self._thinking.copy()
        other._rules = None if self._rules is None else self._rules.copy()
        return other


class ConstraintFactory:
    """Makes the constraints of one model's requests.

    `open`, or the first use, creates the grammar compiler.

    Args:
        folder: the folder with `tokenizer.json`.
        limited: whether runs of digits and blanks in JSON are limited by default.
    """

    def __init__(
        self, folder: Path, vocab_size: int, eos_ids: frozenset[int], *, limited: bool = True
    ) -> None:
        self._limited = limited
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._folder / "tokenizer.json", self._vocab_size, self._eos_ids)

    @cached_property
    def _endless(self) -> TokenMask:
        return ~mask_of(self._eos_ids, self._vocab_size)

    def open(self) -> None:
        """Make the grammar compiler now, so that no stream waits for it.

        Its libraries hold the interpreter's lock: 5 s of processor time for 262,000 tokens.
        """
        try:
            _ = self._compiler
        except Exception as error:  # whatever they raise; the model serves all other requests
            log.info("grammars are disabled for this model: %s", error)

    @cached_property
    def _spelling_of(self) -> Callable[[Sequence[int]], Spelling | None]:
        """Return how marks of ordinary tokens may be spelled, if there is a grammar compiler."""
        try:
            return self._compiler.spelling
        except Exception:  # as in `open`: budgets then count by ids alone
            return lambda ids: None

    def _thinking(self, budget: ThinkingBudget) -> ThinkingState:
        """Return the state of a thinking budget.

        It recognises marks of ordinary tokens however they are tokenised.
        """
        several = len(budget.end_ids) > 1
        return ThinkingState(budget, self._spelling_of(budget.end_ids) if several else None)

    def make(self, request: Request) -> TokenConstraint | None:
        """Return the constraint that a request asks for, or None.

        Raises:
            RequestError: its grammar cannot be compiled.
        """
        ruled = request.rules != TokenRules()
        bound = request.grammar is not None or request.thinking is not None
        if not (bound or ruled or request.min_tokens):
            return None
        grammar = None
        if request.grammar is not None:
            limited = self._limited if request.stop_on_loop is None else request.stop_on_loop != 0
            grammar = self._compiler.compile(
                request.grammar, limited=limited and request.grammar.schema
            )
        thinking = self._thinking(request.thinking) if request.thinking is not None else None
        endless = self._endless
        if request.min_tokens:
            ends = (each for each in request.stop_token_ids if each < self._vocab_size)
            endless = endless & ~mask_of(ends, self._vocab_size)
        return AnswerConstraint(
            grammar,
            thinking,
            endless=endless,
            vocab_size=self._vocab_size,
            min_tokens=request.min_tokens,
            rules=TokenRulesState(request.rules, self._vocab_size) if ruled else None,
        )
