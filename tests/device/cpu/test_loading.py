"""The kernels are held against MLX once a process, however many engines it opens."""

from __future__ import annotations

from typing import Any

import pytest

from quire.device.cpu import kernels


def test_loaded_and_checked_once(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*_: object) -> bool:
        raise AssertionError("checked again")

    monkeypatch.setattr(kernels, "_multiplies", again)
    before = compiled.threads()
    loaded = kernels.load_kernels(threads=before)
    assert loaded.ops is compiled
    assert loaded.threads == before
