"""The text of each token, computed without decoding its neighbours.

Decoders of byte-level and SentencePiece-like tokenizers work token by token: each token's spelling
becomes bytes, and the joined bytes are UTF-8. So a table from token id to bytes replaces the
decoder. Only the start of a text may need special treatment.
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
    """How a token's spelling becomes bytes.

    Attributes:
        byte_level: whether spellings use GPT-2's characters for bytes.
        byte_fallback: whether a spelling such as `<0x0A>` stands for that byte.
        replacements: (old, new) pairs, applied to the spelling in order.
        marker: character removed from the first token of a text; "" for none.
        strip: character of which up to `strip_count` are removed from the start of a text.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    marker: str = ""
    strip: str = ""
    strip_count: int = 0

    def to_bytes(self, spelling: str) -> bytes:
        """Return the bytes of a token with this spelling."""
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
        """Return the bytes of the first token of a text, before `strip` is applied."""
        return self.to_bytes(spelling.replace(self.marker, "") if self.marker else spelling)


def rule_of(backend: tokenizers.Tokenizer) -> PieceRule | None:
    """Return the rule of a tokenizer's decoder; None if it does not work token by token."""
    if backend.decoder is None:
        return None
    config: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps = config["decoders"] if config["type"] == "Sequence" else [config]
    rule: PieceRule | None = PieceRule()
    joined = False  # whether an earlier step joined the tokens
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
    """Return `rule` extended by a decoder step that works on single tokens; None if the step is
    unknown.
    """
    if rule.byte_level or rule.byte_fallback:
        return None  # later steps would see joined tokens
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
    """Map from token id to text, or to bytes if the token is only part of a character.

    Entries are computed on first use, so that large vocabularies cost nothing at start-up. An
    unknown id (vocabularies are padded) has the text "".

    Args:
        spelling_of: returns a token's spelling by its id; None for an unknown id.
        silent: ids without text, such as special tokens that are not shown.
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
        """Return the bytes of a token at the start of a text."""
        spelling = self._spelling_of(token_id)
        return b"" if spelling is None else self.rule.to_bytes_first(spelling)
