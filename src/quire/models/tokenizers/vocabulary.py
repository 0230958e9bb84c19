"""Compares the vocabularies of two models, token by token."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import ModelError
from quire.core.folder import read_bytes, read_object

_FILE = "tokenizer.json"


class Difference(NamedTuple):
    """A token id that stands for two different texts."""

    id: int
    first: str
    second: str


def vocabulary_difference(first: Path, second: Path) -> Difference | None:
    """Return the lowest token id that both folders' tokenizers have with different texts.

    A folder may have further tokens: embedding tables are padded, and fine-tuned models add tokens.

    Raises:
        ModelError: a `tokenizer.json` cannot be read.
    """
    files = [folder / _FILE for folder in (first, second)]
    if all(file.is_file() for file in files) and read_bytes(files[0]) == read_bytes(files[1]):
        return None
    ours, theirs = (_texts(file) for file in files)
    wrong = min((id for id in ours.keys() & theirs.keys() if ours[id] != theirs[id]), default=None)
    return None if wrong is None else Difference(wrong, ours[wrong], theirs[wrong])


def _texts(file: Path) -> dict[int, str]:
    """Return the text of each token by id; empty without a file."""
    whole = read_object(file)
    try:
        vocabulary = whole.get("model", {}).get("vocab", {})
        texts = _numbered(vocabulary)
        texts |= {each["id"]: each["content"] for each in whole.get("added_tokens", ())}
    except (AttributeError, KeyError, TypeError) as error:
        raise ModelError(f"{file}: not understood: {error!r}") from error
    return texts


def _numbered(vocabulary: Any) -> dict[int, str]:
    if isinstance(vocabulary, dict):
        return {id: text for text, id in vocabulary.items()}
    return {id: text for id, (text, _) in enumerate(vocabulary)}
