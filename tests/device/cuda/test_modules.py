"""Kernels of MLX are compiled in processes while a model is read."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.device.cuda import modules
from quire.device.cuda.modules import OPERATIONS, ModuleProcesses, main
from quire.device.private import CACHE
from quire.device.verified import VerifiedKernels

GB = 1 << 30


class _Process:
    """Stands in for a process; `exits` is its status, None if it never ends."""

    started: list[_Process]

    def __init__(self, command: list[str], exits: int | None) -> None:
        self.names, self.returncode, self._exits = command[4:], None, exits
        self.dtype = command[3]
        self.killed = False

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        if self._exits is None:
            raise modules.subprocess.TimeoutExpired("", timeout)
        self.returncode = self._exits
        return b"", b"CUDA error"

    def wait(self, timeout: float | None = None) -> int:
        if not self.killed:
            raise modules.subprocess.TimeoutExpired("", timeout or 0)
        self.returncode = -9
        return -9

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> VerifiedKernels:
    found = VerifiedKernels(tmp_path / "verified", "")
    monkeypatch.setattr(modules, "verified_kernels", lambda: found)
    monkeypatch.setattr(modules, "kernel_folder", lambda: tmp_path)
    monkeypatch.setattr(modules.os, "cpu_count", lambda: 16)
    return found


def processes(monkeypatch: pytest.MonkeyPatch, exits: int | None = 0) -> list[_Process]:
    """Return the processes started from now on."""
    started: list[_Process] = []

    def popen(command: list[str], **_: Any) -> _Process:
        assert command[:3] == [sys.executable, "-m", "quire.device.cuda.modules"]
        started.append(_Process(command, exits))
        return started[-1]

    monkeypatch.setattr(modules.subprocess, "Popen", popen)
    return started


@pytest.mark.parametrize(("memory", "count"), [(40 * GB, len(OPERATIONS)), (3 * GB, 3), (GB, 0)])
def test_operations_are_shared_by_as_many_processes_as_fit(
    memory: int, count: int, verified: VerifiedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = processes(monkeypatch)
    with ModuleProcesses() as own:
        own.start(mx.bfloat16, memory)
    assert len(started) == count
    assert {each.dtype for each in started} <= {"bfloat16"}
    names = [name for each in started for name in each.names]
    assert sorted(names) == (sorted(OPERATIONS) if count else [])


def test_a_second_start_compiles_nothing(
    verified: VerifiedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, count = processes(monkeypatch), len(OPERATIONS)
    for dtype in (mx.bfloat16, mx.bfloat16, mx.float16):
        with ModuleProcesses() as own:
            own.start(dtype, 40 * GB)
    assert [each.dtype for each in started] == count * ["bfloat16"] + count * ["float16"]


@pytest.mark.parametrize("exits", [1, None])
def test_a_process_that_fails_or_hangs_delays_only_its_kernels(
    exits: int | None, verified: VerifiedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = processes(monkeypatch, exits)
    monkeypatch.setattr(modules, "_LONGEST_S", 0.0)
    for count in (len(OPERATIONS), 2 * len(OPERATIONS)):
        with ModuleProcesses() as own:
            own.start(mx.bfloat16, 40 * GB)
        assert len(started) == count, "the next start tries again"
    assert all(each.killed == (exits is None) for each in started)


def test_a_model_that_cannot_be_opened_leaves_no_process(
    verified: VerifiedKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = processes(monkeypatch, exits=None)

    def opened() -> None:
        with ModuleProcesses() as own:
            own.start(mx.bfloat16, 2 * GB)
            raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        opened()
    assert [each.killed for each in started] == [True, True]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_operation_can_be_computed(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    main(dtype, *OPERATIONS)
    assert not list(tmp_path.iterdir())


def test_kernels_appear_when_they_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path))
    seen: list[list[str]] = []
    replace = Path.replace

    def compiles(array: mx.array) -> mx.array:
        for suffix in ("ptx", "txt", "cu"):
            Path(os.environ[CACHE], f"gather.{suffix}").write_text("kernel")
        assert not list(tmp_path.glob("gather*"))
        return array

    def noted(path: Path, target: Path) -> Path:
        seen.append(sorted(each.suffix for each in tmp_path.glob("gather*")))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    monkeypatch.setattr(modules, "OPERATIONS", {"rows": (compiles, None)})
    main("bfloat16", "rows")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "gather.cu",
        "gather.ptx",
        "gather.txt",
    ]
    assert seen[-1] == [".cu", ".txt"], "the file that is looked for comes last"
