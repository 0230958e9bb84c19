"""Rows that attend only to the keys that an indexer chose, in every KV format."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from quire.attention import choice
from quire.attention.backend import (
    AttentionBackend,
    AttentionCase,
    Backends,
    PreparedAttention,
    Scoring,
)
from quire.attention.metadata import AttentionMetadata
from quire.attention.reference import ReferenceBackend, plain
from quire.attention.step import Attention, StepAttention
from quire.cache.pools import Pools
from quire.cache.specs import FullKV, KVLayout
from quire.core.kv_format import KVFormat
from tests.attention.rows import HandRows

SIZE, HEADS, INDEX_HEADS, LIMIT = 32, 4, 8, 10
SPEC = FullKV(1, 64, value_dim=32, value_in_key=True, index_dim=16)
FOLLOWER = FullKV(1, 64, value_dim=32, value_in_key=True)
PLAIN = KVFormat()
TOKENS = 150


class Sequences:
    """Layers of one model, of which the second takes the keys that the first chose.

    Every second key of the indexer is the same, so that scores are equal.
    """

    def __init__(
        self,
        format: KVFormat,
        count: int,
        limit: int = LIMIT,
        backends: Sequence[AttentionBackend] = (),
    ) -> None:
        rng = np.random.default_rng(0)
        self.format, self.limit = format, limit
        layout = KVLayout.of((SPEC, FOLLOWER))
        pools = Pools(layout.groups, SIZE, mx.float32)
        for group in layout.groups:
            pools.kv(group.index, format).resize(8 * count, (), tails=False)
            if format.has_tail:
                pools.kv(group.index, format).resize(count, (), tails=True)
        self._attention = Attention(layout, pools, Backends([*backends, ReferenceBackend()]))
        self._q = rng.standard_normal((2, TOKENS, HEADS, 64)).astype(np.float32)
        self._k = rng.standard_normal((2, TOKENS, 1, 64)).astype(np.float32)
        self._index_q = rng.standard_normal((TOKENS, INDEX_HEADS, 16)).astype(np.float32)
        self.index_k = rng.standard_normal((TOKENS, 16)).astype(np.float32)
        self.index_k[::2] = self.index_k[0]
        self._weights = rng.standard_normal((TOKENS, INDEX_HEADS)).astype(np.float32)

    def step(self, *spans: tuple[int, int, int]) -> list[list[np.ndarray]]:
        """Computes rows (sequence, start, count); what both layers give, by span."""
        ids = {n: tuple(range(8 * n, 8 * n + 8)) for n, _, _ in spans}
        tail = self.format.has_tail
        rows = [
            HandRows(start, count, self.format, (ids[n],) * 2, (n, n) if tail else ())
            for n, start, count in spans
        ]
        step = self._attention.step(rows)
        places = np.concatenate([np.arange(start, start + count) for _, start, count in spans])
        self._choose(step, places)
        ends = np.cumsum([count for _, _, count in spans])[:-1]
        outs = []
        for layer in range(2):
            k = mx.array(self._k[layer, places])
            out = step.attend(
                layer, mx.array(self._q[layer, places]), k, k[..., :32], Scoring(0.2), chosen_by=0
            )
            outs.append(np.split(np.array(out), ends))
        return outs

    def _choose(self, step: StepAttention, places: np.ndarray) -> None:
        q, weights = mx.array(self._index_q[places]), mx.array(self._weights[places])
        step.choose(0, q, mx.array(self.index_k[places]), weights, self.limit)

    def expected(self, layer: int, row: int) -> np.ndarray:
        """Return the attention of a row over its exact keys, before any rounding."""
        # Key by key: in a product of all, equal keys may get scores of other bits (AVX2).
        scores = [
            self._weights[row] @ np.maximum(self._index_q[row] @ key, 0)
            for key in self.index_k[: row + 1]
        ]
        chosen = sorted(range(row + 1), key=lambda key: (-scores[key], key))[: self.limit]
        keys = self._k[layer, chosen, 0]
        logits = 0.2 * self._q[layer, row] @ keys.T
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        out: np.ndarray = (weights / weights.sum(axis=-1, keepdims=True)) @ keys[:, :32]
        return out


FORMATS = (PLAIN, KVFormat("page", 8, 8), KVFormat("uniform", 8, 8), KVFormat("turbo", 4, 4))


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_rows_see_what_they_chose_in_any_company(format: KVFormat) -> None:
    """A sequence is read as chunks and as single rows, beside a long and a short one."""
    sequences = Sequences(format, 3)
    first, follower = sequences.step((0, 0, 70), (1, 0, 120), (2, 0, 5))
    more = sequences.step((2, 5, 1), (0, 70, 1), (1, 120, 1))
    last = sequences.step((0, 71, 3))
    bound = 1e-5 if format == PLAIN else 0.25 if format.scheme == "turbo" else 0.02
    for layer, chunk in enumerate((first, follower)):
        got = np.concatenate([chunk[0], more[layer][1], last[layer][0]])
        wanted = np.stack([sequences.expected(layer, row) for row in range(74)])
        error = np.linalg.norm(got - wanted) / np.linalg.norm(wanted)
        assert error < bound
        short = np.concatenate([chunk[2], more[layer][0]])
        assert np.linalg.norm(short - got[:6]) < bound * np.linalg.norm(short) + 1e-6


def test_long_sequences_are_read_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Sequences(PLAIN, 1).step((0, 0, 120))
    monkeypatch.setattr(choice, "_ELEMENTS", 128 * 16 * 7)
    monkeypatch.setattr(plain, "SCORES", LIMIT * 64 * 7)
    tiled = Sequences(PLAIN, 1).step((0, 0, 120))
    for ours, theirs in zip(tiled, whole, strict=True):
        assert np.abs(ours[0] - theirs[0]).max() < 1e-5


def test_nothing_is_scored_while_every_key_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    scored: list[AttentionMetadata] = []
    made = choice.IndexerTopK.__init__

    def noted(self: choice.IndexerTopK, metadata: AttentionMetadata, limit: int) -> None:
        scored.append(metadata)
        made(self, metadata, limit)

    monkeypatch.setattr(choice.IndexerTopK, "__init__", noted)
    sequences = Sequences(PLAIN, 1, limit=40)
    sequences.step((0, 0, 40))
    assert not scored
    ((out,), _) = sequences.step((0, 40, 1))
    assert len(scored) == 1
    assert np.abs(out[0] - sequences.expected(0, 40)).max() < 1e-5


class Unchosen(ReferenceBackend):
    """Serves rows that see all keys, as kernels do, and notes which they were."""

    def __init__(self) -> None:
        self.served: list[int] = []

    def serves(self, case: AttentionCase) -> bool:
        return not case.chosen

    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        self.served += metadata.keys.tolist()
        return super().prepare(metadata)


@pytest.mark.parametrize("ends", [(30,), (10, 30), (9, 11, 30), (3, 12, 13, 30)])
def test_who_computes_a_row_follows_from_its_position(ends: tuple[int, ...]) -> None:
    kernels = Unchosen()
    sequences = Sequences(PLAIN, 2, backends=[kernels])
    outs = [
        sequences.step((0, start, end - start), (1, start, end - start))[0][0]
        for start, end in zip((0, *ends), ends, strict=False)
    ]
    assert sorted(set(kernels.served)) == list(range(LIMIT))
    wanted = np.stack([sequences.expected(0, row) for row in range(30)])
    assert np.abs(np.concatenate(outs) - wanted).max() < 1e-5
