"""The kernels are held against MLX once a process, however many engines it opens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from quire.core.errors import ModelError
from quire.device.cpu import kernels
from quire.device.device import CPU


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
        with pytest.raises(
            ModelError,
            match=rf"sse9 is not available on this processor or in this build; available: {best}",
        ):
            kernels.load_kernels(1, "sse9")
        with pytest.raises(kernels.NoKernels, match="switched off"):
            kernels.load_kernels(1, "off")
    finally:
        compiled.use("")


def test_the_start_says_in_one_line_what_computes(
    compiled: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = CPU()
    with caplog.at_level("INFO", logger="quire.device"):
        device.choose_products("auto", threads=1)
        best = compiled.instruction_sets()[0]
        assert [each.message for each in caplog.records] == [
            f"CPU kernels: {best}, 1 thread (as set)"
        ]
        caplog.clear()
        device.choose_products("auto", threads=1, activation_bits=8)
        assert [each.message for each in caplog.records] == [
            f"CPU kernels: {best}, activations of 8 bits, 1 thread (as set)"
        ]
        caplog.clear()
        # As in a process of an installation without a compiler.
        monkeypatch.setattr(kernels, "_extension", kernels._extension.__wrapped__)
        monkeypatch.setattr(kernels, "TARGET", tmp_path / "none")
        monkeypatch.setattr(kernels.importlib, "import_module", _no_module)
        device.choose_products("auto")
        device.choose_products("mlx")
    (said,) = caplog.records
    assert said.levelname == "WARNING"
    assert said.message == (
        "the CPU kernels were not built, so steps take about twice as long: "
        "install a C++ compiler (g++ or clang++), then reinstall Quire without "
        "QUIRE_BUILD_KERNELS=off"
    )


def test_stale_kernels_say_how_to_rebuild_them(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "sources_digest", lambda: "other")
    with pytest.raises(
        kernels.NoKernels,
        match=r"built from other sources, so .*: reinstall Quire, or run `just kernels`",
    ):
        kernels._extension.__wrapped__()


def _no_module(name: str) -> NoReturn:
    raise ImportError(name)
