"""Attention over blocks of codes: right with each instruction set, and each row's bits its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.cache.formats.codecs import AffineCodec, CodebookCodec, Codec
from quire.cache.formats.packing import Affine, affine
from tests.device.cpu.test_attention import BLOCK, Blocks, Part, causal, expected, tables_of

KV_HEADS, HEADS = 2, 6


@dataclass
class CodedBlocks:
    """Blocks of codes, and what they stand for in the model's coordinates.

    Attributes:
        keys, values: arrays of codes, as `CodedArrays` lists them.
        kinds: the arguments that say how they are coded.
    """

    decoded: Blocks
    keys: list[mx.array]
    values: list[mx.array]
    kinds: dict[str, Any]

    @staticmethod
    def drawn(kind: str, bits: int, dim: int, lengths: list[int]) -> CodedBlocks:
        """Draw a coding of `kind` "channels", "tokens" or "codebook"."""
        plain = Blocks.drawn(lengths, KV_HEADS, dim, dim, mx.float32)
        codec: Codec
        if kind == "codebook":
            codec = CodebookCodec(dim, bits)
        else:
            codec = AffineCodec(dim, bits, 64, rotate=kind == "channels", refit=True)
        values = codec.encode(plain.values)
        plain.values = codec.inverse_transform(codec.decode(values))
        levels = [] if codec.levels is None else [codec.levels]
        rotation = codec.rotation
        if kind == "channels":
            layout = Affine(BLOCK, bits)
            keys = list(affine(plain.keys.swapaxes(-1, -2), layout, refit=True))
            plain.keys = layout.decode(keys).swapaxes(-1, -2)
        else:
            keys = codec.encode(plain.keys)
            plain.keys = codec.inverse_transform(codec.decode(keys))
        rotated = {
            "rotation": rotation and rotation.map,
            "rotation_scale": rotation.scale if rotation else 1.0,
        }
        kinds = {
            "codebook": kind == "codebook",
            "by_channel": kind == "channels",
            **{f"value_{name}": what for name, what in rotated.items()},
            "key_rotation": None if kind == "channels" else rotated["rotation"],
            "key_rotation_scale": 1.0 if kind == "channels" else rotated["rotation_scale"],
            "key_bits": bits,
            "value_bits": bits,
        }
        return CodedBlocks(plain, keys + levels, values + levels, kinds)

    def attend(self, ops: Any, parts: list[Part]) -> mx.array:
        out: mx.array = ops.attend_coded(
            mx.concatenate([q for _, q, _, _ in parts]),
            keys=self.keys,
            values=self.values,
            layout=ops.CodedLayout(**self.kinds),
            block_size=BLOCK,
            tables=tables_of(ops, self.decoded, parts),
            written=[],
            kv_heads=KV_HEADS,
            value_dim=self.decoded.values.shape[-1],
            scale=0.25,
        )
        return out


EVERY_DAY = {("channels", 3), ("channels", 8), ("tokens", 4), ("codebook", 4)}
KINDS = [
    *(("channels", bits) for bits in (2, 3, 4, 5, 6, 8)),
    *(("tokens", bits) for bits in (4, 8)),
    *(("codebook", bits) for bits in (2, 3, 4)),
]


@pytest.mark.parametrize(
    ("kind", "bits"),
    [pytest.param(*each, marks=[] if each in EVERY_DAY else pytest.mark.slow) for each in KINDS],
)
@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.slow), 80])
def test_it_is_attention_over_what_codes_stand_for(
    ops: Any, kind: str, bits: int, dim: int
) -> None:
    blocks = CodedBlocks.drawn(kind, bits, dim, [100, 33, 200])
    parts = [
        causal(0, 99, 1, HEADS, dim),
        causal(1, 0, 33, HEADS, dim),
        causal(2, 150, 50, HEADS, dim, window=70),
    ]
    out = np.array(blocks.attend(ops, parts))
    exact = np.concatenate([expected(blocks.decoded, part) for part in parts])
    assert np.abs(out - exact).max() < 1e-5


@pytest.mark.parametrize(("kind", "bits", "window"), [("channels", 3, 45), ("codebook", 4, 10**6)])
def test_bits_do_not_depend_on_company_or_cuts(ops: Any, kind: str, bits: int, window: int) -> None:
    blocks = CodedBlocks.drawn(kind, bits, 64, [120, 77])
    whole = blocks.attend(ops, [causal(0, 0, 120, HEADS, 64, window)])
    for cuts in ([0, 1, 2, 40, 41, 119, 120], [0, 17, 64, 120]):
        for start, end in pairwise(cuts):
            both = [causal(1, 70, 7, HEADS, 64, window)]
            both += [causal(0, start, end - start, HEADS, 64, window)]
            out = blocks.attend(ops, both)
            assert mx.array_equal(out[7:], whole[start:end]), (start, end)


def test_threads_change_no_bit(compiled: Any) -> None:
    blocks = CodedBlocks.drawn("channels", 4, 64, [200])
    part = causal(0, 100, 100, HEADS, 64)
    alone = blocks.attend(compiled, [part])
    mx.eval(alone)
    compiled.set_threads(3)
    try:
        assert mx.array_equal(blocks.attend(compiled, [part]), alone)
    finally:
        compiled.set_threads(1)
