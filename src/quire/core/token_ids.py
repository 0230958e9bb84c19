"""The id of a token by its text, from a tokenizer's files, without the tokenizer."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError
from quire.core.folder import read_object


class TokenFiles:
    """The files of a folder that name tokens. Each is read once, at first use."""

    def __init__(self, folder: Path) -> None:
        self.config_file = folder / "tokenizer_config.json"
        self._folder = folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """`tokenizer_config.json`.

        Raises:
            ModelError: it cannot be read.
        """
        return read_object(self.config_file)

    @cached_property
    def _tokenizer(self) -> dict[str, Any]:
        return read_object(self._folder / "tokenizer.json")

    def id_of(self, text: str, *, ordinary: bool = False) -> int | None:
        """Return the id of an added token; None if no file has it.

        Args:
            ordinary: whether to search the vocabulary itself, too.

        Raises:
            ModelError: a file's table is malformed; names the file.
        """
        listed = self._listed().get(text)
        if listed is None:
            listed = _id(read_object(self._folder / "added_tokens.json").get(text))
        if listed is not None:
            return listed
        path, whole = self._folder / "tokenizer.json", self._tokenizer  # last: it may be large
        entries = whole.get("added_tokens") or []
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and _id(entry.get("id")) is not None for entry in entries
        ):
            raise ModelError(f"{path}: 'added_tokens' is not a list of tokens and their ids")
        for entry in entries:
            if entry.get("content") == text:
                return _id(entry["id"])
        model = whole.get("model")
        vocabulary = model.get("vocab") if ordinary and isinstance(model, dict) else None
        if not isinstance(vocabulary, dict) or vocabulary.get(text) is None:
            return None
        found = _id(vocabulary[text])
        if found is None:
            raise ModelError(f"{path}: vocab {text!r} = {vocabulary[text]!r} is not a number")
        return found

    def _listed(self) -> dict[str, int]:
        """Return the added tokens of `tokenizer_config.json`, and their ids.

        Raises:
            ModelError: the file holds no such table.
        """
        added = self.config.get("added_tokens_decoder") or {}
        if not isinstance(added, dict) or not all(
            number.isdecimal() and isinstance(entry, dict) for number, entry in added.items()
        ):
            raise ModelError(
                f"{self.config_file}: 'added_tokens_decoder' has no tokens by their ids"
            )
        return {
            text: int(number)
            for number, entry in added.items()
            if isinstance(text := entry.get("content"), str)
        }


def _id(value: Any) -> int | None:
    return value if isinstance(value, int) else None
