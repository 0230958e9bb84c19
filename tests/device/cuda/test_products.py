"""Products of packed weights by kernels of our own."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.device.cuda import driver, packed, products
from quire.device.cuda.codes import readable
from quire.device.cuda.driver import Card
from quire.device.cuda.packed import header
from quire.device.cuda.products import Kind, Products, difference_of
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.cuda.wide_gemm import WideGemm
from quire.device.gpu_kernels import Kernel, kernel_text
from quire.device.weights import PackedWeight, Packing
from tests.device.cuda.cards import CARDS, H200, RTX_3060, RTX_4090
from tests.support.emulated_products import products_emulated
from tests.support.everyday import everyday
from tests.support.nvrtc import assert_compiles
from tests.support.packings import FLOATS, MXFP4

FOUR_BITS, BYTES = Packing(64, 4, "affine"), Packing(64, 8, "affine")
PACKINGS = [Packing(32, 4, "affine"), FOUR_BITS, Packing(128, 4, "affine"), BYTES, *FLOATS]
KINDS = [
    Kind("gates"),
    *(Kind(name, each) for name in ("matrices", "gated experts", "experts") for each in PACKINGS),
]
DAILY = [
    (Kind("gates"), H200),
    (Kind("experts", FOUR_BITS), H200),
    (Kind("experts", MXFP4), RTX_3060),
]
"""Each packing, and each kind of card, once."""
GATED, DOWN = {"GATED": 1, "TOP": 8, "GELU": 1}, {"GATED": 0, "TOP": 1, "GELU": 0}
PRODUCT = (
    "const T* x, const int* x_shape, const unsigned* w, const int* w_shape, const T* scales,"
    "const T* biases, const unsigned* w_up, const T* scales_up, const T* biases_up,"
    "const int* order, const int* tiles, T* y"
)
SOURCES = [
    *(
        ("skinny_gemm.cuh", SkinnyGemm(n, 256, 64, 8, H200).defines | DOWN, PRODUCT)
        for n in (512, 704)
    ),
    *(
        (
            "skinny_gemm.cuh",
            SkinnyGemm(512, 256, 128, 8, H200, bool(more["GATED"]), True).defines | more,
            PRODUCT,
        )
        for more in (GATED, DOWN)
    ),
    *(
        (
            "wide_gemm.cuh",
            WideGemm(512, 256, 4, 64, 256, H200, bool(more["GATED"]), experts).defines | more,
            PRODUCT,
        )
        for more in (GATED, DOWN)
        for experts in (False, True)
    ),
    ("skinny_gemm.cuh", SkinnyGemm(512, 256, 64, 32, H200).defines | DOWN, PRODUCT),
    ("unpack.cuh", {"GROUP": 64, "GELU": 0}, PRODUCT),
    (
        "gate.cuh",
        {"GELU": 1},
        "const T* gate, const int* gate_shape, const T* up, T* y",
    ),
    (
        "group.cuh",
        {"EXPERT_COUNT": 128, "TILE": 64, "GELU": 0},
        "const unsigned* chosen, const int* chosen_shape, int* order, int* tiles",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "defines", "arguments"), SOURCES)
def test_sources_compile(
    name: str, defines: dict[str, int], arguments: str, tmp_path: Path
) -> None:
    body = kernel_text("quire.device.cuda", name)
    text = f'{header(defines)}extern "C" __global__ void kernel({arguments}) {{\n{body}}}\n'
    assert_compiles(text, tmp_path)


def packed_matrix(
    *shape: int, bits: int = 4, group_size: int = 64, dtype: mx.Dtype = mx.bfloat16
) -> PackedWeight:
    parts = mx.quantize(mx.random.normal(shape).astype(dtype), group_size=group_size, bits=bits)
    return PackedWeight(*parts, Packing(group_size, bits, "affine"))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (packed_matrix(32, 128), True),
        (packed_matrix(32, 128, group_size=128), True),
        (packed_matrix(4, 32, 128), True),
        (packed_matrix(32, 128, bits=8), True),
        (packed_matrix(32, 128, bits=6), False),
        (packed_matrix(32, 128, group_size=32), True),
        (packed_matrix(24, 128), False),
        (packed_matrix(32, 128, dtype=mx.float32), False),
    ],
)
def test_which_matrices_the_kernels_read(weight: PackedWeight, expected: bool) -> None:
    assert readable(weight) == expected


def test_without_a_gpu_mlx_multiplies() -> None:
    if mx.default_device() == mx.gpu:
        pytest.skip("needs a CPU")
    one = Products()
    assert one.linear(mx.zeros((4, 128), mx.bfloat16), packed_matrix(32, 128)) is None
    assert not any(map(one.sound, KINDS))


def test_products_that_do_not_fit_a_card_give_way(caplog: pytest.LogCaptureFixture) -> None:
    assert packed.fits(SkinnyGemm(4096, 4096, 64, 8, RTX_4090))
    assert not packed.fits(SkinnyGemm(53_248, 16_384, 64, 8, Card(132, 48 << 10)))
    assert "8 rows and 53248 columns use MLX's kernels" in caplog.text


def cut_for(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are cut as on another card."""

    monkeypatch.setattr(packed, "card", lambda: replace(card, warpgroups=False))
    for name in ("_cut", "wide_gemm"):
        monkeypatch.setattr(packed, name, getattr(packed, name).__wrapped__)


@pytest.mark.parametrize("card", CARDS, ids=str)
def test_the_check_asks_for_more_shared_memory_after_less(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models ask in this order, so that a failure is found before a step."""
    asked: dict[tuple[object, ...], list[int]] = {}

    def launch(
        *, output_shapes: list[tuple[int, ...]], output_dtypes: list[mx.Dtype], **_: Any
    ) -> list[mx.array]:
        return [mx.zeros(*each) for each in zip(output_shapes, output_dtypes, strict=True)]

    def kernel(*what: object, **_: object) -> Kernel:
        for gemm in (each for each in what if isinstance(each, SkinnyGemm)):
            asked.setdefault(tuple(gemm.defines.items()), []).append(gemm.shared)
        return launch

    for name in ("linear", "unpack", "gate", "expert", "wide", "group"):
        monkeypatch.setattr(packed, f"_{name}_kernel", kernel)
    cut_for(card, monkeypatch)
    monkeypatch.setattr(products, "_compared", lambda *_: None)
    assert [difference_of(each) for each in KINDS] == [None] * len(KINDS)
    more = [dict(what) for what, sizes in asked.items() if 48_000 < max(sizes) > sizes[0]]
    linear = {(each["TILES"], each["GROUP"]) for each in more if not each["EXPERTS"]}
    assert linear >= {(tiles, group) for tiles in (2, 4) for group in (64, 128)}
    assert any(each["EXPERTS"] and each["GATED"] for each in more)
    if card is H200:
        assert linear >= {(1, 64), (1, 128)}


@pytest.mark.parametrize(
    ("kind", "card"), everyday(product(KINDS, [H200, RTX_3060]), lambda *own: own in DAILY), ids=str
)
def test_emulated_kernels_agree_with_mlx(
    kind: Kind, card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_WIDE", 512)
    columns = {2048: (1, 9, 100), 512: (1, 9)}
    monkeypatch.setattr(products, "_COLUMNS_OF_EXPERTS", columns)
    with products_emulated(card):
        assert difference_of(kind) is None


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("card", CARDS, ids=str)
def test_kernels_agree_with_mlx(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    if card.shared > driver.card().shared:
        pytest.skip("cut for cards with more shared memory")
    cut_for(card, monkeypatch)
    assert [difference_of(each) for each in KINDS] == [None] * len(KINDS)
