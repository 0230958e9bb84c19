"""Descriptions of decoders as frozen values, much like a table in a paper.

A family is a function from `config.json` to a `Description`. Each part makes the module that
computes it, so new kinds of mixers and feed-forward blocks need no change here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol, Self

from quire.cache.specs import LayerSpec
from quire.device.ranks import WHOLE, Part
from quire.models.base import Module
from quire.models.layers.norm import LayerNorm, RankNorm, RMSNorm, UnweightedNorm
from quire.models.layers.rope import RopeParameters
from quire.models.shares import Cut, Cuts, Split, within

Rotation = tuple[int, RopeParameters]
"""Head size and rotary parameters."""


class NormPlacement(Enum):
    """The places of a layer's norms."""

    PRE = "before each block"
    POST = "after each block, before it is added"
    ADDED = "after each block and its input were added"
    SECOND = "before the second block only"
    SANDWICH = "before and after each block"
    PARALLEL = "once, before both blocks, which are added together"
    BESIDE = "before each block, both of which read what comes in"
    SHORTCUT = "before each block, of two layers whose experts are added behind both"
    STREAMS = "before each block, which reads and writes several residual streams"
    MIXING = "before each block, which reads a mixture of several sums of layers before"
    STARTING = "as MIXING, of a layer with which another sum starts"
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

    def module_of(self, part: Part, dim: int) -> Module:
        """Return a module that normalises an axis of which a rank has `dim` values."""
        if part == WHOLE:
            return self.module(dim)
        return RankNorm(dim, self.eps, part, centred=self.centred, bias=self.bias)


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

    def share(self, split: Split) -> tuple[Self, Cuts]:
        """Return a rank's share, whose outputs are summed, and how the module's weights are cut.

        Raises:
            ModelError: it cannot be divided by so many.
        """
        ...


class FeedForward(Protocol):
    """Description of a feed-forward block, which treats each token alone; a frozen dataclass."""

    def module(self, hidden_size: int) -> Module:
        """Return the module, which is called with `[T, hidden]`."""
        ...

    def share(self, split: Split) -> tuple[Self, Cuts]:
        """Return a rank's share, see `Mixer.share`."""
        ...


class Residuals(Protocol):
    """Description of several parts, `hidden` wide each, that rows hold side by side between
    layers; a frozen dataclass.
    """

    def count(self, layers: int) -> int:
        """Return the number of parts behind as many layers; behind none, each is the embedding."""
        ...

    def head(self, hidden_size: int) -> Module:
        """Return the module that makes one part of them, called with the last layer's output."""
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

    def share(self, split: Split) -> tuple[Layer, Cuts]:
        """Return a rank's share, see `Mixer.share`."""
        cuts: dict[str, Cut] = {}
        mixers: list[Mixer] = []
        for mixer in self.mixers:
            own, found = mixer.share(split)
            mixers.append(own)
            cuts |= within(mixer.attribute, found)
        fed = self.feed_forward
        if fed is not None:
            fed, found = fed.share(split)
            cuts |= within("mlp", found)
        return replace(self, mixers=tuple(mixers), feed_forward=fed), cuts


@dataclass(frozen=True)
class Description:
    """Description of a decoder.

    Attributes:
        norm: the norm after the last layer, and by default in all layers.
        block_norm: the layers' norm, if it differs.
        after_norm: the norm behind the blocks of a sandwich, if it differs from that before them.
        embedding_norm: the norm of the embeddings; None means none.
        embedding_multiplier: factor of the token embeddings.
        residual_multiplier: factor of each block's output.
        head_multiplier: factor of the head's input.
        logit_softcap: softcap of the logits, by a hyperbolic tangent.
        tied_head: whether the head is the embedding table.
        positions: rows of the table of learned positions, added to embeddings; 0 means none.
        marks: rows of the embedding table after the vocabulary's, of placeholders that are never
            generated.
        part: the rank whose share this is. The outputs of the ranks' blocks are summed, and each
            has as many rows of the head.
        residuals: what rows hold between layers, if that is more than one sum.
        ahead: the layer with which some checkpoints predict the token after the next.
    """

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm
    placement: NormPlacement = NormPlacement.PRE
    block_norm: Norm | None = None
    after_norm: Norm | None = None
    embedding_norm: Norm | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    head_multiplier: float = 1.0
    logit_softcap: float | None = None
    tied_head: bool = False
    head_bias: bool = False
    positions: int = 0
    marks: int = 0
    part: Part = WHOLE
    residuals: Residuals | None = None
    ahead: Layer | None = None

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The mixers of all layers, in order. Each keeps a state."""
        return tuple(mixer for layer in self.layers for mixer in layer.mixers)

    def share(self, split: Split) -> tuple[Description, Cuts]:
        """Return a rank's share, see `Mixer.share`. The head has rows of its own there."""
        cuts: dict[str, Cut] = {}
        layers: list[Layer] = []
        for number, layer in enumerate(self.layers):
            own, found = layer.share(split)
            layers.append(own)
            cuts |= within(f"model.layers.{number}", found)
        shared = tuple(layers)
        return replace(self, layers=shared, tied_head=False, part=split.part, ahead=None), cuts
