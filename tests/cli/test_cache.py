"""`quire cache` on a real folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cache.disk_store import DiskStore
from quire.cache.disk_usage import usage
from quire.cli import main
from quire.demo import MODEL_DIR, NAME


def fill(folder: Path, model: str, blocks: int) -> None:
    store = DiskStore(folder, 64 << 20, f"print-of-{model}", f"models/{model}", print)
    keys = [f"{model}{n}".encode() for n in range(blocks)]
    store.put([(key, bytes(10_000)) for key in keys])
    assert store.get(keys[0]) is not None
    store.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    fill(tmp_path, "small", 3)
    fill(tmp_path, "large", 40)
    return tmp_path


def run(*args: str) -> int:
    return main(["cache", *args])


def test_what_is_kept_by_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--kv-disk", str(folder)) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "models/" in line]
    assert {row[0]: row[2:6] for row in rows} == {
        "models/small": ["3", "30.0", "kB", "1"],
        "models/large": ["40", "400.0", "kB", "1"],
    }


def test_as_json_while_a_server_has_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = DiskStore(folder, 64 << 20, "print-of-small", "models/small", print)
    assert run("--kv-disk", str(folder), "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert {m["name"]: m["blocks"] for m in shown} == {"models/small": 3, "models/large": 40}
    assert run("--kv-disk", str(folder), "--clear") == 1
    assert "in use by process" in capsys.readouterr().err
    store.close()


@pytest.mark.parametrize("name", ["models/large", "print-of-l"])
def test_one_model_is_cleared(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run("--kv-disk", str(folder), "--clear", name) == 0
    assert capsys.readouterr().out.startswith("40 blocks deleted")
    assert [m.name for m in usage(folder)] == ["models/small"]


def test_everything_is_cleared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--kv-disk", str(folder), "--clear") == 0
    assert capsys.readouterr().out.startswith("43 blocks deleted")
    assert usage(folder) == []


@pytest.mark.parametrize(
    ("name", "problem"), [("nobody", "no model is"), ("print-of", "several models are")]
)
def test_a_name_that_is_not_one_models(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, problem: str
) -> None:
    assert run("--kv-disk", str(folder), "--clear", name) == 1
    assert problem in capsys.readouterr().err
    assert len(usage(folder)) == 2


@pytest.mark.parametrize("clear", [(), ("--clear",)])
def test_a_folder_without_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], clear: tuple[str, ...]
) -> None:
    assert run("--kv-disk", str(tmp_path), *clear) == 1
    assert f"{tmp_path} holds no cache of KV blocks" in capsys.readouterr().err
    assert run("--kv-disk", str(tmp_path / "none"), *clear) == 1
    assert f"{tmp_path / 'none'} does not exist" in capsys.readouterr().err


@pytest.mark.parametrize("asked", [NAME, str(MODEL_DIR)])
def test_the_embedded_model_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], asked: str
) -> None:
    store = DiskStore(tmp_path, 64 << 20, "print", str(MODEL_DIR), print)
    store.put([(b"key", bytes(10_000))])
    store.close()
    assert run("--kv-disk", str(tmp_path), "--json") == 0
    assert [each["name"] for each in json.loads(capsys.readouterr().out)] == [NAME]
    assert run("--kv-disk", str(tmp_path), "--clear", asked) == 0
    assert capsys.readouterr().out.startswith("1 blocks deleted")


def test_a_damaged_file_is_cleared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "pages.sqlite").write_bytes(b"something else")
    assert run("--kv-disk", str(folder)) == 1
    assert "damaged" in capsys.readouterr().err
    assert run("--kv-disk", str(folder), "--clear") == 0
    assert usage(folder) == []
