"""Files are read up to a size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.constraints.grammar import GrammarCompiler
from quire.core import folder
from quire.core.errors import ModelError
from quire.core.folder import read_object
from quire.core.limited_files import limited_lines, read_limited_bytes, read_limited_text
from quire.models.tokenizers.sentencepiece import read_sentencepiece
from quire.models.tokenizers.vocabulary import vocabulary_difference
from quire.text.tokenizer import Tokenizer

ZEROS = Path("/dev/zero")


def lines(path: Path, limit: int) -> list[bytes]:
    return list(limited_lines(path, limit))


@pytest.mark.parametrize("read", [read_limited_text, read_limited_bytes, lines])
def test_a_file_at_the_limit_is_read_and_a_larger_one_is_refused(
    tmp_path: Path, read: Callable[[Path, int], object]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"a" * (1 << 20))
    assert read(path, 1 << 20) in ("a" * (1 << 20), b"a" * (1 << 20), [b"a" * (1 << 20)])
    for larger in (path, ZEROS):
        with pytest.raises(OSError, match="is larger than the limit of 0 MiB"):
            read(larger, (1 << 20) - 1)


def test_lines_are_limited_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntwo\nthree")
    assert lines(path, 5) == [b"one\n", b"two\n", b"three"]


def test_a_model_folders_files_are_limited(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").symlink_to(ZEROS)
    with pytest.raises(ModelError, match=r"adapter_config.json: .*limit of 256 MiB"):
        read_object(tmp_path / "adapter_config.json")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("tokenizer.json", lambda file: Tokenizer.open(file.parent)),
        ("tokenizer.json", lambda file: GrammarCompiler(file, 10, frozenset({1}))),
        ("tokenizer.json", lambda file: vocabulary_difference(file.parent, file.parent)),
        ("tokenizer.model", read_sentencepiece),
    ],
)
def test_a_tokenizers_file_is_limited(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    read: Callable[[Path], object],
) -> None:
    monkeypatch.setattr(folder, "TEXT_BYTES", 1 << 20)
    with (tmp_path / name).open("wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(ModelError, match=f"cannot read .*{name}.*limit of 1 MiB"):
        read(tmp_path / name)
