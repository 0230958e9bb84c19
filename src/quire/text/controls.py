"""Keeps control tokens out of text that comes from outside.

A chat template writes control tokens as text. A user, or a web page in a tool's result, can write
the same text. Only what the template itself writes becomes a control token.

`cover` inserts a sentinel character into outside text wherever it spells a control token, or where
text of the template beside it could complete one. The sentinel survives what templates do to texts
(trimming, JSON, joining). `encode` removes the sentinels: a control token that had one inside stays
text, and everything else gets its usual ids.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any

from quire.text.tokenizer import Tokenizer

SENTINEL = "\udc00"
"""A lone surrogate. Text that can be encoded holds none, so clients cannot send it."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_STRUCTURE = frozenset(
    (
        *("role", "user", "assistant", "system", "tool", "developer", "content", "name"),
        *("text", "image", "audio", "video", "thinking", "reasoning", "reasoning_content"),
        *("tool_calls", "function", "arguments", "parameters", "properties", "description"),
        *("type", "required", "items", "enum", "object", "array", "string", "integer", "number"),
        *("boolean", "null"),
    )
)
"""Names and values that templates look up or compare with. They are never marked as texts that a
template's brackets could complete.
"""

_BRACKETS = 2  # characters that a template may write around a name, as in `<|name|>`


def control_tokens(tokenizer: Tokenizer, template: str) -> frozenset[str]:
    """Return the tokens that structure a conversation rather than spell text.

    These are tokens that the tokenizer marks as special, tokens that the template's source writes,
    and tokens that look like control tokens (`<|...|>`). Other added tokens, such as runs of blanks
    or HTML tags, are ordinary text.
    """
    found = set()
    for text, token_id in tokenizer.added_tokens.items():
        special = token_id in tokenizer.special_ids
        if special and tokenizer.codec.traits.specials_are_text:
            continue  # the tokenizer itself encodes them as text
        looks_so = text.startswith(("<|", "<｜")) or text.endswith(("|>", "｜>"))
        if text.strip() and (special or looks_so or text in template):
            found.add(text)
    return frozenset(found)


class Controls:
    """Covers outside text for a template, and encodes the rendered template.

    Args:
        texts: control tokens that outside text must not become, and marks that are replaced by
            media in a rendered template.
        reasoning: the tokens around reasoning. In an assistant's message that starts with reasoning
            they stay control tokens, since templates look for them there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Collection[str],
        reasoning: tuple[str, str] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._spelled = _Spelled(texts)
        self._reasoning = reasoning
        self._in_reasoning = _Spelled(frozenset(texts) - frozenset(reasoning or ()))
        traits = tokenizer.codec.traits
        added = traits.added
        tokens = {token.content: id for id, token in added.items() if token.content in texts}
        self._ids = tokens
        self._tokens = _Spelled(tokens)
        self._forged = frozenset(tokens.values()) - {_unknown_of(tokenizer)}
        self._strip_before = {added[id].content for id in tokens.values() if added[id].lstrip}
        self._strip_after = {added[id].content for id in tokens.values() if added[id].rstrip}
        # A normalizer may make control tokens of other characters, such as full-width ones.
        normalized = any(added[id].normalized for id in tokens.values())
        self._literal = not (traits.normalizes and normalized)
        self._anchor = f"<{secrets.token_hex(16)}>"
        self._plain, self._renamed = tokenizer.codec.without(texts, self._anchor)

    def cover(self, value: Any) -> Any:
        """Return a JSON value from outside with sentinels inserted."""
        return _covered(value, self._spelled)

    def cover_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message with sentinels inserted."""
        covered: dict[str, Any] = self.cover(message)
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            size = self._reasoning_length(content)
            reasoning = _covered(content[:size], self._in_reasoning)
            covered["content"] = reasoning + self.cover(content[size:])
        return covered

    def _reasoning_length(self, answer: str) -> int:
        """Return the length of the reasoning that an answer starts with, or of its opening marker
        if the reasoning is not closed.
        """
        if self._reasoning is None:
            return 0
        opening, closing = self._reasoning
        start = len(answer) - len(answer.lstrip())
        if not answer.startswith(opening, start):
            return 0
        end = answer.find(closing, start)
        return end + len(closing) if end >= 0 else start + len(opening)

    def without_reasoning(self, answer: str) -> str:
        """Return an answer without the reasoning at its start; "" if the reasoning is not
        closed.
        """
        size = self._reasoning_length(answer)
        if not size:
            return answer
        assert self._reasoning is not None
        closed = answer[:size].endswith(self._reasoning[1])
        return answer[size:].lstrip() if closed else ""

    def bare(self, rendered: str) -> str:
        """Return a rendered template without its sentinels."""
        return rendered.replace(SENTINEL, "")

    def encode(self, rendered: str) -> list[int]:
        """Return the token ids of a rendered template whose outside texts were covered."""
        pieces = rendered.split(SENTINEL)
        text = "".join(pieces)
        cuts = list(accumulate(map(len, pieces)))[:-1]
        spans = self._tokens.spans(text) if cuts or not self._literal else []
        own = [span for span in spans if not _cut(span, cuts)]
        if len(own) == len(spans):
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if self._literal or sum(each in self._forged for each in ids) <= len(own):
                return ids
        return self._encode_apart(text, own)

    def _encode_apart(self, text: str, own: list[tuple[int, int]]) -> list[int]:
        """Encode a text piecewise: the template's control tokens by id, the text between them as
        text.
        """
        ids: list[int] = []
        ends = [(0, 0), *own, (len(text), len(text))]
        for (start, end), (following, last) in pairwise(ends):
            before, after = text[start:end], text[following:last]
            if before:
                ids.append(self._ids[before])
            between = text[end:following]
            if before in self._strip_after:
                between = between.lstrip()
            if after in self._strip_before:
                between = between.rstrip()
            ids += self._encode_text(between, first=end == 0)
        return ids

    def _encode_text(self, text: str, *, first: bool) -> list[int]:
        """Encode text without control tokens. Unless it is `first`, encode it as if a token
        precedes it.
        """
        if not text:
            return []
        ids = self._plain_ids(text, first)
        if self._forged.isdisjoint(ids):
            return ids
        # Ordinary tokens were merged to a control token, such as `<s>` from `<` and `s>`.
        starts = [start + 1 for start, _ in self._tokens.spans(text)]
        edges = [0, *starts, len(text)]
        pieces = [text[left:right] for left, right in pairwise(edges)]
        return [
            id for n, piece in enumerate(pieces) for id in self._plain_ids(piece, first and not n)
        ]

    def _plain_ids(self, text: str, first: bool) -> list[int]:
        anchored = text if first else self._anchor + text
        ids = self._plain(anchored) if first else self._plain(anchored)[1:]
        return [self._renamed.get(each, each) for each in ids]


def _unknown_of(tokenizer: Tokenizer) -> int | None:
    """Return the id of the unknown token, which any text may produce."""
    return tokenizer.token_id(tokenizer.special_tokens.get("unk_token", ""))


class _Spelled:
    """Finds given texts within a text, and places where neighbouring text could complete one."""

    def __init__(self, texts: Collection[str]) -> None:
        self._pattern = re.compile(_any_of(texts)) if texts else None
        self._longest = max(map(len, texts), default=0)
        self._firsts = frozenset(text[0] for text in texts)
        self._lasts = frozenset(text[-1] for text in texts)
        heads = {text[:size] for text in texts for size in range(1, len(text))}
        tails = {text[size:] for text in texts for size in range(1, len(text))}
        # A sentinel must not protect white space that the template would trim.
        self._heads = frozenset(head for head in heads if not head[-1].isspace())
        self._tails = frozenset(tail for tail in tails if not tail[0].isspace())
        self._bracketed = frozenset(_bracketed(texts)) - _STRUCTURE

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of the leftmost, longest matches in `text`."""
        return [m.span() for m in self._pattern.finditer(text)] if self._pattern else []

    def marked(self, text: str) -> str:
        """Return `text` with a sentinel inside each match, and where neighbouring text could
        complete one.
        """
        if self._pattern is None or not text:
            return text
        if text in self._bracketed:
            return text[0] + SENTINEL + text[1:]
        head, tail = text[: self._longest], text[-self._longest :]
        if [first for first in self._firsts if first in text]:
            text = self._pattern.sub(lambda found: found[0][0] + SENTINEL + found[0][1:], text)
        if not self._lasts.isdisjoint(head) and not self._tails.isdisjoint(
            [head[:size] for size in range(1, len(head) + 1)]
        ):
            text = SENTINEL + text
        if not self._firsts.isdisjoint(tail) and not self._heads.isdisjoint(
            [tail[-size:] for size in range(1, len(tail) + 1)]
        ):
            text += SENTINEL
        return text


def _covered(value: Any, spelled: _Spelled) -> Any:
    match value:
        case str():
            if not value.isascii():
                value = _SURROGATE.sub("\ufffd", value)
            return spelled.marked(value)
        case list() | tuple():
            return type(value)(_covered(each, spelled) for each in value)
        case Mapping():
            return {_covered(key, spelled): _covered(each, spelled) for key, each in value.items()}
        case _:
            return value


def _cut(span: tuple[int, int], cuts: list[int]) -> bool:
    """Return whether one of `cuts`, in ascending order, lies within a span."""
    at = bisect_right(cuts, span[0])
    return at < len(cuts) and cuts[at] < span[1]


def _bracketed(texts: Collection[str]) -> Iterable[str]:
    """Yield texts that become one of `texts` if one or two characters are added on both sides."""
    for text in texts:
        for left in range(1, _BRACKETS + 1):
            for right in range(1, _BRACKETS + 1):
                around = text[:left] + text[-right:]
                if len(text) > left + right and not any(map(str.isalnum, around)):
                    yield text[left:-right]


def _any_of(texts: Collection[str]) -> str:
    """Return a pattern that matches any of the texts, the longest first, in linear time."""
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _pattern_of(trie)


def _pattern_of(node: dict[str, Any]) -> str:
    branches = [
        re.escape(character) + _pattern_of(after) for character, after in node.items() if character
    ]
    if not branches:
        return ""
    joined = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return joined + ("?" if "" in node else "")
