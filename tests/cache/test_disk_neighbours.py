"""Engines of one machine read each other's KV blocks from disk, and write each block once."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from quire.cache import disk_tier
from quire.cache.disk_file import FILE
from quire.cache.disk_neighbours import Neighbours
from quire.cache.disk_store import DiskStore
from quire.cache.disk_tier import DiskTier
from quire.core.config import DiskConfig
from tests.cache.test_disk_tier import MB, page, read, same
from tests.support.waiting import HANG_S, wait_until


def tier(whole: Path, number: int, model: str = "m") -> DiskTier:
    config = DiskConfig(str(whole / f"replica-{number}"), 64 * MB, neighbours=True)
    opened = DiskTier(config, model, model)
    assert opened.drain(HANG_S)
    return opened


def store(whole: Path, number: int, model: str = "m") -> DiskStore:
    return DiskStore(whole / f"replica-{number}", 64 * MB, model, model, pytest.fail)


def written(disk: DiskTier, *keys: bytes) -> None:
    for key in keys:
        assert disk.accepts(key, 0)
        disk.spill(key, page(key[0]))
    assert disk.drain(HANG_S)


def test_a_new_engine_starts_with_what_others_have_written(tmp_path: Path) -> None:
    first = tier(tmp_path, 0)
    written(first, b"a", b"b")
    second = tier(tmp_path, 1)
    assert b"a" in second
    found = read(second, b"a", b"b", b"c")
    assert sorted(found) == [b"a", b"b"]
    assert same(found[b"a"], page(ord("a")))
    assert (second.counters.hits, second.counters.misses) == (2, 1)
    first.close()
    second.close()


def test_a_block_has_one_writer(tmp_path: Path) -> None:
    first = tier(tmp_path, 0)
    written(first, b"a")
    second = tier(tmp_path, 1)
    assert not second.accepts(b"a", 0)
    assert second.counters.dropped == 0
    written(second, b"b")
    assert b"a" not in store_of(second)
    first.close()
    second.close()


def store_of(disk: DiskTier) -> DiskStore:
    assert disk._store is not None
    return disk._store


def test_what_is_written_later_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "_IDLE_FLUSH_S", 0.01)
    first, second = tier(tmp_path, 0), tier(tmp_path, 1)
    written(first, b"a")
    wait_until(lambda: b"a" in second)
    assert same(read(second, b"a")[b"a"], page(ord("a")))
    first.close()
    second.close()


def test_other_models_and_other_versions_are_not_read(tmp_path: Path) -> None:
    other = store(tmp_path, 0, model="other")
    other.put([(b"a", b"1")])
    old = store(tmp_path, 1)
    old.put([(b"b", b"1")])
    old.close()
    with sqlite3.connect(tmp_path / "replica-1" / FILE) as db:
        db.execute("PRAGMA user_version=1")
    neighbours = Neighbours(tmp_path / "replica-2", "m")
    neighbours.refresh()
    assert b"a" not in neighbours
    assert b"b" not in neighbours
    other.close()


def test_evicted_and_damaged_blocks_are_misses(tmp_path: Path) -> None:
    owner = store(tmp_path, 0)
    owner.put([(b"gone", b"1"), (b"torn", b"2"), (b"kept", b"3")])
    neighbours = Neighbours(tmp_path / "replica-1", "m")
    neighbours.refresh()
    owner.delete([b"gone"])
    with sqlite3.connect(tmp_path / "replica-0" / FILE) as db:
        db.execute("UPDATE bodies SET body = ? WHERE body = ?", (b"x", b"2"))
    assert [neighbours.get(key) for key in (b"gone", b"torn", b"kept")] == [None, None, b"3"]
    assert b"torn" not in neighbours
    assert owner.get(b"kept") == b"3"
    owner.close()


def test_a_file_that_was_made_anew_is_read_anew(tmp_path: Path) -> None:
    owner = store(tmp_path, 0)
    owner.put([(b"a", b"1")])
    neighbours = Neighbours(tmp_path / "replica-1", "m")
    neighbours.refresh()
    owner.close()
    (tmp_path / "replica-0" / FILE).rename(tmp_path / "old")
    owner = store(tmp_path, 0)
    owner.put([(b"b", b"2")])
    neighbours.refresh()
    assert (neighbours.get(b"a"), neighbours.get(b"b")) == (None, b"2")
    owner.close()
    (tmp_path / "replica-0" / FILE).write_bytes(b"no database" * 1000)
    neighbours.refresh()
    assert neighbours.get(b"b") is None
