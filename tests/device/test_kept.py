"""What is kept about kernels from one start to the next."""

from __future__ import annotations

from pathlib import Path

from quire.device.kept import Kept


def test_a_fact_holds_for_the_versions_that_it_was_found_with(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    kept = Kept(folder, "card 1, MLX 2")
    assert not kept.holds("attention agrees")
    kept.note("attention agrees")
    assert kept.holds("attention agrees")
    assert Kept(folder, "card 1, MLX 2").holds("attention agrees")
    assert not kept.holds("products agree")
    assert not Kept(folder, "card 1, MLX 3").holds("attention agrees")


def test_without_a_place_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for kept in (Kept(None, ""), Kept(tmp_path / "file", "")):
        kept.note("attention agrees")
        assert not kept.holds("attention agrees")
