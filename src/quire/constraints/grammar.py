"""Constrains answers to a JSON schema, a regular expression or a Lark grammar, by llguidance.

It imports no MLX: a process without MLX compiles each grammar before the engine does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from quire.constraints.masks import TokenMask, mask_of
from quire.constraints.runs import LeadingTokens, RunLimit
from quire.constraints.sequence import SequenceWatcher, Spelling
from quire.core.errors import RequestError
from quire.core.folder import read_bytes
from quire.core.request import JSON_BLANKS, NO_BEGINNING, GrammarSpec

MAX_KEPT = 64
_AT_ONCE = 1024
"""Most characters of a given start that are processed while holding the interpreter's lock."""
_SHOWN = 40

_LIMITS = LLParserLimits(verbose_errors=False)


def check_grammar(spec: GrammarSpec, param: str = "response_format") -> None:
    """Refuse a grammar that cannot be compiled, without needing a tokenizer.

    A Lark grammar that names special tokens needs `GrammarCompiler.compile` instead.

    Raises:
        RequestError: `param` is at fault (code `invalid_schema`); the message says why.
    """
    if message := LLMatcher.validate_grammar(_grammar_text(spec, param), limits=_LIMITS):
        raise _refused(spec, message, param)


def compiles_as_pattern(pattern: str) -> bool:
    """Return whether the grammar of a schema can hold a string to this regular expression."""
    text = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", "pattern": pattern}))
    return not LLMatcher.validate_grammar(text, limits=_LIMITS)


class GrammarCompiler:
    """Makes grammar states for one tokenizer. Thread-safe.

    Args:
        tokenizer: a `tokenizer.json`, or one that is loaded already.
        vocab_size: the logits a row has; may be more than the tokenizer's tokens, whose surplus is
            never allowed, or less.
        eos_ids: the tokens that may follow a complete answer, at least one.
        kept: compiled grammars kept for the next request that brings the same one.

    Raises:
        ModelError: the file cannot be read.
        ValueError: no `eos_ids`, or a file that is not a tokenizer.
    """

    def __init__(
        self,
        tokenizer: Path | Tokenizer,
        vocab_size: int,
        eos_ids: frozenset[int],
        kept: int = MAX_KEPT,
    ) -> None:
        if not eos_ids:
            raise ValueError("a grammar needs a token that ends the answer")
        if isinstance(tokenizer, Path):
            tokenizer = Tokenizer.from_buffer(read_bytes(tokenizer))
        else:
            tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._vocab_size = max(vocab_size, tokenizer.get_vocab_size())
        self._tokenizer = LLTokenizer(
            tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=sorted(eos_ids)
        )
        self._matcher = lru_cache(kept)(self._compile)

    @cached_property
    def _leading(self) -> LeadingTokens:
        return LeadingTokens(lambda token: self._tokenizer.decode_bytes([token]), self._vocab_size)

    def compile(
        self, spec: GrammarSpec, param: str = "response_format", *, limited: bool = False
    ) -> GrammarState:
        """Return the grammar state before the answer's first token.

        Args:
            limited: whether runs of digits and blanks are limited; see `runs`.

        Raises:
            RequestError: `param` is at fault (code `invalid_schema`), or no answer starts with
                what is `started` (code `NO_BEGINNING`); the message says why.
            ValueError: `opened_by` without `start_after`, or `lazy` without `opener`.
        """
        if spec.opened_by and not spec.start_after:
            raise ValueError("a free part needs both its opening and its ending text")
        if spec.lazy and spec.opener is None:
            raise ValueError("a lazy grammar needs the token that starts it")
        matcher = self._matcher(GrammarSpec(spec.kind, spec.source), param)
        state = GrammarState(
            matcher,
            spec,
            self._vocab_size,
            tokenizer=self._tokenizer,
            spelling=self.spelling(spec.start_after),
            runs=RunLimit(self._leading) if limited else None,
        )
        if rest := state.start(spec.started, self._tokenizer):
            raise RequestError(
                f"The last message cannot be continued to an answer that meets "
                f"'{param}': the grammar does not allow its text from {rest[:_SHOWN]!r} on.",
                param=param,
                code=NO_BEGINNING,
            )
        return state

    def spelling(self, ids: Sequence[int]) -> Spelling | None:
        """Return the bytes of tokens, if `ids` are several ordinary ones, which may be cut
        otherwise.
        """
        if len(ids) < 2 or any(map(self._tokenizer.is_special_token, ids)):
            return None
        return lambda tokens: bytes(self._tokenizer.decode_bytes(list(tokens)))

    def _compile(self, spec: GrammarSpec, param: str) -> LLMatcher:
        text = _grammar_text(spec, param)
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # each state is a copy of this one and finds it done
        if matcher.is_error():
            raise _refused(spec, matcher.get_error(), param)
        return matcher


class GrammarState:
    """The state of one answer's grammar. Made by `GrammarCompiler.compile`.

    The answer is free until `start_after` has come, then constrained. With `opened_by` it may be
    constrained from its first token: the model chooses whether to open the free part. A lazy
    grammar constrains from each `opener` until it is complete.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        spec: GrammarSpec,
        vocab_size: int,
        tokenizer: LLTokenizer,
        spelling: Spelling | None,
        runs: RunLimit | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._runs = runs
        self._unused = matcher
        self._matcher = matcher.deep_copy()
        self._opener = spec.opener
        self._lazy = spec.lazy
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._opening = spec.opened_by
        self._opened = 0  # how many ids of `_opening` have come
        self._end = SequenceWatcher(spec.start_after, spelling)
        self._free = spec.lazy or (bool(spec.start_after) and not spec.opened_by)

    def start(self, text: str, tokenizer: LLTokenizer) -> str:
        """Consume the given start of the answer; return the part that is not allowed.

        Only its bytes matter, not its tokens in the prompt.
        """
        for start in range(0, len(text), _AT_ONCE):
            tokens = tokenizer.greedy_tokenize(text[start : start + _AT_ONCE])
            taken = self._matcher.try_consume_tokens(tokens)
            if taken < len(tokens):
                return tokenizer.decode_str(tokens[taken:]) + text[start + _AT_ONCE :]
        return ""

    def copy(self) -> GrammarState:
        """Return an independent copy of the state."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        other._end = self._end.copy()
        other._runs = copy(self._runs)
        return other

    @property
    def pending(self) -> bool:
        """Whether the answer is free now and constrained later: every token but an end may come."""
        return self._free and not self._lazy

    @property
    def finished(self) -> bool:
        """Whether only an end token may follow, or one came."""
        return not self._free and bool(self._matcher.is_stopped())

    def mask(self) -> TokenMask | None:
        """Return the mask of allowed next tokens; None while the answer is free.

        Raises:
            RequestError: the grammar outgrew its limits on the way (code `grammar_failed`).
        """
        if self._free:
            return None
        if self._opened:
            return mask_of(self._opening[self._opened : self._opened + 1], self._vocab_size)
        # llguidance gives one word more where the vocabulary fills its last one.
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32)[: self._words]
        self._raise_if_failed()
        if self._runs is not None:
            words = self._runs.limited(words)
        return words | mask_of(self._opening[:1], self._vocab_size) if self._opening else words

    def accept(self, token_id: int) -> None:
        """Advance by the next token of the answer.

        Raises:
            RequestError: the mask did not allow it (code `grammar_failed`).
        """
        if self._free:
            self._accept_free(token_id)
        elif self._opening and token_id == self._opening[self._opened]:
            self._opened += 1
            if self._opened == len(self._opening):
                self._opening, self._opened, self._free = (), 0, True
        else:
            self._opening = ()
            self._matcher.consume_token(token_id)
            self._raise_if_failed()
            if self._runs is not None:
                self._runs.accept(token_id)
            self._free = self._lazy and bool(self._matcher.is_accepting())

    def _accept_free(self, token_id: int) -> None:
        if token_id != self._opener:
            self._free = self._lazy or not self._end.push(token_id)
            if not self._free and (started := self._end.rest.lstrip()):
                # The token that ended the free part starts the answer.
                for token in self._tokenizer.tokenize_bytes(started):
                    self._matcher.consume_token(token)
                self._raise_if_failed()
            return
        matcher = self._unused.deep_copy()
        if matcher.try_consume_tokens([token_id]):
            self._matcher, self._free = matcher, False

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            reason = readable(self._matcher.get_error())
            raise RequestError(
                f"The answer's grammar failed: {reason}.",
                param="response_format",
                code="grammar_failed",
            )


def _grammar_text(spec: GrammarSpec, param: str) -> str:
    """Return the grammar in llguidance's own form."""
    try:
        match spec.kind:
            case "json_schema":
                # Not lenient: a keyword that llguidance can't enforce is refused, not ignored.
                text = LLMatcher.grammar_from_json_schema(
                    spec.source, overrides={"whitespace_pattern": JSON_BLANKS, "lenient": False}
                )
            case "regex":
                text = LLMatcher.grammar_from_regex(spec.source)
            case "lark":
                text = LLMatcher.grammar_from_lark(spec.source)
            case _:
                raise _refused(spec, "this kind of grammar is not supported", param)
    except ValueError as error:
        raise _refused(spec, str(error), param) from error
    return str(text)


def _refused(spec: GrammarSpec, reason: str, param: str) -> RequestError:
    return RequestError(
        f"'{param}' cannot be compiled as {_KINDS.get(spec.kind, spec.kind)}: {readable(reason)}.",
        param=param,
        code="invalid_schema",
    )


_KINDS = {"json_schema": "a JSON schema", "regex": "a regular expression", "lark": "a grammar"}
_STOPS = {
    "NoExtension": "no text can match it from here on",
    "NoExtensionBias": "no token of the model can continue it",
    "LexerTooComplex": "its regular expressions are too complex",
    "ParserTooComplex": "its rules are too complex",
}
"""The compiler's reasons for stopping."""
_REGEX_ERROR = re.compile(
    r"(?:invalid regex (?P<regex>\".*?\") .*)?regex parse error:.*", re.DOTALL
)
_REMOTE = re.compile(r"Resource '(?P<url>[^']*)' is not present in a registry.*", re.DOTALL)
_POINTER = re.compile(r"Pointer '(?P<pointer>[^']*)' does not exist.*", re.DOTALL)
_RANGE = re.compile(r"Failed to generate regex for (?P<kind>\w+) range: (?P<range>.*)", re.DOTALL)


def readable(text: str) -> str:
    """Return the compiler's message about a grammar in one line for the client."""
    text = text.replace("<non-verbose/>", "").strip()
    if text in _STOPS:
        return _STOPS[text]
    if found := _REGEX_ERROR.search(text):
        (*_, why) = re.findall(r"^error: (.*)$", text, re.MULTILINE) or ["it is too complex"]
        regex = f" {found['regex']}" if found["regex"] else ""
        return f"the regular expression{regex} cannot be read: {why.strip().rstrip('.')}"
    if found := _REMOTE.search(text):
        return (
            f"'$ref' points to '{found['url']}', and nothing is fetched: only references within "
            "the schema are followed, such as '#/$defs/NAME'"
        )
    if found := _POINTER.search(text):
        return f"'$ref' points to '#{found['pointer']}', which the schema does not have"
    if found := _RANGE.search(text):
        return f"bounds of this size cannot be held for {found['kind']} values"
    return text.split("\n", 1)[0].rstrip(".")
