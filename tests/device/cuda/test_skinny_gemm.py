"""Products of few rows are cut among thread blocks, on cards of several sizes."""

from __future__ import annotations

from typing import Any

import pytest

from quire.device.cuda.driver import Card
from quire.device.cuda.router_cuts import shares_rows
from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.skinny_gemm import Cut, SkinnyGemm, takes_digits
from tests.device.cuda.cards import CARDS, H200, RTX_4090

ROWS = [1 << n for n in range(7)]
LINEAR = {
    "llama-3.1-8b": [(4096, 6144), (4096, 1024), (4096, 4096), (4096, 14_336), (14_336, 4096)],
    "gemma-4-31b": [
        *((5376, n) for n in (2048, 4096, 8192, 16_384, 18_432, 21_504)),
        *((n, 5376) for n in (8192, 16_384, 21_504)),
    ],
    "gemma-4-26b-a4b": [
        *((2816, n) for n in (128, 1024, 2048, 4096, 8192, 9216)),
        *((n, 2816) for n in (2112, 4096, 8192)),
    ],
    "qwen3-30b-a3b": [*((2048, n) for n in (128, 512, 4096, 5120)), (4096, 2048)],
    "heads": [(4096, 128_256), (2816, 262_144), (2048, 151_936), (5376, 262_144)],
    "of 53,248 columns": [(53_248, 16_384), (16_384, 53_248)],
}
"""Columns and rows of matrices."""
GATED = [(4096, 14_336), (5376, 21_504), (2816, 2112), (16_384, 53_248)]
EXPERTS = [(2816, 704), (2048, 768)]
CUTS = [
    *((each, False, False) for shapes in LINEAR.values() for each in shapes),
    *((each, True, False) for each in GATED),
    *((each, True, True) for each in EXPERTS),
    *((each[::-1], False, True) for each in EXPERTS),
]


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_a_thread_block_keeps_fits_the_card(card: Card, batch_invariant: bool) -> None:
    for (inputs, outputs), gated, experts in CUTS:
        for group_size in (64, 128):
            for rows in ROWS:
                kind = gated, experts, batch_invariant
                gemm = SkinnyGemm(inputs, outputs, group_size, rows, card, *kind)
                assert gemm.shared <= card.shared, gemm
                assert experts or gemm.blocks * gemm.tiles * 8 >= rows, gemm
                assert gemm.cut.stages >= 2, gemm


def test_an_h200_gets_the_cuts_that_were_measured_on_it() -> None:
    for (inputs, outputs), gated, experts in CUTS:
        if inputs < 50_000:
            for rows in ROWS:
                gemm = SkinnyGemm(inputs, outputs, 64, rows, H200, gated, experts)
                assert (gemm.tiles, gemm.cut) == next(gemm.cuts())
    assert SkinnyGemm(14_336, 4096, 64, 8, H200).cut == Cut(2, 16, 2, 2)
    assert SkinnyGemm(53_248, 4096, 64, 8, H200).cut == Cut(1, 16, 2, 2)
    assert SkinnyGemm(4096, 4096, 64, 8, RTX_4090).cut == Cut(1, 16, 1, 3)


def test_eight_rows_get_the_cuts_that_were_measured_on_an_h100() -> None:
    """Fewer stages or warps, where thread blocks of more do not fit a multiprocessor together."""

    def cut(inputs: int, outputs: int, *, gated: bool = False, rows: int = 8) -> Cut:
        return SkinnyGemm(inputs, outputs, 64, rows, H200, gated).cut

    assert cut(8192, 5120) == Cut(1, 4, 2, 4)
    assert cut(4096, 8192) == cut(14_336, 8192) == Cut(2, 8, 2, 2)
    assert cut(4096, 6144) == cut(8192, 8192) == cut(4096, 8192, rows=4) == Cut(2, 8, 2, 3)
    assert cut(8192, 10_240) == cut(28_672, 8192) == Cut(2, 4, 2, 3)
    assert cut(8192, 14_336, gated=True) == Cut(1, 4, 2, 2)
    assert cut(8192, 14_336, gated=True, rows=4) == Cut(1, 4, 2, 3)


def test_one_row_gets_the_cuts_that_were_measured_on_an_h100() -> None:
    def cut(inputs: int, outputs: int, *kind: bool) -> Cut:
        return SkinnyGemm(inputs, outputs, 64, 1, H200, *kind).cut

    assert cut(2816, 704, True, True) == Cut(1, 8, 2, 4)
    assert cut(704, 2816, False, True) == Cut(1, 4, 2, 4)
    assert cut(2880, 2880, True, True) == Cut(2, 8, 1, 2)
    assert cut(2880, 2880, False, True) == Cut(2, 8, 1, 3)
    assert cut(2816, 2112, True) == Cut(1, 8, 4, 3)
    assert cut(4096, 14_336, True) == Cut(1, 4, 4, 2)
    assert cut(4096, 6144) == cut(2816, 8192) == Cut(1, 8, 2, 2)
    assert cut(4096, 4096) == cut(8192, 2816) == Cut(1, 16, 4, 2)
    assert cut(14_336, 4096) == Cut(2, 16, 2, 2)
    assert cut(2816, 128) == Cut(1, 16, 2, 2)
    assert cut(2112, 2816) == Cut(1, 4, 2, 4)
    floats = SkinnyGemm(2880, 2880, 32, 1, H200, gated=True, experts=True, mode="mxfp4")
    assert floats.cut == Cut(2, 8, 1, 2)


def test_experts_get_the_cuts_that_were_measured_on_an_h200() -> None:
    def cut(inputs: int, outputs: int, rows: int, *, gated: bool = False, tile: int = 8) -> Cut:
        more = {"gated": gated, "experts": True, "tile": tile}
        return SkinnyGemm(inputs, outputs, 64, rows, H200, **more).cut

    assert cut(2816, 704, 32, gated=True) == cut(2048, 512, 8, gated=True) == Cut(2, 2, 2, 2)
    assert cut(704, 2816, 32) == Cut(4, 2, 1, 2)
    assert [cut(512, 2048, rows) for rows in (8, 32)] == [Cut(2, 2, 2, 2), Cut(4, 2, 2, 2)]
    assert cut(2880, 2880, 8, gated=True) == Cut(2, 4, 2, 2)
    assert cut(2880, 2880, 8) == Cut(4, 5, 1, 2)
    assert cut(2880, 2880, 64, tile=16) == Cut(4, 4, 1, 2)
    assert cut(2880, 2880, 64, gated=True, tile=16) == Cut(4, 4, 1, 2)
    assert cut(2880, 2880, 128, tile=24) == Cut(4, 4, 1, 2)
    assert cut(2880, 2880, 128, gated=True, tile=24) == Cut(2, 4, 1, 2)
    assert cut(2816, 704, 256, gated=True, tile=24) == Cut(2, 2, 2, 2)
    assert cut(704, 2816, 128, tile=16) == cut(704, 2816, 256, tile=24) == Cut(4, 1, 1, 4)
    assert cut(2880, 2880, 2, gated=True) == cut(2880, 2880, 4, gated=True) == Cut(1, 6, 2, 2)
    assert cut(2880, 2880, 4) == Cut(1, 4, 4, 2)


def test_32_rows_get_the_cuts_that_were_measured_on_an_h200() -> None:
    cuts = [SkinnyGemm(4096, outputs, 64, 32, H200).cut for outputs in (2048, 2816)]
    assert cuts == [Cut(1, 16, 1, 2), Cut(2, 8, 1, 2)]


def test_each_eight_rows_have_thread_blocks_of_a_router() -> None:
    """They copy whole rows at once. Measured on an H200."""

    def cut(inputs: int, outputs: int, rows: int, **more: int) -> tuple[int, int, Cut]:
        gemm = SkinnyGemm(inputs, outputs, 64, rows, H200, **more)
        return gemm.tiles, gemm.blocks, gemm.cut

    assert cut(2816, 128, 32) == (1, 4, Cut(1, 11, 2, 2))
    assert cut(2816, 128, 64) == (1, 8, Cut(1, 11, 2, 2))
    assert cut(2880, 32, 64, bits=16) == (1, 8, Cut(1, 15, 1, 3))
    assert not shares_rows(2816, 128, 16, H200)
    assert not shares_rows(2816, 128, 128, H200)
    assert not shares_rows(2816, 1024, 32, H200)
    assert not shares_rows(2048, 128, 32, H200)
    assert not shares_rows(2816, 128, 32, RTX_4090)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_heads_get_the_cut_that_was_measured_on_an_h100(rows: int) -> None:
    for inputs, outputs in LINEAR["heads"]:
        assert SkinnyGemm(inputs, outputs, 64, rows, H200).cut == Cut(2, 4, 4, 2)


def test_digits_of_one_row_get_the_cuts_that_were_measured() -> None:
    def cut(inputs: int, outputs: int, *kind: bool) -> Cut:
        return SkinnyGemm(inputs, outputs, 64, 1, H200, *kind, layout=RowLayout.DIGITS).cut

    assert cut(2816, 704, True, True) == Cut(1, 11, 4, 1)
    assert cut(704, 2816, False, True) == Cut(1, 3, 2, 2)
    assert cut(4096, 14_336, True, True) == Cut(1, 4, 4, 2)
    assert cut(4096, 14_336, True) == Cut(1, 8, 2, 2)
    assert cut(14_336, 4096, False, True) == Cut(2, 4, 4, 2)
    assert cut(2816, 2112, True) == Cut(2, 8, 2, 3)
    assert cut(4096, 2816) == Cut(2, 16, 4, 1)
    assert cut(2112, 2816) == Cut(2, 9, 4, 1)
    assert cut(8192, 2816) == Cut(2, 16, 4, 2)
    assert cut(14_336, 4096) == Cut(1, 14, 4, 2)
    assert cut(2048, 512, True) == cut(14_336, 2816) == Cut(1, 16, 4, 2)
    assert cut(2560, 3072) == Cut(1, 4, 4, 2)
    assert cut(2816, 8192) == cut(4096, 6144) == Cut(2, 8, 4, 2)
    assert cut(2816, 9216) == Cut(2, 11, 4, 1)
    assert cut(8192, 10_240) == Cut(2, 8, 2, 2)
    assert cut(4096, 4096) == Cut(2, 8, 4, 2)
    assert cut(2816, 128) == Cut(1, 8, 2, 3)


def test_digits_of_single_pairs_get_the_cuts_that_were_measured() -> None:
    def cut(inputs: int, outputs: int, *, gated: bool = False) -> Cut:
        own = {"gated": gated, "experts": True, "tile": 1}
        return SkinnyGemm(inputs, outputs, 64, 4, H200, layout=RowLayout.DIGITS, **own).cut

    assert cut(2816, 704, gated=True) == cut(2880, 2880, gated=True) == Cut(1, 3, 4, 2)
    assert cut(704, 2816) == Cut(2, 3, 4, 1)
    assert cut(2880, 2880) == Cut(2, 6, 2, 2)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("card", CARDS, ids=str)
def test_digits_of_single_rows_fit_the_card(card: Card, rows: int) -> None:
    for (inputs, outputs), gated, experts in CUTS:
        if rows == 1 or experts:
            more = {"layout": RowLayout.DIGITS, "tile": 1 if rows > 1 else 8}
            assert SkinnyGemm(inputs, outputs, 64, rows, card, gated, experts, **more).fits


def test_products_that_gain_by_it_keep_all_of_one_row() -> None:
    def keeps(inputs: int, outputs: int, rows: int = 1, **more: bool) -> bool:
        return SkinnyGemm(inputs, outputs, 64, rows, H200, **more).keeps_row

    assert keeps(2816, 2112, gated=True)
    assert keeps(2816, 704, gated=True, experts=True)
    assert keeps(704, 2816, experts=True)
    assert not keeps(2816, 2112, rows=2, gated=True)
    assert not keeps(4096, 14_336, gated=True)
    assert not keeps(4096, 4096)


def test_products_of_one_row_take_digits() -> None:
    def takes(rows: int, group_size: int = 64, **more: Any) -> bool:
        return takes_digits(SkinnyGemm(4096, 4096, group_size, rows, H200, **more))

    assert takes(1)
    assert takes(1, 128, gated=True)
    assert takes(1, experts=True)
    assert takes(4, experts=True, tile=1)
    assert not takes(2)
    assert not takes(1, group_size=32)
    assert not takes(1, batch_invariant=True)
    assert not takes(1, bits=8)
    assert not takes(1, mode="mxfp4")


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_tiles_of_experts_are_never_cut(card: Card) -> None:
    for tile in (8, 16):
        for inputs in (2880, 14_336):
            gemm = SkinnyGemm(inputs, 4096, 64, 64, card, gated=True, experts=True, tile=tile)
            assert (8 * gemm.tiles, gemm.fits) == (tile, True)


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_sums_are_added_up_alike_for_all_rows_where_they_must(card: Card) -> None:
    for (inputs, outputs), gated, experts in CUTS:
        cuts = {
            (gemm.cut.warps, gemm.cut.chunk)
            for rows in ROWS
            for gemm in [
                SkinnyGemm(inputs, outputs, 64, rows, card, gated, experts, batch_invariant=True)
            ]
        }
        assert len(cuts) == 1


def test_what_no_cut_makes_small_enough_does_not_fit() -> None:
    small = Card(132, 48 << 10)
    assert not SkinnyGemm(53_248, 16_384, 64, 8, small).fits
    assert SkinnyGemm(4096, 14_336, 64, 8, small).fits
    for inputs in range(1024, 100_000, 8192):  # so one check is enough for all rows
        for gated in (False, True):
            assert (
                len({SkinnyGemm(inputs, 9216, 64, n, small, gated).fits for n in (8, 16, 32, 64)})
                == 1
            )
