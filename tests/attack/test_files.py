"""Other users of the machine cannot read, plant or see Quire's files and keys."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cache.disk_sql import StoreError
from quire.cache.disk_store import DiskStore
from quire.device.private import unsafe, use_private_cache

COMPILE = """
import sys
from pathlib import Path
from quire.device.private import use_private_cache
if sys.argv[1:]:
    use_private_cache(Path(sys.argv[1]))
import mlx.core as mx
mx.set_default_device(mx.cpu)
print(mx.compile(lambda x: mx.exp(x) * 2 + 1)(mx.zeros((4,))).tolist())
"""
MODE = 0o777


def compiled(shared: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Return a process that compiles a kernel; `shared` is the machine's temporary directory."""
    environment = {**os.environ, "TMPDIR": str(shared)}
    command = [sys.executable, "-c", COMPILE, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(shutil.which("g++") is None, reason="MLX compiles with g++")
def test_a_planted_library_is_not_loaded(tmp_path: Path) -> None:
    shared, private = tmp_path / "tmp", tmp_path / "private"
    shared.mkdir()
    assert compiled(shared).stdout == "[3.0, 3.0, 3.0, 3.0]\n"
    planted = list(shared.rglob("*.so"))
    assert planted, "MLX keeps what it compiles elsewhere now"
    for library in planted:
        library.write_bytes(b"what another user put there")
    assert compiled(shared).returncode != 0, "it is loaded by whoever finds it"
    guarded = compiled(shared, str(private))
    assert guarded.stdout == "[3.0, 3.0, 3.0, 3.0]\n", guarded.stderr
    assert private.stat().st_mode & MODE == 0o700
    assert list(private.rglob("*.so"))


def test_a_folder_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TMPDIR", "MLX_PTX_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, "/tmp"))
    open_folder, link = tmp_path / "open", tmp_path / "link"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    link.symlink_to(open_folder)
    (tmp_path / "file").touch()
    for folder in (open_folder, link, tmp_path / "file", Path("/dev/null/x")):
        chosen = use_private_cache(folder)
        assert chosen != folder
        assert not unsafe(chosen)
        assert os.environ["TMPDIR"] == str(chosen)


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_kept_pages_are_for_their_owner_alone(tmp_path: Path, mask: int) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    (folder / "pages.sqlite").touch(0o644)
    before = os.umask(mask)
    try:
        store = DiskStore(folder, 8 << 20, "f", "m", print)
        store.put([(b"key", b"what somebody wrote")])
        modes = {path.name: path.stat().st_mode & MODE for path in folder.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert modes["pages.sqlite"] == modes["lock"] == 0o600
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_folder_that_others_can_write_keeps_no_pages(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(StoreError, match="is writable by other users"):
        DiskStore(tmp_path, 8 << 20, "f", "m", print)
    assert not list(tmp_path.iterdir())
    DiskStore(tmp_path / "new", 8 << 20, "f", "m", print).close()
    assert (tmp_path / "new").stat().st_mode & MODE == 0o700


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "kv").mkdir(mode=0o700)
    (tmp_path / "kv" / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(StoreError):
        DiskStore(tmp_path / "kv", 8 << 20, "f", "m", print)
    assert (tmp_path / "victim").read_text() == "precious"
