"""The kernels are held against MLX once a process, however many engines it opens."""

from __future__ import annotations

from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.device.cpu import kernels


def test_loaded_and_checked_once(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object) -> bool:
        raise AssertionError("checked again")

    monkeypatch.setattr(kernels, "_multiplies", again)
    before = compiled.threads()
    loaded = kernels.load_kernels(threads=before)
    assert loaded.ops is compiled
    assert loaded.threads == before


def test_instructions_are_chosen_or_refused(compiled: Any) -> None:
    try:
        for name in compiled.instruction_sets():
            assert kernels.load_kernels(1, name).instructions == name
        best = kernels.load_kernels(1).instructions
        assert best == compiled.instruction_sets()[0]
        with pytest.raises(ModelError, match=rf"has no sse9; it has {best}"):
            kernels.load_kernels(1, "sse9")
        with pytest.raises(kernels.NoKernels, match="switched off"):
            kernels.load_kernels(1, "off")
    finally:
        compiled.use("")
