"""The kernels over codes of latents and of heads of any size compile for Hopper."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from quire.attention.paged import cuda as paged
from quire.attention.paged.portable_kernels import Codes
from quire.cache.formats.base import LayerShape
from quire.cache.formats.registry import make_store
from quire.cache.formats.tokens import TokenStore
from quire.core.kv_format import KVFormat
from quire.executor.graphs.attention import coded_kernels, token_kernels
from quire.executor.graphs.attention.heads import Coding, Heads
from tests.support.nvrtc import assert_compiles

pytestmark = pytest.mark.slow

FORMATS = [KVFormat("page", 4, 4), KVFormat("uniform", 4, 4), KVFormat("turbo", 3.5, 3.5)]
LATENTS = LayerShape(1, 576, 512, block_size=64, dtype=mx.bfloat16, value_in_key=True)
SHORT = LayerShape(4, 192, 128, block_size=64, dtype=mx.bfloat16)


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("layer", [LATENTS, SHORT], ids=["latents", "short values"])
def test_rows_attend(layer: LayerShape, format: KVFormat, tmp_path: Path) -> None:
    store = make_store(layer, format).packed
    assert store is not None, "blocks hold codes"
    turned = store.coded().layout.value_rotation is not None
    in_key = layer.value_in_key
    size = layer.head_dim if in_key else layer.value_dim
    shape = _shape(layer, size if turned else layer.value_dim)
    codes = Codes.of(store.coded())
    assert_compiles(coded_kernels.attend(shape, codes, size, in_key=in_key).text, tmp_path)
    text = token_kernels.combine(shape, 4, layer.value_dim, turned=turned)
    assert_compiles(text, tmp_path)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_chosen_keys_are_copied(format: KVFormat, tmp_path: Path) -> None:
    store = make_store(LATENTS, format).packed
    assert store is not None, "blocks hold codes"
    constants = {"LIMIT": 2048, "ROOM": 2048, "BLOCK": 64, "DIM": 576, "THREADS": 128}
    turned = store.coded().layout.key_rotation is not None
    text = coded_kernels.gather(Codes.of(store.coded()), constants, 128, turned=turned)
    assert_compiles(text, tmp_path)


@pytest.mark.parametrize("format", FORMATS[1:], ids=str)
@pytest.mark.parametrize("layer", [LATENTS, SHORT], ids=["latents", "short values"])
def test_tokens_are_coded(layer: LayerShape, format: KVFormat, tmp_path: Path) -> None:
    store = make_store(layer, format)
    assert isinstance(store, TokenStore), "the format codes single tokens"
    kernel = Heads(
        16,
        layer.kv_heads,
        layer.head_dim,
        value_dim=0 if layer.value_in_key else layer.value_dim,
        block_size=64,
        pairs=32,
        neighbours=True,
        strides=(16 * layer.head_dim, layer.head_dim, layer.value_dim),
        head_strides=(layer.head_dim, layer.head_dim, layer.value_dim),
        normed=False,
        values_normed=False,
        eps=0.0,
        coding=Coding.of(store),
    )
    assert_compiles(kernel.text, tmp_path)


def _shape(layer: LayerShape, value_dim: int) -> paged.Shape:
    sizes = layer.head_dim, value_dim
    counts = {"kv_heads": layer.kv_heads, "heads": 16 * layer.kv_heads, "block_size": 64}
    return paged.shape_of(*sizes, **counts, capped=False, sinks=False)
