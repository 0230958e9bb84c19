"""The disk tier of a split model: a block counts as read when each process has read its part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.cache.disk_tier import DiskTier, PendingRead
from quire.cache.host_block import HostBlock
from quire.core.config import DiskConfig
from quire.device.ranks import Part
from quire.engine.split_disk import FollowingDisk, Report, SplitDisk, rank_disk
from tests.support.waiting import HANG_S, wait_until

KEYS = (b"a", b"b")


def block(number: int) -> HostBlock:
    return (("float32", np.full((1, 4), number, np.float32)),)


@dataclass
class Ranks:
    """Tiers of two ranks in one process.

    Attributes:
        held: reports that the leading rank has not heard yet, while `mute`.
    """

    folder: Path
    mute: bool = False

    def __post_init__(self) -> None:
        self.held: list[Report] = []
        disk, loaded = (
            DiskConfig(str(self.folder), 16 << 20),
            SimpleNamespace(path="", layers_by_rank=()),
        )
        own, other = (
            rank_disk(disk, loaded, "model", part=Part(rank, 2), beside=2)  # type: ignore[arg-type]
            for rank in (0, 1)
        )
        self.follower = FollowingDisk(DiskTier(*other), self._report)
        self.leader = SplitDisk(*own, followers=1, tell=self._tell)
        self.leader.wait_open(HANG_S)

    def write(self, *ranks: int) -> None:
        """Write the blocks of `KEYS` on some ranks."""
        for number, key in enumerate(KEYS):
            for rank in ranks:
                (self.leader, self.follower)[rank].spill(key, block(10 * rank + number))
        for tier in (self.leader, self.follower._tier):
            assert tier.drain(HANG_S)

    def read(self) -> PendingRead:
        read = self.leader.read(KEYS)
        wait_until(lambda: read.done or (self.mute and self.held))
        return read

    def _tell(self, method: str, *arguments: Any) -> None:
        attrgetter(method.removeprefix("disk."))(self.follower)(*arguments)

    def _report(self, report: Report) -> None:
        if self.mute:
            self.held.append(report)
        else:
            self.leader.heard(report)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.leader.close()


def test_each_rank_reads_its_own_part(ranks: Ranks) -> None:
    ranks.write(0, 1)
    read = ranks.read()
    assert {key: float(each[0][1][0, 0]) for key, each in read.blocks.items()} == {b"a": 0, b"b": 1}
    assert [float(ranks.follower.block(key)[0][1][0, 0]) for key in KEYS] == [10, 11]


def test_a_read_awaits_every_rank(ranks: Ranks) -> None:
    ranks.write(0, 1)
    ranks.mute = True
    read = ranks.read()
    assert not read.done
    ranks.leader.heard(ranks.held.pop())
    wait_until(lambda: read.done)
    assert read.blocks.keys() == set(KEYS)


def test_blocks_of_which_a_rank_lost_its_part_are_written_again(ranks: Ranks) -> None:
    ranks.write(0)
    assert ranks.read().blocks == {}
    wait_until(lambda: not any(key in ranks.leader for key in KEYS))
    assert ranks.leader.accepts(KEYS[0], 16)
    ranks.write(0, 1)
    assert ranks.read().blocks.keys() == set(KEYS)


def test_blocks_that_only_followers_have_are_not_read(ranks: Ranks) -> None:
    ranks.write(1)
    assert ranks.read().blocks == {}


def test_a_follower_drops_blocks_that_nobody_waits_for(ranks: Ranks) -> None:
    ranks.write(0, 1)
    read = ranks.read()
    ranks.leader.forget_unused()
    assert len(ranks.follower._reads) == 1
    del read
    ranks.leader.forget_unused()
    assert ranks.follower._reads == {}


def test_parts_of_other_splits_are_not_mixed(tmp_path: Path) -> None:
    """Folder and fingerprint say which part of which split a process has."""
    disk = DiskConfig(str(tmp_path), 64)
    whole, cut = (
        SimpleNamespace(path="", layers_by_rank=each) for each in ((), (range(1), range(1, 2)))
    )
    found = [
        rank_disk(disk, loaded, "model", part=Part(rank, size), beside=2)  # type: ignore[arg-type]
        for loaded, rank, size in ((whole, 0, 2), (whole, 1, 2), (whole, 0, 4), (cut, 0, 2))
    ]
    assert len({fingerprint for _, fingerprint, _ in found}) == 4
    assert {own.max_bytes for own, _, _ in found} == {32}
    assert [Path(own.path).name for own, _, _ in found[:3]] == [
        "rank-0-of-2",
        "rank-1-of-2",
        "rank-0-of-4",
    ]
