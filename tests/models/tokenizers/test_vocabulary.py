"""Two vocabularies agree where they share ids; the first token that differs is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.models.tokenizers.vocabulary import Difference, vocabulary_difference


def write(folder: Path, vocab: Any, added: tuple[tuple[int, str], ...] = ()) -> Path:
    folder.mkdir()
    tokens = [{"id": id, "content": text} for id, text in added]
    whole = {"model": {"vocab": vocab}, "added_tokens": tokens}
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    return folder


def test_further_tokens_are_no_difference(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", {"a": 0, "b": 1}, ((2, "<end>"),))
    theirs = write(tmp_path / "b", [["a", -1.0], ["b", -2.0]])
    assert vocabulary_difference(ours, theirs) is None
    assert vocabulary_difference(ours, ours) is None
    assert vocabulary_difference(ours, tmp_path) is None  # nothing says that they differ


def test_the_first_token_that_differs_is_named(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", {"a": 0, "b": 1, "c": 2}, ((1, "<end>"),))
    theirs = write(tmp_path / "b", {"a": 0, "b": 1, "d": 2})
    assert vocabulary_difference(ours, theirs) == Difference(1, "<end>", "b")


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    ours = write(tmp_path / "a", {"a": 0})
    theirs = write(tmp_path / "b", [1, 2])
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        vocabulary_difference(ours, theirs)
