"""The interface of an attention backend, and the choice among them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from quire.attention.metadata import AttentionMetadata
from quire.cache.formats.base import LayerStore, WrittenBlocks
from quire.cache.specs import KVSpec
from quire.core.kv_format import KVFormat


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """A kind of work for a backend, for one layer and one sequence.

    Attributes:
        format: how the layer's blocks are stored; plain in layers that a packed format skips.
        spec: heads and sizes of keys and values, and visible ranges.
        block_size: tokens per block.
        heads: number of query heads.
        rows: rows of the sequence in this step; 1 if it generates.
        dtype: type of queries and of the result.
        softcap: whether logits are capped.
        sinks: whether extra logits take weight.
        chosen: whether rows see only the keys that an indexer chose.
        beside: whether rows see keys that are in no block.
    """

    format: KVFormat
    spec: KVSpec
    block_size: int
    heads: int
    rows: int
    dtype: mx.Dtype
    softcap: bool
    sinks: bool
    chosen: bool = False
    beside: bool = False

    @property
    def values_by_channel(self) -> bool:
        """Whether values are parts of keys that are coded by channel."""
        return self.spec.value_in_key and self.format.has_tail


class KeysBeside(NamedTuple):
    """Keys that a row sees after those in its blocks, and their values.

    Attributes:
        k, v: `[T, kv_heads, n, head_dim]` and `[T, kv_heads, n, value_dim]`.
    """

    k: mx.array
    v: mx.array

    def part(self, rows: slice) -> KeysBeside:
        """Return the keys of some rows."""
        return KeysBeside(self.k[rows], self.v[rows])

    def of_heads(self, heads: slice) -> KeysBeside:
        """Return the keys of some heads."""
        return KeysBeside(self.k[:, heads], self.v[:, heads])


class Scoring(NamedTuple):
    """The parameters that turn queries times keys into weights.

    Attributes:
        scale: multiplies the logits.
        softcap: caps the scaled logits: `softcap * tanh(logits / softcap)` (Gemma 2).
        sinks: `[heads]`, extra logits, which take weight but have no value; they are not capped.
        chosen: `[T, K]` int32, the keys that each row sees of those in its range: in ascending
            order, and then -1 where there are fewer. None lets it see all.
        beside: keys in no block, which each row sees as well; for sequences with one row.
    """

    scale: float
    softcap: float | None = None
    sinks: mx.array | None = None
    chosen: mx.array | None = None
    beside: KeysBeside | None = None

    def part(self, rows: slice) -> Scoring:
        """Return the scoring of some rows."""
        chosen, beside = self.chosen, self.beside
        if chosen is not None:
            chosen = chosen[rows]
        if beside is not None:
            beside = beside.part(rows)
        return self._replace(chosen=chosen, beside=beside)

    def of_heads(self, heads: slice, group: int) -> Scoring:
        """Return the scoring of some heads of keys.

        Args:
            group: heads of queries for each of them.
        """
        sinks, beside = self.sinks, self.beside
        if sinks is not None:
            sinks = sinks[heads.start * group : heads.stop * group]
        if beside is not None:
            beside = beside.of_heads(heads)
        return self._replace(sinks=sinks, beside=beside)


class PreparedAttention(ABC):
    """A backend's preparation of some sequences of a step, shared by the layers of a KV group."""

    @abstractmethod
    def forward(
        self, q: mx.array, store: LayerStore, written: WrittenBlocks | None, scoring: Scoring
    ) -> mx.array:
        """Attend: each row sees its range of keys. This step's keys and values are written already.

        Args:
            q: `[T, heads, head_dim]`.
            written: in formats with tails, the blocks that the sequences with several rows wrote
                in this step, if there are any.

        Returns:
            `[T, heads, value_dim]`, of q's type.
        """

    def rehearse(self, q: mx.array, store: LayerStore, scoring: Scoring) -> None:
        """Make the arrays that `forward` reads from the host. Its result is not computed."""
        self.forward(q, store, written=None, scoring=scoring)


class AttentionBackend(ABC):
    """A way to compute attention over blocks. Stateless between steps.

    Attributes:
        name: name shown to people.
    """

    name: str

    @abstractmethod
    def serves(self, case: AttentionCase) -> bool:
        """Return whether the backend supports a case. Asked once a case, so it may be slow."""

    @property
    def problem(self) -> str | None:
        """Return why the backend does not work on this machine; None if a small case works.

        This may take as long as compiling a kernel.
        """
        return None

    @abstractmethod
    def prepare(self, metadata: AttentionMetadata) -> PreparedAttention:
        """Prepare a KV group and format, once a step before the group's first layer."""


class AttentionUse(NamedTuple):
    """A kind of attention that layers of a model ask for; see `StepAttention.uses`.

    Attributes:
        owner: a layer whose keys and values are read.
        heads, head_dim, dtype: of queries.
        backend: serves the first of the step's rows.
    """

    group: int
    owner: int
    heads: int
    head_dim: int
    dtype: mx.Dtype
    scoring: Scoring
    backend: AttentionBackend


class Backends:
    """The backends of this process by preference. The last one supports every case."""

    def __init__(self, backends: Sequence[AttentionBackend]) -> None:
        self._backends = tuple(backends)
        self._chosen: dict[AttentionCase, AttentionBackend] = {}

    @property
    def all(self) -> tuple[AttentionBackend, ...]:
        """The backends of this process, by preference."""
        return self._backends

    def backend_for(self, case: AttentionCase) -> AttentionBackend:
        """Return the first backend that supports a case.

        Raises:
            LookupError: none does.
        """
        chosen = self._chosen.get(case)
        if chosen is None:
            chosen = next((each for each in self._backends if each.serves(case)), None)
            if chosen is None:
                raise LookupError(f"no attention backend serves {case}")
            self._chosen[case] = chosen
        return chosen
