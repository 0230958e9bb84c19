"""The identity of weights depends on every byte, and is taken from an earlier start if it holds."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from quire.core.errors import ModelError
from quire.models.weights import identity
from quire.models.weights.identity import WeightIdentity
from quire.models.weights.loader import open_model
from tests.models.weights.test_adapter import make_adapter
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import tiny_model


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files of which pieces were hashed. All files count as large and long settled."""
    files: list[Path] = []
    original = WeightIdentity._hash_piece

    def noted(self: WeightIdentity, path: Path, start: int) -> bytes:
        files.append(path)
        return original(self, path, start)

    monkeypatch.setattr(WeightIdentity, "_hash_piece", noted)
    monkeypatch.setattr(identity, "_KEPT_FROM_BYTES", 0)
    monkeypatch.setattr(identity, "_SETTLED_NS", -1)
    return files


def _identity(folder: Path, *files: Path) -> str:
    with WeightIdentity(files, folder) as hashing:
        return hashing.digest(b"")


def _flip(file: Path, at: int) -> None:
    """Changes one byte in place, and leaves the time of the last write as it was."""
    before = file.stat()
    with file.open("r+b") as content:
        content.seek(at)
        (byte,) = content.read(1)
        content.seek(at)
        content.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("at", [0, 5_000, (16 << 20) - 1, 16 << 20, (40 << 20) - 1])
def test_each_byte_counts(at: int, tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(40 << 20))
    before = _identity(tmp_path, file)
    assert _identity(tmp_path, file) == before
    _flip(file, at)
    assert _identity(tmp_path, file) != before


def test_order_and_bounds_of_files_count(tmp_path: Path) -> None:
    contents = {"a": b"xy", "b": b"z", "c": b"x", "d": b"yz", "e": b""}
    files = {name: tmp_path / name for name in contents}
    for name, content in contents.items():
        files[name].write_bytes(content)
    sets = ("ab", "ba", "cd", "abe", "eab", "a", "")
    assert len({_identity(tmp_path, *map(files.get, names)) for names in sets}) == len(sets)


def test_a_known_file_is_not_hashed_again(hashed: list[Path], tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(os.urandom(1000))
    first = _identity(tmp_path / "kept", *files)
    assert sorted(hashed) == files
    hashed.clear()
    assert _identity(tmp_path / "kept", *files) == first
    assert not hashed


@pytest.mark.parametrize("change", ["in place", "size", "another file", "moved back"])
def test_a_changed_file_is_hashed_again(change: str, hashed: list[Path], tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    file.write_bytes(bytes(1000))
    first = _identity(tmp_path / "kept", file)
    hashed.clear()
    match change:
        case "in place":
            _flip(file, 999)
        case "size":
            file.write_bytes(bytes(1001))
        case "another file":
            other.write_bytes(bytes(999) + b"1")
            shutil.copystat(file, other)
            other.replace(file)
        case "moved back":
            shutil.copy2(file, other)
            other.replace(file)
    assert (_identity(tmp_path / "kept", file) == first) is (change == "moved back")
    assert hashed == [file]


def test_a_file_that_was_just_written_is_not_kept(
    hashed: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_SETTLED_NS", 3_600_000_000_000)
    file = tmp_path / "a"
    file.write_bytes(bytes(1000))
    for _ in range(2):
        _identity(tmp_path / "kept", file)
    assert hashed == [file, file]


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', '{"x": {}}', "\0"])
def test_damaged_notes_cost_time_only(content: str, hashed: list[Path], tmp_path: Path) -> None:
    file, kept = tmp_path / "a", tmp_path / "kept"
    file.write_bytes(bytes(1000))
    kept.mkdir()
    (kept / "weight-hashes.json").write_text(content.replace("x", str(file)))
    first = _identity(kept, file)
    assert hashed == [file]
    assert _identity(kept, file) == first
    assert hashed == [file]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(bytes(1000))
    with WeightIdentity([file], tmp_path) as hashing:
        time.sleep(0.01)  # a tick of the file system's clock
        _flip(file, 7)
        with pytest.raises(ModelError, match="changed while it was read"):
            hashing.digest(b"")


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "adapter"])
def test_one_changed_number_is_another_model(kind: str, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "model", "llama")
    adapter = make_adapter(tmp_path / "adapter") if kind == "adapter" else None
    file = folder / "model.safetensors"
    if kind == "gguf":
        file = tmp_path / "model.gguf"
        write_gguf(folder, file)
    elif adapter is not None:
        file = Path(adapter) / "adapter_model.safetensors"
    source = str(file if kind == "gguf" else folder)
    before = open_model(source, adapter=adapter).fingerprint
    assert open_model(source, adapter=adapter).fingerprint == before
    for at in (file.stat().st_size - from_end for from_end in (1, 100, 1000)):
        _flip(file, at)
        after = open_model(source, adapter=adapter).fingerprint
        assert after != before
        before = after
