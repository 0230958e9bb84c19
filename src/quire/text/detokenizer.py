"""Converts token ids to text, one token at a time."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from quire.text.pieces import PieceTable
from quire.text.tokenizer import Tokenizer

_BROKEN = "\N{REPLACEMENT CHARACTER}"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_MAX_HELD = 8  # tokens; no encoding needs more than four for one character


class Detokenizer:
    """Converts one sequence's tokens into text as they arrive.

    A character is emitted with its last byte. The joined pieces equal the decoding of all tokens at
    once, with two exceptions. An unfinished character at the end is dropped. And if a byte-fallback
    model writes bytes that are not UTF-8, whole characters beside them are kept, whereas
    `tokenizers` turns the entire run into replacement characters.

    Args:
        skip_special: whether to leave out special tokens.
        after: the last tokens before the text, such as a prompt to complete. Without any, the text
            starts here, and SentencePiece-like tokenizers drop its leading space.
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

    def pieces_of(self, token_ids: Sequence[int]) -> list[str]:
        """Return what `add` would return for each of the first tokens and would not remember, up to
        the first token that it would remember.
        """
        if not self._settled:
            return []
        pieces: list[str] = []
        for token_id in token_ids:
            piece = self._pieces[token_id]
            if type(piece) is not str:
                break
            pieces.append(piece)
        return pieces

    def flush(self) -> str:
        """Return the text that is still held, as no token follows."""
        return self._decoder.flush()


class _Table:
    """Decodes by a piece table, joining characters split between tokens and trimming the text's
    start.
    """

    __slots__ = ("_first", "_pieces", "_strip_left", "_utf8")

    def __init__(self, pieces: PieceTable, *, starts: bool) -> None:
        self._pieces = pieces
        self._first = starts
        self._strip_left = pieces.rule.strip_count if starts else 0
        self._utf8 = _UTF8("replace")

    @property
    def settled(self) -> bool:
        """Whether the next token of whole characters adds exactly its table entry."""
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
    """Decodes a window of recent tokens repeatedly, for decoders that depend on neighbouring
    tokens.

    `_ids` holds the tokens of the window. The first `_sent` of them were emitted and are kept as
    context; the difference that the newest token makes is new text.
    """

    __slots__ = ("_ids", "_sent", "_skip_special", "_tokenizer")

    settled = False

    def __init__(self, tokenizer: Tokenizer, skip_special: bool, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids = list(after[-_MAX_HELD:])
        self._sent = len(self._ids)  # how many of `_ids` were emitted

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
