"""The id of a token by its text, from a tokenizer's files, without the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.folder import read_object


def token_id(folder: Path, text: str, *, ordinary: bool = False) -> int | None:
    """The id of an added token; None where no file has it.

    Args:
        ordinary: also of a token of the vocabulary itself.

    Raises:
        ModelError: a file holds no such table; names the file.
    """
    listed = _listed(folder).get(text)
    if listed is None:
        listed = _id(read_object(folder / "added_tokens.json").get(text))
    if listed is not None:
        return listed
    path = folder / "tokenizer.json"
    whole = read_object(path)  # last, since it may have tens of megabytes
    entries = whole.get("added_tokens") or []
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and _id(entry.get("id")) is not None for entry in entries
    ):
        raise ModelError(f"{path}: 'added_tokens' is no list of tokens and their ids")
    for entry in entries:
        if entry.get("content") == text:
            return _id(entry["id"])
    model = whole.get("model")
    vocabulary = model.get("vocab") if ordinary and isinstance(model, dict) else None
    if not isinstance(vocabulary, dict) or vocabulary.get(text) is None:
        return None
    found = _id(vocabulary[text])
    if found is None:
        raise ModelError(f"{path}: vocab {text!r} = {vocabulary[text]!r} is no number")
    return found


def _listed(folder: Path) -> dict[str, int]:
    """The added tokens of `tokenizer_config.json`, and their ids.

    Raises:
        ModelError: the file holds no such table.
    """
    path = folder / "tokenizer_config.json"
    added = read_object(path).get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(
        number.isdecimal() and isinstance(entry, dict) for number, entry in added.items()
    ):
        raise ModelError(f"{path}: 'added_tokens_decoder' has no tokens by their ids")
    return {
        text: int(number)
        for number, entry in added.items()
        if isinstance(text := entry.get("content"), str)
    }


def _id(value: Any) -> int | None:
    return value if isinstance(value, int) else None
