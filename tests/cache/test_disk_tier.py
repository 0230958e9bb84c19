"""The disk tier's thread: bounded, prompt, and never in the way."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from quire.cache import disk_sql, disk_tier
from quire.cache.disk_file import FILE
from quire.cache.disk_store import DiskStore
from quire.cache.disk_tier import DiskTier
from quire.cache.disk_usage import usage
from quire.cache.host_block import HostBlock, pack, unpack
from quire.core.config import DiskConfig
from tests.support.waiting import HANG_S, wait_until

MB = 1 << 20


def page(seed: int, size: int = 1000) -> HostBlock:
    rng = np.random.default_rng(seed)
    keys = rng.integers(0, 1 << 16, (2, size), dtype=np.uint16)
    return (("bfloat16", keys), ("float32", rng.random((3, 5), dtype=np.float32)))


def same(a: HostBlock, b: HostBlock) -> bool:
    return len(a) == len(b) and all(
        x[0] == y[0] and x[1].dtype == y[1].dtype and np.array_equal(x[1], y[1])
        for x, y in zip(a, b, strict=True)
    )


def tier(folder: Path, *, model: str = "m", queue_bytes: int = 64 * MB) -> DiskTier:
    opened = DiskTier(DiskConfig(str(folder), 64 * MB), model, model, queue_bytes=queue_bytes)
    opened.wait_open(HANG_S)
    return opened


def read(disk: DiskTier, *keys: bytes) -> dict[bytes, HostBlock]:
    reading = disk.read(keys)
    assert disk.drain(HANG_S)
    assert reading.done
    return reading.blocks


def test_a_page_as_bytes() -> None:
    empty = (("uint32", np.zeros((0, 4), np.uint32)), ("float16", np.ones((2, 2), np.float16)))
    for one in (page(1), empty):
        assert same(unpack(pack(one)), one)


def test_pages_are_found_again_after_a_restart(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    for n in range(30):
        assert disk.accepts(bytes([n]), 0)
        disk.spill(bytes([n]), page(n))
    disk.close()
    assert usage(tmp_path)[0].blocks == 30
    disk = tier(tmp_path)
    found = read(disk, *(bytes([n]) for n in range(40)))
    assert sorted(found) == [bytes([n]) for n in range(30)]
    assert all(same(found[bytes([n])], page(n)) for n in range(30))
    assert (disk.counters.hits, disk.counters.misses) == (30, 10)
    assert not disk.accepts(bytes([0]), 0), "it is there"
    disk.close()


def test_a_full_queue_drops_pages(tmp_path: Path) -> None:
    disk = tier(tmp_path, queue_bytes=100_000)
    assert not disk.accepts(b"large", 100_001)
    for n in range(200):
        disk.spill(n.to_bytes(2, "big"), page(n, 10_000))
    assert disk.drain(HANG_S)
    counters = disk.counters
    assert counters.written + counters.dropped == 201
    assert counters.dropped > 1
    assert counters.written >= 2
    assert read(disk, (0).to_bytes(2, "big")), "what came first was written"
    disk.close()


def test_after_the_folder_vanished_nothing_is_there_and_nothing_waits(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = tier(tmp_path / "kv")
    disk.spill(b"a", page(1))
    assert disk.drain(HANG_S)
    shutil.rmtree(tmp_path / "kv")
    with caplog.at_level(logging.WARNING):
        assert read(disk, b"a") == {}
    assert disk.failure is not None
    assert "vanished" in disk.failure
    assert b"a" not in disk
    assert not disk.accepts(b"b", 0)
    disk.spill(b"b", page(2))
    assert read(disk, b"b") == {}
    assert [each.name for each in caplog.records].count("quire.disk") == 1
    disk.close()


def test_an_unexpected_fault_ends_the_tier_and_no_request(tmp_path: Path) -> None:
    """A value that is sound and yet no page: only a fault of ours could write one."""
    store = DiskStore(tmp_path, 64 * MB, "m", "m", print)
    store.put([(b"odd", b"\xff\xff\x00\x00nonsense")])
    store.close()
    disk = tier(tmp_path)
    assert read(disk, b"odd") == {}
    assert disk.failure is not None
    disk.close()


def test_a_second_tier_on_the_folder(tmp_path: Path) -> None:
    first = tier(tmp_path)
    second = tier(tmp_path)
    assert second.failure == f"{tmp_path} is in use by process {os.getpid()}"
    assert read(second, b"a") == {}
    first.spill(b"a", page(1))
    assert first.drain(HANG_S)
    assert same(read(first, b"a")[b"a"], page(1))
    second.close()
    first.close()


def test_a_cancelled_read_ends_early(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    for n in range(5):
        disk.spill(bytes([n]), page(n))
    assert disk.drain(HANG_S)
    with disk._changed:  # the thread cannot take it before it is cancelled
        reading = disk.read(tuple(bytes([n]) for n in range(5)))
        reading.cancelled = True
    assert disk.drain(HANG_S)
    assert reading.done
    assert reading.blocks == {}
    disk.close()


def test_reading_is_estimated_from_what_was_read(tmp_path: Path) -> None:
    disk = tier(tmp_path)
    first = disk.seconds(50 * MB)
    disk._rate = 1e6
    slow = disk.seconds(50 * MB)
    assert slow > 10 * first
    for _ in range(200):
        disk.decline()
    assert disk.seconds(50 * MB) < 2 * first, "a slow spell is forgotten"
    disk.close()


def locked(folder: Path) -> sqlite3.Connection:
    """Return another process's exclusive lock of the file, until the connection is closed."""
    other = sqlite3.connect(folder / FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    return other


def test_a_lock_costs_misses_and_the_tier_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_sql, "WAIT_S", 0.01)
    now = 0.0
    disk = DiskTier(DiskConfig(str(tmp_path), 64 * MB), "m", "m", clock=lambda: now)
    assert disk.drain(HANG_S)
    disk.spill(b"before", page(1))
    assert disk.drain(HANG_S)
    other = locked(tmp_path)
    assert not read(disk, b"before", b"before")
    assert not read(disk, b"before"), "it is not tried again so soon"
    assert disk.counters.misses == 3
    disk.spill(b"meanwhile", page(2))
    assert disk.drain(HANG_S)
    assert (disk.failure, disk.counters.dropped) == (None, 1)
    other.close()
    now = 100.0
    assert same(read(disk, b"before")[b"before"], page(1))
    assert disk.accepts(b"after", 0)
    disk.spill(b"after", page(3))
    assert disk.drain(HANG_S)
    assert same(read(disk, b"after")[b"after"], page(3))
    assert disk.failure is None
    disk.close()


def test_a_file_that_is_locked_at_the_start_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_sql, "WAIT_S", 0.01)
    monkeypatch.setattr(disk_tier, "_BUSY_S", 0.01)
    disk = tier(tmp_path)
    disk.spill(b"before", page(1))
    disk.close()
    other = locked(tmp_path)
    disk = tier(tmp_path)
    assert disk.failure is None
    assert b"before" not in disk
    other.close()
    wait_until(lambda: b"before" in disk)
    assert same(read(disk, b"before")[b"before"], page(1))
    disk.close()


def test_permissions_that_are_lost_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tier(tmp_path)
    disk.spill(b"before", page(1))
    assert disk.drain(HANG_S)

    def lost(path: Path, **_: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", lost)  # whoever runs the tests may be root
        assert not read(disk, b"before")
    assert disk.failure is not None
    assert "Permission denied" in disk.failure
    disk.close()
    disk = tier(tmp_path)
    assert same(read(disk, b"before")[b"before"], page(1))
    disk.close()
