"""The store: its limit holds, and whatever happens to its file, no wrong byte comes out."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cache.disk_sql import StoreError, StoreFull
from quire.cache.disk_store import (
    MIN_BYTES,
    SQL_PAGE,
    DiskStore,
    clear,
)
from quire.cache.disk_usage import usage

MB = 1 << 20


def open_store(
    folder: Path, size: int = 64 * MB, model: str = "m", said: list[str] | None = None
) -> DiskStore:
    heard = said if said is not None else []
    return DiskStore(folder, size, model, f"models/{model}", heard.append)


def value(name: str, size: int) -> tuple[bytes, bytes]:
    """Return a key, and bytes that follow from it."""
    key = sha256(name.encode()).digest()[:25]
    return key, random.Random(name).randbytes(size)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@contextmanager
def watched(folder: Path) -> Iterator[list[int]]:
    """Yield the folder's size, looked at again and again meanwhile."""
    sizes: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.0005):
            with suppress(FileNotFoundError):
                sizes.append(folder_bytes(folder))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield sizes
    finally:
        done.set()
        thread.join()


# -- what it keeps -----------------------------------------------------------------------------


def test_values_come_back_after_a_restart_in_their_order_of_use(tmp_path: Path) -> None:
    kept = [value(str(n), 3000 * n) for n in range(1, 40)]
    store = open_store(tmp_path)
    store.put(kept)
    store.touch(kept[0][0])
    assert store.get(kept[5][0]) == kept[5][1]
    order = list(store._order)
    assert order[-2:] == [kept[0][0], kept[5][0]]
    store.close()
    store = open_store(tmp_path)
    assert list(store._order) == order
    assert all(store.get(key) == content for key, content in kept)
    store.close()


operations = st.lists(
    st.tuples(
        st.sampled_from(("put", "put", "get", "touch", "delete", "reopen")),
        st.integers(0, 25),
        st.integers(0, 700_000),
    ),
    max_size=30,
)


@settings(max_examples=50, deadline=None)
@given(operations)
def test_least_recently_used_goes_first_and_the_limit_holds(
    steps: list[tuple[str, int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = open_store(folder, MIN_BYTES)
        truth: dict[bytes, bytes] = {}  # everything put and not deleted, least recently used first
        for step, number, size in steps:
            key = sha256(bytes([number])).digest()
            if step == "put" and key not in store:
                truth.pop(key, None)
                truth[key] = random.Random(size).randbytes(size)
                store.put([(key, truth[key])])
                assert key in store
            elif step == "get" and key in store:
                assert store.get(key) == truth[key]
                truth[key] = truth.pop(key)
            elif step == "touch" and key in store:
                store.touch(key)
                truth[key] = truth.pop(key)
            elif step == "delete":
                store.delete([key])
                truth.pop(key, None)
            elif step == "reopen":
                store.close()
                store = open_store(folder, MIN_BYTES)
            assert list(store._order) == list(truth)[len(truth) - len(store) :]
            assert folder_bytes(folder) <= MIN_BYTES
            free = MIN_BYTES - sum(map(len, truth.values()))
            if free > 120 * SQL_PAGE + 40 * SQL_PAGE:  # the journal's share, and rounding
                assert len(store) == len(truth), "something went though there was room"
            truth = {key: truth[key] for key in list(store._order)}
        stored = {m.fingerprint: m for m in usage(folder)}
        if truth:
            assert stored["m"].blocks == len(truth)
            assert stored["m"].bytes == sum(map(len, truth.values()))
        store.close()


def test_the_folder_never_exceeds_its_limit_while_it_is_written(tmp_path: Path) -> None:
    rng = random.Random(3)
    limit = 6 * MB
    store = open_store(tmp_path, limit)
    with watched(tmp_path) as sizes:
        for number in range(60):
            batch = [value(f"{number}.{n}", rng.choice((500, 9000, 90_000))) for n in range(12)]
            looked = len(sizes)
            store.put(batch)
            for key in rng.sample(list(store._order), min(8, len(store))):
                store.get(key)
            while len(sizes) == looked:  # at least once for each batch
                time.sleep(0.0005)
    store.close()
    assert max(sizes) > 0.6 * limit
    assert max(sizes) <= limit


def test_a_lower_limit_deletes_the_least_recently_used_and_says_so(tmp_path: Path) -> None:
    kept = [value(str(n), 200_000) for n in range(60)]
    store = open_store(tmp_path, 20 * MB)
    store.put(kept)
    order = list(store._order)
    store.close()
    assert folder_bytes(tmp_path) > 12_000_000
    said: list[str] = []
    store = open_store(tmp_path, 6 * MB, said=said)
    assert folder_bytes(tmp_path) <= 6 * MB
    assert 10 <= len(store) < 30
    assert list(store._order) == order[-len(store) :]
    assert f"{60 - len(store)} blocks" in said[0]
    contents = dict(kept)
    assert all(store.get(key) == contents[key] for key in list(store._order))
    store.close()


def test_a_limit_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="kv-disk-size"):
        open_store(tmp_path, MIN_BYTES - 1)


def test_a_value_larger_than_the_limit_is_left_out(tmp_path: Path) -> None:
    store = open_store(tmp_path, MIN_BYTES)
    small, large = value("small", 1000), value("large", MIN_BYTES)
    store.put([small, large])
    assert small[0] in store
    assert large[0] not in store
    store.close()


def test_models_are_told_apart_and_cleared_apart(tmp_path: Path) -> None:
    for model, count in (("a", 5), ("b", 3)):
        store = open_store(tmp_path, model=model)
        store.put([value(f"{model}{n}", 100_000) for n in range(count)])
        store.get(value(f"{model}0", 0)[0])
        store.close()
    table = {m.fingerprint: (m.name, m.blocks, m.bytes, m.hits) for m in usage(tmp_path)}
    assert table == {"a": ("models/a", 5, 500_000, 1), "b": ("models/b", 3, 300_000, 1)}
    size = folder_bytes(tmp_path)
    assert clear(tmp_path, "a") == 5
    assert [m.fingerprint for m in usage(tmp_path)] == ["b"]
    assert folder_bytes(tmp_path) < size - 400_000
    assert clear(tmp_path) == 3
    assert usage(tmp_path) == []


def test_another_models_value_is_never_served(tmp_path: Path) -> None:
    """Even under the same key: the checksum covers the model."""
    store = open_store(tmp_path, model="a")
    key, content = value("x", 5000)
    store.put([(key, content)])
    store.close()
    store = open_store(tmp_path, model="b")
    assert key in store
    assert store.get(key) is None
    assert key not in store
    store.close()


# -- what may happen to it ---------------------------------------------------------------------


def filled(folder: Path) -> dict[bytes, bytes]:
    rng = random.Random(1)
    kept = [value(str(n), rng.choice((200, 5000, 60_000))) for n in range(120)]
    store = open_store(folder)
    store.put(kept)
    store.close()
    return dict(kept)


def nothing_wrong_comes_out(folder: Path, truth: dict[bytes, bytes]) -> int:
    """Opens a store whatever its state, reads all and writes; how many values survived."""
    store = open_store(folder)
    sound = 0
    for key, content in truth.items():
        got = store.get(key)
        assert got is None or got == content
        sound += got is not None
    new = [value(f"new{n}", 30_000) for n in range(30)]
    store.put(new)
    store.put(new)  # what a rebuild in between took away
    assert all(store.get(key) == content for key, content in new)
    store.close()
    return sound


def test_flipped_bits_anywhere_cost_pages_and_nothing_else(tmp_path: Path) -> None:
    truth = filled(tmp_path / "sound")
    raw = (tmp_path / "sound" / "pages.sqlite").read_bytes()
    rng = random.Random(7)
    survivors = []
    for trial in range(24):
        folder = tmp_path / str(trial)
        folder.mkdir()
        damaged = bytearray(raw)
        # Half the trials hit anywhere, half the heads of SQLite's pages: trees, chains, free lists.
        for _ in range(12):
            page = rng.randrange(len(raw) // SQL_PAGE)
            at = page * SQL_PAGE + rng.randrange(SQL_PAGE if trial % 2 else 40)
            damaged[at] ^= 1 << rng.randrange(8)
        (folder / "pages.sqlite").write_bytes(damaged)
        survivors.append(nothing_wrong_comes_out(folder, truth))
        shutil.rmtree(folder)
    assert max(survivors) > 60, "a flipped bit must not cost everything"
    assert min(survivors) < len(truth)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9])
def test_a_truncated_file(tmp_path: Path, share: float) -> None:
    truth = filled(tmp_path)
    path = tmp_path / "pages.sqlite"
    os.truncate(path, int(path.stat().st_size * share))
    nothing_wrong_comes_out(tmp_path, truth)


def test_a_file_truncated_while_it_is_used(tmp_path: Path) -> None:
    truth = filled(tmp_path)
    store = open_store(tmp_path)
    os.truncate(tmp_path / "pages.sqlite", 5 * SQL_PAGE)
    for key, content in truth.items():
        assert store.get(key) in (None, content)
    store.put([value("after", 1000)])
    assert store.get(value("after", 0)[0]) is not None
    store.close()


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    (tmp_path / "pages.sqlite").write_bytes(b"not a database at all" * 1000)
    said: list[str] = []
    store = open_store(tmp_path, said=said)
    assert len(store) == 0
    assert "damaged" in said[0]
    store.close()


def test_another_version_is_emptied(tmp_path: Path) -> None:
    truth = filled(tmp_path)
    db = sqlite3.connect(tmp_path / "pages.sqlite")
    db.execute("PRAGMA user_version=99")
    db.close()
    store = open_store(tmp_path)
    assert not any(key in store for key in truth)
    store.close()


def test_a_file_that_fails_while_it_is_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[sqlite3.Connection] = []

    def open_read_only(path: Path) -> sqlite3.Connection:
        opened.append(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None))
        return opened[-1]

    sqlite3.connect(tmp_path / "pages.sqlite").close()
    monkeypatch.setattr("quire.cache.disk_file.connect", open_read_only)
    with pytest.raises(StoreError):
        open_store(tmp_path)
    (connection,) = opened
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


def test_a_second_process_is_refused_and_the_first_one_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    child = subprocess.run(
        [sys.executable, "-c", _OPEN, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert f"is in use by process {os.getpid()}" in child.stdout
    store.put([value("x", 10)])
    assert [m.blocks for m in usage(tmp_path)] == [1], "looking is allowed meanwhile"
    with pytest.raises(StoreError, match="in use"):
        clear(tmp_path)
    store.close()
    open_store(tmp_path).close()


_OPEN = """
import sys
from pathlib import Path
from quire.cache.disk_sql import StoreError
from quire.cache.disk_store import DiskStore
try:
    DiskStore(Path(sys.argv[1]), 64 << 20, "m", "m", print)
    print("opened")
except StoreError as error:
    print(error)
"""


def test_a_vanished_folder(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = open_store(folder)
    store.put([value("x", 10)])
    shutil.rmtree(folder)
    with pytest.raises(StoreError, match="vanished"):
        store.get(value("x", 0)[0])
    with pytest.raises(StoreError, match="vanished"):
        store.put([value("y", 10)])
    store.close()


@contextmanager
def mounted(folder: Path, size: int) -> Iterator[Path]:
    """Yield a file system of its own, of `size` bytes."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("only root may mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_full_disk(tmp_path: Path) -> None:
    """The store lives within what it has; when not even that is possible, it says so and waits."""
    with mounted(tmp_path / "disk", 10 * MB) as folder:
        said: list[str] = []
        store = open_store(folder, 64 * MB, said=said)
        truth = dict(value(str(n), 150_000) for n in range(120))
        for pair in truth.items():
            store.put([pair])
        assert "the disk is full" in said[0]
        assert 30 < len(store) < 70
        assert list(store._order) == list(truth)[-len(store) :]
        filler = folder / "filler"
        with pytest.raises(OSError, match="No space"):
            fill_up(filler)
        with pytest.raises(StoreFull):
            store.put([value(f"more{n}", 150_000) for n in range(80)])
        assert all(store.get(key) in (None, truth.get(key)) for key in truth)
        filler.unlink()
        store.put([value("last", 150_000)])
        assert store.get(value("last", 0)[0]) == value("last", 150_000)[1]
        store.close()


def test_a_read_only_folder(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 10 * MB) as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(StoreError, match="Read-only file system"):
            open_store(folder / "kv")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="Not a directory"):
        open_store(tmp_path / "file" / "kv")


# -- kill -9 -----------------------------------------------------------------------------------

_WRITE = """
import sys
from pathlib import Path
from tests.cache.test_disk_store import open_store, value
store = open_store(Path(sys.argv[1]), 6 << 20)
number = int(sys.argv[2])
while True:
    store.put([value(f"{number + n}", 1000 * (1 + (number + n) % 90)) for n in range(8)])
    print(number, flush=True)
    if number % 3 == 0:
        store.get(list(store._order)[0])
    number += 8
"""


def killed_while_writing(folder: Path, times: int) -> None:
    rng = random.Random(times)
    truth = dict(value(str(n), 1000 * (1 + n % 90)) for n in range(times * 1000))
    found = 0
    for round in range(times):
        command = [sys.executable, "-c", _WRITE, str(folder), str(round * 1000)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert child.stdout is not None
        for _ in range(rng.randrange(1, 40)):
            child.stdout.readline()
        time.sleep(rng.uniform(0, 0.02))  # in the midst of what comes next
        child.send_signal(signal.SIGKILL)
        child.wait()
        said: list[str] = []
        store = open_store(folder, 6 * MB, said=said)
        assert said == [], "a kill is no damage"
        assert folder_bytes(folder) <= 6 * MB
        for key in list(store._order):
            assert store.get(key) == truth[key]
            found += 1
        store.close()
    assert found > times


def test_killed_while_writing(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, 3)


@pytest.mark.slow
def test_killed_while_writing_again_and_again(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, 20)
