"""The backends against dense attention in float64: all codes decoded, each row sees what it may."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from quire.attention.backend import AttentionBackend, AttentionCase, Scoring
from quire.attention.cpu import CPUBackend
from quire.attention.metadata import build_metadata
from quire.attention.reference import ReferenceBackend
from quire.cache.formats.base import LayerShape
from quire.cache.formats.codecs import AffineCodec, CodebookCodec
from quire.cache.formats.packing import Affine, affine
from quire.cache.formats.registry import make_store
from quire.cache.specs import AttentionSpec, ChunkedKV, FullKV, WindowKV
from quire.core.kv_format import KVFormat
from quire.device.cpu.kernels import NoKernels, load_kernels
from tests.attention.rows import HandRows
from tests.support.everyday import everyday


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    """Return each backend that runs here."""
    if request.param == "reference":
        return ReferenceBackend()
    try:
        return CPUBackend(load_kernels(threads=1))
    except NoKernels as error:
        pytest.skip(str(error))


BLOCK, KV_HEADS, GROUPED = 64, 2, 3
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
"""Positions whose rows see each other, in windows."""


def last_seen(spec: AttentionSpec, position: int) -> int:
    """Return the last key that a row sees."""
    return IMAGE[-1] if spec.bidirectional_media and position in IMAGE else position


def codes_of(
    format: KVFormat, k: np.ndarray, v: np.ndarray, *, value_in_key: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return what the codes of `[n, kv_heads, dim]` read as; n is a multiple of a block."""
    if value_in_key:
        bits = max(format.key_bits, int(format.value_bits + 0.5))
        read, _ = codes_of(replace(format, key_bits=bits), k, v)
        return read, read[..., : v.shape[-1]]
    keys, values = mx.array(k), mx.array(v)
    if format.scheme == "plain":
        return k, v
    if format.scheme == "page":
        value_dim = v.shape[-1]  # below 128, so groups are of 64
        codec = AffineCodec(value_dim, int(format.value_bits), 64, rotate=True, refit=True)
        layout = Affine(64, int(format.key_bits))
        by_channel = keys.reshape(-1, BLOCK, KV_HEADS, k.shape[-1]).transpose(0, 2, 3, 1)
        read = layout.decode(list(affine(by_channel, layout, refit=True)))
        k_read = read.transpose(0, 3, 1, 2).reshape(k.shape)
        return np.array(k_read), np.array(
            codec.inverse_transform(codec.decode(codec.encode(values)))
        )

    def read_back(x: mx.array, bits: int) -> np.ndarray:
        codec: AffineCodec | CodebookCodec
        if format.scheme == "uniform":
            codec = AffineCodec(x.shape[-1], bits, format.group_size, rotate=False, refit=False)
        else:
            codec = CodebookCodec(x.shape[-1], bits)
        return np.array(codec.inverse_transform(codec.decode(codec.encode(x))))

    return read_back(keys, int(format.key_bits)), read_back(values, int(format.value_bits + 0.5))


def dense(
    q: np.ndarray,
    written: tuple[np.ndarray, np.ndarray],
    coded: tuple[np.ndarray, np.ndarray],
    position: int,
    spec: AttentionSpec,
    scoring: Scoring,
    *,
    own_block_written: bool,
) -> np.ndarray:
    """Return attention of one row `[heads, dim]` in float64, keys before its own block coded."""
    end = last_seen(spec, position) + 1
    own = position // BLOCK * BLOCK if own_block_written else end
    first = spec.first_visible(position)
    keys = np.concatenate([coded[0][:own], written[0][own:end]])[first:].astype(np.float64)
    values = np.concatenate([coded[1][:own], written[1][own:end]])[first:].astype(np.float64)
    out = np.zeros((HEADS, values.shape[-1]))
    for head in range(HEADS):
        scores = keys[:, head // GROUPED] @ q[head] * scoring.scale
        if scoring.softcap is not None:
            scores = scoring.softcap * np.tanh(scores / scoring.softcap)
        if scoring.sinks is not None:
            scores = np.append(scores, np.array(scoring.sinks)[head])
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        out[head] = weights[: len(keys)] @ values[:, head // GROUPED]
    return out


class Cache:
    """A store that is written and read as the engine would, for a few sequences of random keys."""

    def __init__(
        self,
        backend: AttentionBackend,
        format: KVFormat,
        spec: AttentionSpec,
        lengths: list[int],
        scoring: Scoring,
    ) -> None:
        self.backend = backend
        self.store = make_store(LayerShape.of(spec, BLOCK, mx.float32), format)
        self.format, self.spec, self.scoring = format, spec, scoring
        rng = np.random.default_rng(spec.head_dim)
        shapes = (HEADS, spec.head_dim), (KV_HEADS, spec.head_dim), (KV_HEADS, spec.value_dim)
        self.rows = [
            [rng.standard_normal((n, *shape)).astype(np.float32) for shape in shapes]
            for n in lengths
        ]
        if spec.value_in_key:
            self.rows = [[q, k, k[..., : spec.value_dim]] for q, k, _ in self.rows]
        self.coded: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        blocks = [-(-n // BLOCK) for n in lengths]
        ids = rng.permutation(sum(blocks)).astype(np.int32)
        self.tables = np.split(ids, np.cumsum(blocks)[:-1])
        self.store.resize(sum(blocks), ())
        if self.store.has_tail:
            self.store.resize_tails(len(lengths), ())

    def step(self, *spans: tuple[int, int, int]) -> np.ndarray:
        """Writes and reads tokens `[start, end)` of some sequences in one step.

        Args:
            spans: (sequence, start, end).
        """
        images = ((IMAGE.start, IMAGE.stop),)
        rows = [
            HandRows(
                start, end - start, self.format, (self.tables[number].tolist(),), (number,), images
            )
            for number, start, end in spans
        ]
        metadata = build_metadata(0, self.spec, rows, BLOCK)
        q, k, v = (
            mx.array(np.concatenate([self.rows[number][i][a:b] for number, a, b in spans]))
            for i in range(3)
        )
        written = self.store.write(k, v, metadata.slots)
        prepared = self.backend.prepare(metadata)
        return np.array(prepared.forward(q, self.store, written, self.scoring))

    def expected(self, number: int, position: int) -> np.ndarray:
        """Return what dense attention gives one row."""
        q, k, v = self.rows[number]
        if number not in self.coded:
            missing = -len(k) % BLOCK
            full = [np.pad(x, ((0, missing), (0, 0), (0, 0))) for x in (k, v)]
            self.coded[number] = codes_of(self.format, *full, value_in_key=self.spec.value_in_key)
        return dense(
            q[position],
            (k, v),
            self.coded[number],
            position,
            self.spec,
            self.scoring,
            own_block_written=self.store.has_tail,
        )


def agrees(
    backend: AttentionBackend, format: KVFormat, spec: AttentionSpec, scoring: Scoring
) -> None:
    """Two sequences in chunks, then in steps of one token each, against dense attention."""
    cache = Cache(backend, format, spec, [1100, 130], scoring)
    got: dict[tuple[int, int], np.ndarray] = {}
    steps: list[list[tuple[int, int, int]]] = [
        *([span] for span in ((0, 0, 700), (1, 0, 100), (0, 700, 1090), (1, 100, 125))),
        [(0, 1090, 1091), (1, 125, 126)],
        [(1, 126, 129), (0, 1091, 1092)],  # a chunk that fills a block before a single row
        [(0, 1092, 1093), (1, 129, 130)],
    ]
    for spans in steps:
        out = iter(cache.step(*spans))
        for number, start, end in spans:
            got.update({(number, position): next(out) for position in range(start, end)})
    for number, position in [
        *((0, p) for p in (5, 63, 64, 249, 250, 255, 256, 300, 383, 384, 419, 420)),
        *((0, p) for p in (699, 700, 1090, 1091, 1092)),
        *((1, p) for p in (99, 100, 124, 125, 126, 127, 128, 129)),
    ]:
        want = cache.expected(number, position)
        np.testing.assert_allclose(got[number, position], want, atol=2e-5)


def _cases() -> Sequence[object]:
    """Return each kind of store every day, all bits and odd head sizes in the slow run."""
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
def test_agrees_with_dense_attention(
    backend: AttentionBackend, format: KVFormat, dim: int, window: int | None
) -> None:
    spec: AttentionSpec = FullKV(KV_HEADS, dim)
    sinks = None
    if window is not None:
        spec = WindowKV(KV_HEADS, dim, window, bidirectional_media=True)
        sinks = mx.linspace(-1, 1, HEADS)
    agrees(backend, format, spec, Scoring(dim**-0.5, sinks=sinks))


KINDS = [
    KVFormat(),
    KVFormat("page", 4, 4),
    KVFormat("uniform", 4, 4, 32),
    KVFormat("turbo", 3.5, 3.5),
]


@pytest.mark.parametrize("format", KINDS, ids=lambda each: each.name)
@pytest.mark.parametrize(
    ("dim", "value_dim"), [(96, 64), pytest.param(32, 80, marks=pytest.mark.slow)]
)
def test_values_of_another_size_than_keys(
    backend: AttentionBackend, format: KVFormat, dim: int, value_dim: int
) -> None:
    spec = WindowKV(KV_HEADS, dim, 70, bidirectional_media=True, value_dim=value_dim)
    agrees(backend, format, spec, Scoring(dim**-0.5))


@pytest.mark.parametrize(
    "format",
    everyday(KINDS, lambda format: format.scheme in ("plain", "page")),
    ids=lambda each: each.name,
)
def test_values_that_start_their_keys(backend: AttentionBackend, format: KVFormat) -> None:
    """Latent attention's, which blocks hold once."""
    spec = FullKV(KV_HEADS, 80, value_dim=64, value_in_key=True)
    case = AttentionCase(format, spec, BLOCK, HEADS, 1, mx.float32, softcap=False, sinks=False)
    if not backend.serves(case):
        pytest.skip("left to the reference")
    agrees(backend, format, spec, Scoring(80**-0.5))


@pytest.mark.parametrize("format", KINDS, ids=lambda each: each.name)
def test_keys_of_a_chunk(backend: AttentionBackend, format: KVFormat) -> None:
    """Chunks that start and end within blocks, of which some lie in none that a row sees."""
    agrees(backend, format, ChunkedKV(KV_HEADS, 64, 150), Scoring(64**-0.5))


@pytest.mark.parametrize(
    ("format", "sinks"),
    everyday(product(KINDS, (False, True)), lambda format, sinks: sinks or format == KVFormat()),
    ids=lambda each: getattr(each, "name", "sinks" if each else ""),
)
def test_logits_are_capped(backend: AttentionBackend, format: KVFormat, sinks: bool) -> None:
    """The cap is 1.5; the largest of some hundred logits would be 3 or more."""
    sunk = mx.linspace(-1, 1, HEADS) if sinks else None
    agrees(backend, format, FullKV(KV_HEADS, 64), Scoring(64**-0.5, 1.5, sunk))


def test_blocks_travel(backend: AttentionBackend) -> None:
    """Blocks that `export` returns are restored at other ids, and attention reads the same from
    them.
    """
    for format in (KVFormat("page", 4, 4), KVFormat("turbo", 2, 2)):
        cache = Cache(backend, format, FullKV(KV_HEADS, 64, value_dim=32), [256], Scoring(0.125))
        cache.step((0, 0, 192))
        before = cache.step((0, 192, 193))
        old = cache.tables[0]
        cache.store.resize(8, ())
        cache.store.resize(8, ((int(old[0]), 7),))
        contents = cache.store.export(old[1:3])
        mx.eval(contents)
        cache.store.restore(np.array([5, 6], dtype=np.int32), contents)
        cache.tables[0] = np.array([7, 5, 6, old[3]], dtype=np.int32)
        np.testing.assert_array_equal(cache.step((0, 192, 193)), before)
