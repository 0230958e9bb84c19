"""Description of a decoder as one value, as a paper's table gives it.

A family is a function from `config.json` to a `Description`. Each part knows the module that
computes it, so that a layer may mix tokens, or feed forward, in any way that has such a part.
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
"""Size of a head, and how it is rotated."""


class NormPlacement(Enum):
    """The places of a layer's norms, for input `x` and the blocks `attention` and `mlp`."""

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
        bias: LayerNorm adds one.
        weighted: without it, nothing is learned.
    """

    eps: float
    centred: bool = False
    bias: bool = False
    weighted: bool = True

    def module(self, *shape: int) -> Module:
        """Normalises the last axis; `shape` is that of its weight, of one axis without centring."""
        if self.centred:
            return LayerNorm(shape, self.eps, self.bias)
        if not self.weighted:
            return UnweightedNorm(self.eps)
        (dim,) = shape
        return RMSNorm(dim, self.eps)


class Mixer(Protocol):
    """How a layer mixes tokens: a frozen dataclass."""

    @property
    def attribute(self) -> str:
        """The module's name in checkpoints, within a layer."""
        ...

    @property
    def rotation(self) -> Rotation | None:
        """The rotation of its queries and keys."""
        ...

    @property
    def spec(self) -> LayerSpec:
        """The state that it keeps."""
        ...

    def module(self, hidden_size: int, layer: int) -> Module:
        """Called with `x`, the step, and the rotation of its positions, if it has one.

        Args:
            layer: index into the model's layout of what it keeps.
        """
        ...


class FeedForward(Protocol):
    """The feed-forward part of a layer, which sees each token alone: a frozen dataclass."""

    def module(self, hidden_size: int) -> Module:
        """Called with `[T, hidden]`."""
        ...


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        mixers: blocks that mix tokens; several read the same rows and are added together. A layer
            without any is possible where norms are before each block.
        feed_forward: None in a layer that only mixes, possible there too.
        placement: None is the decoder's.
        by_token: what feeds forward is called with the rows' tokens, `[T]`, as well.
    """

    mixers: tuple[Mixer, ...]
    feed_forward: FeedForward | None
    placement: NormPlacement | None = None
    by_token: bool = False


@dataclass(frozen=True)
class Description:
    """A decoder.

    Attributes:
        norm: behind the last layer, and in all.
        block_norm: of the layers, where it is another.
        embedding_multiplier: multiplies what the embedding table says of a token.
        residual_multiplier: multiplies what a block adds.
        head_multiplier: multiplies what the head reads.
        logit_softcap: bounds the logits by a hyperbolic tangent.
        tied_head: the head is the embedding table.
        marks: rows of the embedding table behind the vocabulary's, of marks that nobody generates.
        ranks: processes that the model is split over; what each of their blocks adds is summed.
        head_rows: rows of the head that this process has, where the model is split.
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
