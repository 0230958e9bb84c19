"""Folders of the disk tier for replicas that share a machine."""

from __future__ import annotations

from pathlib import Path

from quire.core.config import DiskConfig
from quire.scale.disk import OwnFolder


def test_each_replica_has_a_folder_and_takes_over_that_of_one_that_ended(tmp_path: Path) -> None:
    whole = DiskConfig(str(tmp_path / "kv"), 100)
    first, second = OwnFolder(whole, 4), OwnFolder(whole, 4)
    assert [Path(each.disk.path).name for each in (first, second)] == ["replica-0", "replica-1"]
    assert first.disk.max_bytes == 25
    assert first.disk.neighbours
    first.close()
    third = OwnFolder(whole, 4)
    assert third.disk.path == first.disk.path
    second.close()
    third.close()
