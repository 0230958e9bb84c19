"""The projection of Gemma 3n's encoders into the decoder's width, and their own vocabulary."""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Module
from quire.models.layers.common import embed
from quire.models.layers.norm import RMSNorm, unweighted_norm


class OwnVocabulary(Protocol):
    """The arguments of an encoder that its embedder reads.

    Attributes:
        hidden_size: width of the encoder's rows.
        text_hidden_size: the decoder's width.
        vocab_size, vocab_offset: number and first id of the tokens embedded by this encoder.
    """

    @property
    def hidden_size(self) -> int: ...
    @property
    def text_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def vocab_offset(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...


class Embedder(Module):
    """Projects an encoder's rows and its own tokens to the decoder's width; e.g. `embed_audio.`."""

    def __init__(self, args: OwnVocabulary) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.rms_norm_eps
        self.args = args
        self.embedding = nn.Embedding(args.vocab_size, width)
        self.hard_embedding_norm = RMSNorm(width, eps=eps)
        self.soft_embedding_norm = RMSNorm(width, eps=eps)
        self.embedding_projection = nn.Linear(width, args.text_hidden_size, bias=False)
        self._norm = unweighted_norm(eps)

    def soft(self, rows: mx.array) -> mx.array:
        """Project encoder rows: `[rows, hidden_size]` -> `[rows, text_hidden_size]`."""
        return self._norm(self.embedding_projection(self.soft_embedding_norm(rows)))

    def hard(self, tokens: mx.array) -> mx.array:
        """Embed the encoder's tokens, given as ids less `vocab_offset`: `[T]` -> `[T,
        text_hidden_size]`.
        """
        dtype = self.hard_embedding_norm.weight.dtype
        rows = self.hard_embedding_norm(embed(self.embedding, tokens, dtype))
        return self._norm(self.embedding_projection(rows))


class OwnTokens:
    """Embeddings of an encoder's own tokens, such as the one that ends a sound."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._table: mx.array | None = None

    def placed(self, x: mx.array, tokens: mx.array) -> mx.array:
        """Replace the embeddings of the encoder's own tokens in `[T, hidden]`."""
        args = self._embedder.args
        if self._table is None:  # computed once, as weights never change
            self._table = self._embedder.hard(mx.arange(args.vocab_size))
            mx.eval(self._table)
        own = tokens - args.vocab_offset
        rows = self._table[mx.clip(own, 0, args.vocab_size - 1)]
        known = (own >= 0) & (own < args.vocab_size)
        return mx.where(known[:, None], rows.astype(x.dtype), x)
