"""Resource limits and memory of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from quire.core.processes import ForkedProcess, wait_or_kill

LIMITED = """
import resource
from quire.core.processes import allow_many_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_many_descriptors()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


FROZEN = """
import gc
from quire.core.processes import freeze_heap
held = [[] for _ in range(3000)]
freeze_heap()
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
held += [[] for _ in range({objects})]
print(gc.get_freeze_count() > 3000, bool(collections))
"""


@pytest.mark.parametrize(("objects", "collected"), [(5_000, False), (20_000, True)])
def test_a_frozen_heap_is_collected_seldom(objects: int, collected: bool) -> None:
    code = FROZEN.format(objects=objects)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == f"True {collected}"


@pytest.mark.parametrize(("soft", "hard", "then"), [(100, 300, (300, 300)), (300, 300, (300, 300))])
def test_as_many_files_as_the_system_allows(soft: int, hard: int, then: tuple[int, int]) -> None:
    code = LIMITED.format(soft=soft, hard=hard)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == str(then)


def forked(work: Callable[[], int]) -> ForkedProcess:
    """Return a child that does `work`, and ends with its result as status."""
    pid = os.fork()
    if pid == 0:
        os._exit(work())
    return ForkedProcess(pid)


def sleep() -> int:
    signal.pause()
    return 0


def test_a_fork_is_waited_for_like_a_program() -> None:
    ended, running = forked(lambda: 7), forked(sleep)
    assert (ended.wait(), ended.wait(), ended.poll()) == (7, 7, 7)
    ended.kill()  # does nothing
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0)
    assert running.poll() is None
    wait_or_kill(running, 0)
    assert running.poll() == -signal.SIGKILL
