"""Emulated kernels are compiled once for all runs of the tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import emulated_libraries
from tests.support.emulated_libraries import compiled
from tests.support.emulated_metal import why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

SOURCE = 'extern "C" const char* run() { return ANSWER; }\n'
PARTS = ("emulated_metal.cpp",)


def test_a_later_run_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_libraries, "_KEPT", tmp_path)
    flags = ('-DANSWER="first"',)
    assert compiled(SOURCE, flags, PARTS)() == b"first"
    compiled.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert compiled(SOURCE, flags, PARTS)() == b"first"
    with pytest.raises(FileNotFoundError, match="g\\+\\+"):
        compiled(SOURCE, ('-DANSWER="second"',), PARTS)


def test_what_was_not_used_for_longest_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated_libraries, "_MOST_KEPT", 2)
    for name, used in (("old", 1), ("newest", 4), ("older", 0), ("new", 3)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (used, used))
    emulated_libraries._forget_oldest(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} == {"new", "newest"}
