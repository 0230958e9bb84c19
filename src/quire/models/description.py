"""Descriptions of decoders as frozen values, much like a table in a paper.

A family is a function from `config.json` to a `Description`. Each part makes the module that
computes it, so new kinds of mixers and feed-forward blocks need no change here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from quire.cache.specs import LayerSpec
from quire.models.base import Module
from quire.models.layers.norm import LayerNorm, RMSNorm, UnweightedNorm
from quire.models.layers.rope import RopeParameters

Rotation = tuple[int, RopeParameters]
"""Head size and rotary parameters."""


class NormPlacement(Enum):
    """The places of a layer's norms."""

    PRE = "before each block"
    POST = "after each block, before it is added"
    SANDWICH = "before and after each block"
    PARALLEL = "once, before both blocks, which are added together"
    BESIDE = "before each block, both of which read what comes in"
    GATED = "before each block, whose output a learned gate weighs; for rows that attend to media"


@dataclass(frozen=True)
class Norm:
    """Root mean square (arXiv:1910.07467), or LayerNorm (arXiv:1607.06450) if `centred`.

    Attributes:
        bias: whether LayerNorm has a bias.
        weighted: whether the norm has a weight.
    """

    eps: float
    centred: bool = False
    bias: bool = False
    weighted: bool = True

    def module(self, *shape: int) -> Module:
        """Return a module that normalises the last axis; `shape` is its weight's, one axis unless
        `centred`.
        """
        if self.centred:
            return LayerNorm(shape, self.eps, self.bias)
        if not self.weighted:
            return UnweightedNorm(self.eps)
        (dim,) = shape
        return RMSNorm(dim, self.eps)


class Mixer(Protocol):
    """Description of a block that mixes tokens; implementations are frozen dataclasses."""

    @property
    def attribute(self) -> str:
        """The module's name within a layer, as in checkpoints."""
        ...

    @property
    def rotation(self) -> Rotation | None:
        """Rotation of the queries and keys; None if they are not rotated."""
        ...

    @property
    def spec(self) -> LayerSpec:
        """The state that the block keeps."""
        ...

    def module(self, hidden_size: int, layer: int) -> Module:
        """Return the module, which is called with `x`, the step, and the rotation of its positions,
        if any.

        Args:
            layer: index of the block's state in the model's layout.
        """
        ...


class FeedForward(Protocol):
    """Description of a feed-forward block, which treats each token alone; a frozen dataclass."""

    def module(self, hidden_size: int) -> Module:
        """Return the module, which is called with `[T, hidden]`."""
        ...


@dataclass(frozen=True)
class Layer:
    """Description of a layer.

    Attributes:
        mixers: blocks that mix tokens; several read the same rows, and their outputs are added.
            There may be none if norms are before each block.
        feed_forward: the feed-forward block; None for a layer without one, under the same
            condition.
        placement: places of the norms; None means the decoder's.
        by_token: whether the feed-forward block also gets the rows' tokens `[T]`.
    """

    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    placement: NormPlacement | None = None
    by_token: bool = False


@dataclass(frozen=True)
class Description:
    """Description of a decoder.

    Attributes:
        norm: the norm after the last layer, and by default in all layers.
        block_norm: the layers' norm, if it differs.
        embedding_multiplier: factor of the token embeddings.
        residual_multiplier: factor of each block's output.
        head_multiplier: factor of the head's input.
        logit_softcap: softcap of the logits, by a hyperbolic tangent.
        tied_head: whether the head is the embedding table.
        marks: rows of the embedding table after the vocabulary's, of placeholders that are never
            generated.
        ranks: number of processes that the model is split over; the outputs of their blocks are
            summed.
        head_rows: rows of the head in this process, if the model is split.
        ahead: the layer with which some checkpoints predict the token after the next.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    placement: NormPlacement = NormPlacement.PRE
    block_norm: Norm | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    head_multiplier: float = 1.0
    logit_softcap: float | None = None
    tied_head: bool = False
    head_bias: bool = False
    marks: int = 0
    ranks: int = 1
    head_rows: int = 0
    ahead: Layer | None = None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of all layers, in order. Each keeps a state."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)
