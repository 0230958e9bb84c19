"""Reads a few fields of SentencePiece model files (`tokenizer.model`), which are Protocol Buffers.

Message and field numbers are those of `sentencepiece_model.proto` (google/sentencepiece).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire.core.errors import ModelError
from quire.core.folder import read_bytes

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of pieces."""
UNIGRAM, BPE = 1, 2
"""Kinds of models."""

_VARINT, _I64, _BYTES, _I32 = 0, 1, 2, 5
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Piece:
    """A token: its text, its kind, and its score (log likelihood, or order of its merge)."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True, slots=True)
class SentencePieceFile:
    """The contents of a model file, with defaults for absent fields.

    Attributes:
        pieces: tokens by id.
        unknown: id of the unknown token; -1 for none. `start` and `end` likewise.
        charsmap: compiled normalisation rules; empty for none.
        prefix: whether a space is put before each text.
        squeezes: whether spaces at the ends are dropped and several become one.
        escapes: whether spaces are written as U+2581.
    """

    pieces: tuple[Piece, ...]
    kind: int = UNIGRAM
    unknown: int = 0
    start: int = 1
    end: int = 2
    charsmap: bytes = b""
    prefix: bool = True
    squeezes: bool = True
    escapes: bool = True


def read_sentencepiece(path: Path) -> SentencePieceFile:
    """Read a SentencePiece file.

    Raises:
        ModelError: the file cannot be read, or is not a SentencePiece model.
    """
    data = read_bytes(path)
    try:
        return _model(data)
    except (ValueError, IndexError, struct.error) as error:
        raise ModelError(f"{path}: not a SentencePiece model: {error}") from error


def _model(data: bytes) -> SentencePieceFile:
    pieces: list[Piece] = []
    trainer: dict[int, int | bytes] = {}
    normalizer: dict[int, int | bytes] = {}
    for number, value in _fields(data):
        if not isinstance(value, bytes):
            continue
        if number == _PIECE:
            pieces.append(_piece(dict(_fields(value))))
        elif number == _TRAINER:
            trainer |= dict(_fields(value))
        elif number == _NORMALIZER:
            normalizer |= dict(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    return SentencePieceFile(
        tuple(pieces),
        kind=_number(trainer, 3, UNIGRAM),
        unknown=_number(trainer, 40, 0),
        start=_number(trainer, 41, 1),
        end=_number(trainer, 42, 2),
        charsmap=_bytes(normalizer, 2),
        prefix=bool(_number(normalizer, 3, 1)),
        squeezes=bool(_number(normalizer, 4, 1)),
        escapes=bool(_number(normalizer, 5, 1)),
    )


def _piece(fields: dict[int, int | bytes]) -> Piece:
    (score,) = struct.unpack("<f", _bytes(fields, 2) or b"\0\0\0\0")
    return Piece(_bytes(fields, 1).decode(), score, _number(fields, 3, NORMAL))


def _number(fields: dict[int, int | bytes], number: int, default: int) -> int:
    """Return an int32 or enum field."""
    value = fields.get(number, default)
    if not isinstance(value, int):
        raise ValueError(f"field {number} is no number")
    return value - (1 << 64) if value >> 63 else value


def _bytes(fields: dict[int, int | bytes], number: int) -> bytes:
    value = fields.get(number, b"")
    if not isinstance(value, bytes):
        raise ValueError(f"field {number} is a number")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the numbers and values of a message's fields; fixed-width values as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        size = {_I64: 8, _I32: 4}.get(wire)
        if wire == _BYTES:
            size, at = _varint(data, at)
        if size is None or at + size > len(data):
            raise ValueError(f"it breaks off or is damaged at byte {at}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError(f"a number has no end at byte {at}")
