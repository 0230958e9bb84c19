"""The kernels over codes of single tokens: emulated here, and on a GPU."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.backend import AttentionCase, Scoring
from quire.attention.metadata import build_metadata
from quire.attention.paged import TokensBackend, check, cuda, decoding, tokens
from quire.attention.paged.check import differs
from quire.attention.paged.portable_kernels import Codes
from quire.attention.paged.target import METAL, Target
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerShape
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from tests.attention.rows import HandRows
from tests.device.cuda.cards import H200
from tests.support import emulated_metal
from tests.support.emulated_cuda import emulate
from tests.support.emulated_metal import why_not
from tests.support.nvrtc import assert_compiles


def uniform(bits: int, group_size: int = 64) -> KVFormat:
    return KVFormat("uniform", bits, bits, group_size)


def turbo(bits: float) -> KVFormat:
    return KVFormat("turbo", bits, bits)


Row = tuple[KVFormat, AttentionSpec, int, bool]
"""A format, a layer, query heads of each KV head, and whether there are a cap and sinks."""

FEW: list[Row] = [(uniform(4), FullKV(1, 64), 4, False), (turbo(3.5), FullKV(1, 64), 3, True)]
MANY: list[Row] = [
    (uniform(4), FullKV(2, 64), 4, False),
    (uniform(4), FullKV(1, 128), 4, True),
    (uniform(8), FullKV(1, 128), 16, False),
    (uniform(4, 32), FullKV(1, 256), 2, False),
    (uniform(4), WindowKV(1, 256, 100), 8, True),
    (uniform(4), FullKV(1, 512), 8, False),
    (uniform(3), FullKV(1, 64), 4, False),
    (uniform(5, 32), FullKV(1, 64), 3, True),
    (uniform(6), FullKV(1, 128), 5, False),
    (uniform(2), FullKV(1, 128), 4, False),
    (uniform(8, 32), FullKV(1, 512), 8, False),
    (uniform(3, 32), FullKV(1, 256), 4, False),
    (turbo(4), FullKV(2, 64), 4, False),
    (turbo(3.5), FullKV(1, 128), 4, True),
    (turbo(3), WindowKV(1, 256, 100), 4, False),
    (turbo(2), FullKV(1, 512), 8, False),
    (turbo(4), FullKV(1, 512), 16, True),
    (turbo(2), FullKV(1, 64), 11, False),
]


def name(row: Row) -> str:
    format, spec, group, extras = row
    span = "all" if spec.sees_all else "window"
    return f"{format.name} {spec.kv_heads}x{group}-{spec.head_dim} {span}{' extras' * extras}"


def case(row: Row, dtype: mx.Dtype = mx.bfloat16) -> AttentionCase:
    format, spec, group, extras = row
    return AttentionCase(format, spec, 64, group * spec.kv_heads, 1, dtype, extras, extras)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> TokensBackend:
    """Return a backend whose kernels run here; those that join its parts do so as on a Mac."""
    monkeypatch.setattr(cuda, "cuda_kernel", emulate)
    portable = Target(METAL.name, METAL.positions, METAL.types, emulated_metal.emulate)
    monkeypatch.setattr(tokens, "CUDA", portable)
    monkeypatch.setattr(tokens, "card", lambda: H200)
    monkeypatch.setitem(check._TOLERANCE, mx.bfloat16, 6e-3)
    for made in (tokens._kernel, cuda._attend_kernel, decoding._kernel):
        made.cache_clear()
    decoding._sound.found.clear()
    return TokensBackend()


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("row", FEW, ids=name)
def test_sources_agree_with_the_reference(emulated: TokensBackend, row: Row) -> None:
    assert emulated.made_for(case(row))
    assert differs(emulated, case(row), check.SINGLE_ROWS[1:4]) is None


@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_values_of_any_length_are_added_up(emulated: TokensBackend) -> None:
    """Lengths of values multiply weights in float16: tiny, growing and falling ones."""
    format, spec, count = turbo(4), FullKV(1, 512), 250
    for exponents in ([-5, -5], [-4, 3], [3, -4]):
        lengths = 10 ** np.linspace(*exponents, count).astype(np.float32)
        k, v, q = (
            mx.random.normal((n, heads, 512), key=mx.random.key(n + heads))
            for n, heads in ((count, 1), (count, 1), (1, 4))
        )
        v *= mx.array(lengths)[:, None, None]
        store = make_store(LayerShape.of(spec, 64, mx.bfloat16), format)
        store.resize(4, ())
        table = (range(4),)
        before, row = (
            build_metadata(0, spec, [HandRows(start, rows, format, table)], 64)
            for start, rows in ((0, count), (count - 1, 1))
        )
        store.write(k.astype(mx.bfloat16), v.astype(mx.bfloat16), before.slots)
        expected, got = (
            each.prepare(row).forward(q.astype(mx.bfloat16), store, [], Scoring(0.03, None, None))
            for each in (ReferenceBackend(), emulated)
        )
        error = mx.linalg.norm((got - expected).astype(mx.float32))
        assert error <= 1e-2 * mx.linalg.norm(expected.astype(mx.float32)), exponents


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("row", MANY, ids=name)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_sources_agree_with_the_reference_in_all_formats(
    emulated: TokensBackend, row: Row, dtype: mx.Dtype
) -> None:
    # The emulation has no products of float16 in prompts.
    several = row[1].kv_heads == 2 and dtype == mx.bfloat16
    spans = check.SPANS if several else check.SINGLE_ROWS
    assert differs(emulated, case(row, dtype), spans) is None


@pytest.mark.gpu
@pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("row", [*FEW, *MANY], ids=name)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_kernels_agree_with_the_reference(row: Row, dtype: mx.Dtype) -> None:
    assert differs(TokensBackend(), case(row, dtype), check.SPANS) is None


@pytest.mark.parametrize(
    ("format", "spec", "dtype", "block_size", "serves"),
    [
        (uniform(4), FullKV(2, 128), mx.bfloat16, 64, True),
        (turbo(3.5), FullKV(2, 128), mx.float16, 128, True),
        (uniform(4), FullKV(2, 128), mx.float32, 64, False),
        (uniform(4), FullKV(2, 128), mx.bfloat16, 32, False),
        (uniform(4), FullKV(2, 96), mx.bfloat16, 64, False),
        (turbo(4), FullKV(2, 128, value_dim=64), mx.bfloat16, 64, False),
        (turbo(4), FullKV(1, 576, value_dim=512, value_in_key=True), mx.bfloat16, 64, False),
        (KVFormat("page", 4, 4), FullKV(2, 128), mx.bfloat16, 64, False),
    ],
)
def test_what_the_kernels_are_made_for(
    format: KVFormat, spec: AttentionSpec, dtype: mx.Dtype, block_size: int, serves: bool
) -> None:
    own = AttentionCase(format, spec, block_size, 8, 1, dtype, False, False)
    assert tokens.kernels_serve(own) == serves


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "group"), [(64, 4), (128, 16), (256, 2), (512, 8)])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_sources_compile(dim: int, group: int, bits: int, tmp_path: Path) -> None:
    shape = cuda.Shape(mx.bfloat16, dim, dim, 2, group, 64, capped=True, sinks=False)
    for codes in (
        Codes(bits, 64, bits, 32, by_channel=False, codebook=False),
        Codes(min(bits, 4), dim, min(bits, 4), dim, by_channel=False, codebook=True),
    ):
        last = "float" if codes.codebook else "__half"
        types = ["unsigned", "__half", last] * 2
        parts = [f"const {t}* {n}" for t, n in zip(types, codes.inputs(), strict=True)]
        queries = mx.float32 if codes.codebook else mx.bfloat16
        text = (
            cuda.header(mx.bfloat16, tokens.defines(shape, codes))
            + tokens.head(queries)
            + 'extern "C" __global__ void __launch_bounds__(128) attend(const Q* q,'
            + ",".join(parts)
            + ",const int* tiles, const int* table, const float* numbers, float* partial,"
            "float* stats) {" + tokens.body() + "}\n"
        )
        assert_compiles(text, tmp_path)
