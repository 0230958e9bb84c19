"""Tokens to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from quire.text.pieces import PieceTable
from quire.text.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_MAX_HELD = 8  # tokens; no encoding needs more than four for one character


class Detokenizer:
    """Turns one sequence's tokens into text as they come.

    A character is handed out when its last byte is there. Joined, the pieces are what decoding all
    the tokens at once gives, save two cases: a character that is not finished when the tokens end
    is left out, and where a byte-fallback model writes bytes that are not UTF-8, the whole
    characters beside them stay (`tokenizers` turns the entire run of bytes into replacement
    characters, which cannot be known while streaming).

    Args:
        skip_special: leave out tokens that are marked special.
        after: the last tokens of what the text goes on from, such as a prompt to complete. Without
            any, the text starts here, and SentencePiece-like tokenizers drop its leading space.
    """

    __slots__ = ("_decoder", "_pieces", "_settled")

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, after: Sequence[int] = ()
    ) -> None:
        table = tokenizer.pieces(skip_special=skip_special)
        self._pieces: dict[int, str | bytes] = {} if table is None else table
        self._decoder: _Table | _Window = (
            _Window(tokenizer, skip_special, after)
            if table is None
            else _Table(table, starts=not after)
        )
        self._settled = self._decoder.settled

    def add(self, token_id: int) -> str:
        """Return the text that this token completes; possibly none."""
        if self._settled:
            piece = self._pieces[token_id]
            if type(piece) is str:
                return piece
        text = self._decoder.add(token_id)
        self._settled = self._decoder.settled
        return text

    def flush(self) -> str:
        """Return the text that is still held when no token follows."""
        return self._decoder.flush()


class _Table:
    """Follows a piece table through characters cut between tokens and the text's start."""

    __slots__ = ("_first", "_pieces", "_strip_left", "_utf8")

    def __init__(self, pieces: PieceTable, *, starts: bool) -> None:
        self._pieces = pieces
        self._first = starts
        self._strip_left = pieces.rule.strip_count if starts else 0
        self._utf8 = _UTF8("replace")

    @property
    def settled(self) -> bool:
        """Whether a next token of whole characters adds just what the table says."""
        started = not (self._first and self._pieces.rule.marker) and not self._strip_left
        return started and not self._utf8.getstate()[0]

    def add(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if not piece:
            return ""  # must not come between the bytes of one character
        if self._first:
            self._first = False
            piece = self._pieces.first(token_id)
        raw = piece.encode() if isinstance(piece, str) else piece
        text = self._utf8.decode(raw)
        return self._stripped(text) if self._strip_left else text

    def flush(self) -> str:
        return ""  # what is pending is an unfinished character

    def _stripped(self, text: str) -> str:
        character = self._pieces.rule.strip
        while self._strip_left and text.startswith(character):
            text = text[len(character) :]
            self._strip_left -= 1
        if text:
            self._strip_left = 0
        return text


class _Window:
    """Decodes a few tokens again and again, for decoders that look at a token's neighbours.

    The tokens from `_start` on are decoded with and without the newest; the difference is new. The
    ones before `_sent` have been handed out and are kept as the neighbour that matters.
    """

    __slots__ = ("_ids", "_sent", "_skip_special", "_tokenizer")

    settled = False

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(after[-_MAX_HELD:])
        self._sent = len(self._ids)  # of `_ids`, how many are in the text that was handed out

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._unsent()
        held = len(self._ids) - self._sent
        if not text or (text.endswith(_BROKEN) and held < _MAX_HELD):
            return ""
        self._ids = self._ids[self._sent :]
        self._sent = len(self._ids)
        return text

    def flush(self) -> str:
        text = self._unsent().rstrip(_BROKEN)
        self._sent = len(self._ids)
        return text

    def _unsent(self) -> str:
        known = self._decode(self._ids[: self._sent])
        return self._decode(self._ids)[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
