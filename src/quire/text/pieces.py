"""The text of each token, known without decoding the tokens around it.

The decoders of byte-level and SentencePiece-like tokenizers work token by token: a token's spelling
becomes bytes, the bytes are joined, and the joined bytes are UTF-8. So a table from token id to
bytes replaces the decoder. Only the start of a text may be treated in a way of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tokenizers

from quire.core.byte_alphabet import BYTE_OF

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class PieceRule:
    """How one token's spelling becomes bytes.

    Attributes:
        byte_level: spellings are GPT-2's stand-ins for bytes.
        byte_fallback: a spelling such as `<0x0A>` is that byte.
        replacements: (old, new) pairs applied to the spelling in this order.
        marker: the first token of a text loses this character wherever it has it; "" for none.
        strip: the text loses up to `strip_count` of this character at its start.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    marker: str = ""
    strip: str = ""
    strip_count: int = 0

    def to_bytes(self, spelling: str) -> bytes:
        """Return the bytes that a token of this spelling adds."""
        if self.byte_level:
            try:
                return bytes([BYTE_OF[character] for character in spelling])
            except KeyError:  # an added token may be spelled in plain characters
                return spelling.encode()
        for old, new in self.replacements:
            spelling = spelling.replace(old, new)
        if self.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(spelling)):
            return bytes([int(byte[1], 16)])
        return spelling.encode()

    def to_bytes_first(self, spelling: str) -> bytes:
        """Like `to_bytes`, for the first token of a text, before `strip`."""
        return self.to_bytes(spelling.replace(self.marker, "") if self.marker else spelling)


def rule_of(backend: tokenizers.Tokenizer) -> PieceRule | None:
    """Return the rule of a tokenizer's decoder; None if it does not work token by token."""
    if backend.decoder is None:
        return None
    config: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = config["decoders"] if config["type"] == "Sequence" else [config]
    rule: PieceRule | None = PieceRule()
    joined = False  # whether a step before has made one text of all tokens
    for step in steps:
        if rule is None:
            return None
        if step["type"] == "Fuse":
            joined = True
        elif step["type"] == "Strip":
            rule = _with_strip(rule, step) if joined else None
        else:
            rule = None if joined else _with_step(rule, step)
    return rule if rule != PieceRule() else None


def _with_strip(rule: PieceRule, step: dict[str, Any]) -> PieceRule | None:
    if step["stop"] or rule.strip_count:
        return None
    return replace(rule, strip=step["content"], strip_count=step["start"])


def _with_step(rule: PieceRule, step: dict[str, Any]) -> PieceRule | None:
    """`rule` followed by a step that treats each token alone, or None for a step not known."""
    if rule.byte_level or rule.byte_fallback:
        return None  # what follows would see the text of several tokens
    match step:
        case {"type": "ByteLevel"}:
            return replace(rule, byte_level=True) if rule == PieceRule() else None
        case {"type": "ByteFallback"}:
            return replace(rule, byte_fallback=True)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
            return replace(rule, replacements=(*rule.replacements, (old, new)))
        case {"type": "Metaspace", "replacement": str(marker), "prepend_scheme": scheme}:
            if rule.replacements:
                return None
            first = "" if scheme == "never" else marker
            return replace(rule, replacements=((marker, " "),), marker=first)
        case _:
            return None


class PieceTable(dict[int, str | bytes]):
    """Token id -> text, or bytes where the token holds only a part of a character.

    Fills itself as tokens are looked up, so that a large vocabulary costs nothing at start-up.
    An id that the tokenizer does not have (vocabularies are padded) adds nothing.

    Args:
        spelling_of: a token's spelling by its id; None for an id that is not there.
        silent: ids that add nothing, such as special tokens that are not shown.
    """

    def __init__(
        self,
        spelling_of: Callable[[int], str | None],
        rule: PieceRule,
        silent: frozenset[int],
    ) -> None:
        super().__init__(dict.fromkeys(silent, ""))
        self._spelling_of = spelling_of
        self.rule = rule

    def __missing__(self, token_id: int) -> str | bytes:
        spelling = self._spelling_of(token_id)
        raw = b"" if spelling is None else self.rule.to_bytes(spelling)
        piece: str | bytes
        try:
            piece = raw.decode()
        except UnicodeDecodeError:
            piece = raw
        self[token_id] = piece
        return piece

    def first(self, token_id: int) -> bytes:
        """Return the text of the token at the start of a text."""
        spelling = self._spelling_of(token_id)
        return b"" if spelling is None else self.rule.to_bytes_first(spelling)
