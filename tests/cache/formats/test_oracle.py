"""Formats against a dense reference in numpy: all codes decoded, each row sees what it may."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from quire.cache.formats.base import LayerShape, LayerStore
from quire.cache.formats.codecs import AffineCodec, CodebookCodec
from quire.cache.formats.packing import Affine, affine
from quire.cache.formats.registry import store_type
from quire.cache.view import Chunk, DecodeBatch, View
from quire.core.kv_format import KVFormat

PAGE, KV_HEADS, GROUPED = 64, 2, 3
HEADS = KV_HEADS * GROUPED

FORMATS = [
    KVFormat(),
    *(KVFormat("page", bits, bits) for bits in (2, 3, 4, 5, 6, 8)),
    KVFormat("page", 8, 4),
    KVFormat("uniform", 4, 4, 32),
    KVFormat("uniform", 8, 8, 64),
    KVFormat("turbo", 3.5, 3.5),
]


IMAGE = range(250, 420)
"""Positions whose rows see each other, in longer sequences."""


def last_seen(position: int) -> int:
    """The last key that a row sees."""
    return IMAGE[-1] if position in IMAGE else position


def codes_of(format: KVFormat, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the codes of `[n, kv_heads, dim]` read as; n is a multiple of a page."""
    dim = k.shape[-1]
    keys, values = mx.array(k), mx.array(v)
    if format.scheme == "page":
        codec = AffineCodec(dim, int(format.value_bits), 64, rotate=True, refit=True)  # dim < 128
        layout = Affine(64, int(format.key_bits))
        by_channel = keys.reshape(-1, PAGE, KV_HEADS, dim).transpose(0, 2, 3, 1)
        read = layout.decode(list(affine(by_channel, layout, refit=True)))
        k_read = read.transpose(0, 3, 1, 2).reshape(k.shape)
        return np.array(k_read), np.array(codec.turn_back(codec.decode(codec.encode(values))))
    if format.scheme == "uniform":
        bits, size = int(format.key_bits), format.group_size
        each = AffineCodec(dim, bits, size, rotate=False, refit=False)
        pair: tuple[AffineCodec | CodebookCodec, AffineCodec | CodebookCodec] = (each, each)
    elif format.scheme == "turbo":
        pair = CodebookCodec(dim, 3), CodebookCodec(dim, 4)
    else:
        return k, v
    read_k, read_v = (
        c.turn_back(c.decode(c.encode(x))) for c, x in zip(pair, (keys, values), strict=True)
    )
    return np.array(read_k), np.array(read_v)


def dense(
    q: np.ndarray,
    written: tuple[np.ndarray, np.ndarray],
    coded: tuple[np.ndarray, np.ndarray],
    position: int,
    window: int | None,
    sinks: np.ndarray | None,
    *,
    own_page_written: bool,
) -> np.ndarray:
    """One row `[heads, dim]` at a position, keys before its own page coded, in float64."""
    end = last_seen(position) + 1
    own = position // PAGE * PAGE if own_page_written else end
    first = 0 if window is None else max(0, position - window + 1)
    keys = np.concatenate([coded[0][:own], written[0][own:end]])[first:]
    values = np.concatenate([coded[1][:own], written[1][own:end]])[first:]
    out = np.zeros(q.shape)
    for head in range(HEADS):
        scores = keys[:, head // GROUPED].astype(np.float64) @ q[head] / np.sqrt(q.shape[-1])
        if sinks is not None:
            scores = np.append(scores, sinks[head])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[head] = weights[: len(keys)] @ values[:, head // GROUPED]
    return out


class Cache:
    """A store that is written and read as the engine would, for a few sequences of random keys."""

    def __init__(self, format: KVFormat, dim: int, lengths: list[int]) -> None:
        shape = LayerShape(KV_HEADS, dim, PAGE, mx.float32)
        self.store: LayerStore = store_type(format, 0)(shape, format)
        self.format = format
        rng = np.random.default_rng(dim)
        self.rows = [
            [rng.standard_normal((n, heads, dim)).astype(np.float32) for heads in (HEADS, KV_HEADS)]
            + [rng.standard_normal((n, KV_HEADS, dim)).astype(np.float32)]
            for n in lengths
        ]
        pages = [-(-n // PAGE) for n in lengths]
        ids = rng.permutation(sum(pages)).astype(np.int32)
        self.tables = np.split(ids, np.cumsum(pages)[:-1])
        self.store.resize(sum(pages), ())
        if self.store.seals:
            self.store.resize_open(len(lengths), ())

    def chunk(
        self, number: int, start: int, end: int, window: int | None, sinks: mx.array | None
    ) -> np.ndarray:
        """Writes and reads tokens `[start, end)` of a sequence in one step."""
        positions = np.arange(start, end, dtype=np.int32)
        first = np.maximum(positions - window + 1, 0) if window else positions * 0
        low, table = int(first[0]) // PAGE, self.tables[number]
        open = number if self.store.seals else None
        pages = table[low : (end - 1) // PAGE + 1]
        base = low * PAGE
        last = np.array([last_seen(p) for p in range(start, end)], dtype=np.int32)
        each = Chunk(
            slice(0, end - start),
            pages,
            positions - base,
            first - base,
            last - base,
            KV_HEADS,
            PAGE,
            open,
        )
        view = View(table[positions // PAGE], positions % PAGE, [], [each], KV_HEADS, PAGE)
        return self._step([number], [slice(start, end)], view, sinks)

    def decode(
        self, numbers: list[int], at: list[int], window: int | None, sinks: mx.array | None
    ) -> np.ndarray:
        """Writes and reads one token of each sequence in one step."""
        own = np.array(at, dtype=np.int32)
        first = np.maximum(own - window + 1, 0) if window else own * 0
        low = first // PAGE
        width = int((own // PAGE - low).max()) + 1
        pages = np.zeros((len(at), width), dtype=np.int32)
        for row, number in enumerate(numbers):
            some = self.tables[number][low[row] : own[row] // PAGE + 1]
            pages[row, : len(some)] = some
        base = low * PAGE
        opens = np.array(numbers, dtype=np.int32) if self.store.seals else None
        batch = DecodeBatch(
            slice(0, len(at)), pages, first - base, own - base, KV_HEADS, PAGE, opens
        )
        places = np.array(
            [self.tables[n][p // PAGE] for n, p in zip(numbers, at, strict=True)], dtype=np.int32
        )
        view = View(places, own % PAGE, [batch], [], KV_HEADS, PAGE)
        return self._step(numbers, [slice(p, p + 1) for p in at], view, sinks)

    def _step(
        self, numbers: list[int], spans: list[slice], view: View, sinks: mx.array | None
    ) -> np.ndarray:
        q, k, v = (
            mx.array(
                np.concatenate([self.rows[n][i][s] for n, s in zip(numbers, spans, strict=True)])
            )
            for i in range(3)
        )
        self.store.write(k, v, view)
        return np.array(self.store.attend(q, view, scale=q.shape[-1] ** -0.5, sinks=sinks))

    def expected(
        self, number: int, position: int, window: int | None, sinks: np.ndarray | None
    ) -> np.ndarray:
        """What the dense reference gives one row."""
        q, k, v = self.rows[number]
        missing = -len(k) % PAGE
        full = [np.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (k, v)]
        return dense(
            q[position],
            (k, v),
            codes_of(self.format, *full),
            position,
            window,
            sinks,
            own_page_written=self.store.seals,
        )


def _cases() -> Sequence[object]:
    """Each kind of store every day, all bits and odd head sizes in the slow run."""
    quick = {("page-4", 64), ("page-8/4", 64), ("uniform-4-g32", 64), ("turbo-3.5", 80)}
    pairs = [(each, 64) for each in FORMATS]
    pairs += [(each, 80) for each in (FORMATS[3], *FORMATS[-2:])]
    return [
        pytest.param(
            *(each, dim),
            id=f"{each.name}-{dim}",
            marks=() if (each.name, dim) in quick else pytest.mark.slow,
        )
        for each, dim in pairs
    ]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("format", "dim"), _cases())
def test_agrees_with_dense_reference(format: KVFormat, dim: int, window: int | None) -> None:
    sinks = np.linspace(-1, 1, HEADS).astype(np.float32) if window else None
    given = None if sinks is None else mx.array(sinks)
    lengths = [1100, 130]
    cache = Cache(format, dim, lengths)
    got: dict[tuple[int, int], np.ndarray] = {}
    for number, start, end in ((0, 0, 700), (1, 0, 100), (0, 700, 1090), (1, 100, 126)):
        for row, out in enumerate(cache.chunk(number, start, end, window, given)):
            got[number, start + row] = out
    for step in range(4):  # the second sequence fills a page meanwhile
        out = cache.decode([0, 1], [1090 + step, 126 + step], window, given)
        got[0, 1090 + step], got[1, 126 + step] = out
    for number, position in [
        *((0, p) for p in (5, 63, 64, 249, 250, 255, 256, 300, 383, 384, 419, 420)),
        *((0, p) for p in (699, 700, 1093)),
        *((1, p) for p in (99, 100, 125, 126, 127, 128, 129)),
    ]:
        want = cache.expected(number, position, window, sinks)
        np.testing.assert_allclose(got[number, position], want, atol=2e-5)


def test_pages_travel() -> None:
    """What `export` gives, `restore` puts elsewhere, and attention reads the same from there."""
    for format in (KVFormat("page", 4, 4), KVFormat("turbo", 2, 2)):
        cache = Cache(format, 64, [256])
        cache.chunk(0, 0, 192, None, None)
        before = cache.decode([0], [192], None, None)
        old = cache.tables[0]
        cache.store.resize(8, ())
        cache.store.resize(8, ((int(old[0]), 7),))
        contents = cache.store.export(old[1:3])
        mx.eval(contents)
        cache.store.restore(np.array([5, 6], dtype=np.int32), contents)
        cache.tables[0] = np.array([7, 5, 6, old[3]], dtype=np.int32)
        np.testing.assert_array_equal(cache.decode([0], [192], None, None), before)


@pytest.mark.parametrize(("bits", "error"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_turbo_errs_as_its_paper_says(bits: int, error: float) -> None:
    """Mean squared error of a normal variable under the best codebook (Max, 1960)."""
    vectors = np.random.default_rng(bits).standard_normal((400, 256)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=-1, keepdims=True)
    codec = CodebookCodec(256, bits)
    read = np.array(codec.turn_back(codec.decode(codec.encode(mx.array(vectors)))))
    assert ((read - vectors) ** 2).sum(axis=-1).mean() == pytest.approx(error, rel=0.03)
