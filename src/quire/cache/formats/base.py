"""The interface of a KV format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from quire.cache.view import Ints, View
from quire.core.kv_format import KVFormat


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores a token: `kv_heads` keys and values of `head_dim` each.

    Attributes:
        dtype: the model's, of keys and values as they are computed.
    """

    kv_heads: int
    head_dim: int
    page_tokens: int
    dtype: mx.Dtype


class LayerStore(ABC):
    """One layer's pages in one format. Owned by the pool of its group; mutated by the runner only.

    A store begins with no pages; `resize` gives it some.
    """

    seals: ClassVar[bool] = False
    """Whether filled pages are coded and the open one is kept as written, in a pool of its own."""

    def __init__(self, shape: LayerShape, format: KVFormat) -> None:
        self.shape = shape
        self.format = format

    @classmethod
    @abstractmethod
    def page_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        """Bytes of one page of this layer, everything counted."""

    @classmethod
    def open_page_bytes(cls, shape: LayerShape, format: KVFormat) -> int:
        """Bytes of one open page of this layer; 0 where the format does not seal."""
        return 0

    @abstractmethod
    def resize(self, capacity: int, moves: tuple[tuple[int, int], ...]) -> None:
        """Mutates: moves pages (from id, to id), then cuts or extends to `capacity` pages."""

    def resize_open(self, capacity: int, moves: tuple[tuple[int, int], ...]) -> None:
        """Mutates: the same for open pages."""
        raise NotImplementedError(f"{self.format.scheme} pages have no open pool")

    @abstractmethod
    def write(self, k: mx.array, v: mx.array, view: View) -> None:
        """Mutates: stores this step's keys and values, `[T, kv_heads, head_dim]` each."""

    @abstractmethod
    def attend(
        self, q: mx.array, view: View, *, scale: float, sinks: mx.array | None = None
    ) -> mx.array:
        """Lets each row see its range of keys. q and the result: `[T, heads, head_dim]`."""

    @abstractmethod
    def arrays(self) -> list[mx.array]:
        """The arrays that hold the pages, open ones included."""

    @abstractmethod
    def export(self, pages: Ints) -> list[mx.array]:
        """The contents of pages, to be kept elsewhere or copied (lazy)."""

    @abstractmethod
    def restore(self, pages: Ints, contents: list[mx.array]) -> None:
        """Mutates: pages get contents that `export` gave."""
