"""The interface between models and the engine.

A model is a function of weights, a step's inputs and the KV pools. It sees no mask, cache object,
batch size or request: the tokens of all sequences of a step are one flat list, each with its own
position, and `ForwardContext.attend` lets each row see exactly its visible keys.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from quire.cache.specs import LayerSpec
from quire.core.media import CrossMedia, Pieces, PlacedMedia
from quire.device.recurrence import DeltaGates
from quire.models.media_rows import MediaRows
from quire.models.shares import Cuts, Split


@dataclass(frozen=True, slots=True)
class CrossRows:
    """Media that rows of a step attend to in cross-attention layers.

    Attributes:
        attending: bool `[T, 1]`, which rows attend to media; None if all do.
        states: `[M, hidden]`, encoder rows of media whose keys and values this step computes; None
            if earlier steps computed all.
    """

    attending: mx.array | None
    states: mx.array | None


class ForwardContext(ABC):
    """A model's view of one step: T rows, one per token, of any number of sequences.

    Attributes:
        tokens: int32 `[T]`; rows of media have the id of their placeholder.
        positions: int32 `[T]`, or float32 `[axes, T]` for multimodal RoPE.

    Args:
        media: rows of media; None if there are none.
        cross: media for cross-attention; None if no row attends to any, so that these layers change
            nothing.
    """

    tokens: mx.array
    positions: mx.array

    def __init__(self, media: MediaRows | None = None, cross: CrossRows | None = None) -> None:
        self.media, self.cross = media, cross

    @abstractmethod
    def attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        chosen_by: int | None = None,
    ) -> mx.array:
        """Write k and v to the cache, then attend from each row of q to its visible keys.

        Args:
            layer: index into the model's `layout`, whose spec defines what is visible.
            q: `[T, heads, head_dim]`, rotated.
            k, v: `[T, kv_heads, head_dim]`, rotated, and `[T, kv_heads, value_dim]`; None for
                `SharedKV` layers. For `CrossKV` layers `[M, ...]`, computed from `cross.states`.
            scale: factor of the logits.
            softcap: if given, scaled logits become `softcap * tanh(logits / softcap)`.
            sinks: `[heads]`, extra logits in the softmax, without a value.
            chosen_by: layer whose `choose` selected the keys that each row sees; None means all
                visible keys.

        Returns:
            `[T, heads, value_dim]`; zeros for rows without visible keys.
        """
        ...

    @abstractmethod
    def choose(self, layer: int, q: mx.array, k: mx.array, weights: mx.array, limit: int) -> None:
        """Write an indexer's keys, then select keys for each row, for `attend`.

        A key's score is the sum over heads of `weights * max(q . k, 0)`, in float32. The visible
        keys of highest score are selected; of equal scores the earlier key.

        Args:
            layer: index into the model's `layout`; its spec has an `index_dim`.
            q: `[T, heads, index_dim]`, rotated.
            k: `[T, index_dim]`, rotated.
            weights: `[T, heads]`.
            limit: the most keys that a row sees.
        """
        ...

    @abstractmethod
    def convolve(
        self, layer: int, x: mx.array, taps: mx.array, bias: mx.array | None, *, silu: bool
    ) -> mx.array:
        """Apply one filter per channel over each sequence's last tokens, then SiLU if `silu`.

        This updates the array "conv" of the layer's `RecurrentState`.

        Args:
            x: `[T, channels]`.
            taps: `[channels, kernel]`.
            bias: `[channels]`.

        Returns:
            `[T, channels]`.
        """
        ...

    @abstractmethod
    def delta_rule(
        self, layer: int, mixed: mx.array, gates: DeltaGates, key_heads: int
    ) -> mx.array:
        """Advance each sequence's array "delta" by the gated delta rule (arXiv:2412.06464).

        Args:
            mixed: `[T, channels]`, see `Operations.gated_delta`.
            gates: the gates; the first axis of `steps` and `betas` is `T`.

        Returns:
            `[T, value_heads, value_dim]`.
        """
        ...

    @abstractmethod
    def state_space(
        self,
        layer: int,
        values: mx.array,
        keys: mx.array,
        queries: mx.array,
        steps: mx.array,
        rates: mx.array,
    ) -> mx.array:
        """Advance each sequence's array "state": decay it, add the outer product of value and key,
        and read it with the query.

        Args:
            values: `[T, heads, head_dim]`.
            keys, queries: `[T, groups, state_dim]`.
            steps: `[T, heads]`.
            rates: see `Operations.state_space`. All are float32.

        Returns:
            `[T, heads, head_dim]`.
        """
        ...

    @abstractmethod
    def sampled_rows_only(self) -> tuple[ForwardContext, mx.array] | None:
        """Return a narrowed context for layers after which nothing is stored any more.

        It holds only the rows whose hidden states are needed, such as the last row of each finished
        prompt.

        Returns:
            The context of these rows, and their indices `[R]`; the model then returns `[R,
                hidden]`. None if all rows are needed, or if none is.
        """
        ...


class Module(nn.Module):
    """MLX's module with a typed constructor. Attributes with a leading underscore are not
    weights.

    Attributes:
        same_rows: names of its linear layers that multiply the same rows, set by set. A device may
            join the matrices of each set.
    """

    same_rows: ClassVar[tuple[tuple[str, ...], ...]] = ()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # MLX does not annotate it


Encoding = Generator[tuple[mx.array, ...], None, tuple[mx.array, ...]]
"""An item being encoded: yields the state after each piece but the last, and returns the rows."""


class MediaEncoder(Module):
    """Computes embeddings of one media kind: a checkpoint's encoder and projector.

    A step computes as many pieces of an item as its time allows. By default an item is one piece;
    encoders derived from `CutEncoder` have several.
    """

    @abstractmethod
    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the size in bytes of the features of an item of this shape."""

    @abstractmethod
    def rows(self, shape: tuple[int, ...]) -> int:
        """Return the number of rows of an item of this shape.

        Raises:
            RequestError: the encoder does not take this shape; the message names the limit.
        """

    @property
    def example_shape(self) -> tuple[int, ...]:
        """The shape of a small item: by default a picture of 24 by 24 patches."""
        return (24, 24)

    @property
    def levels(self) -> int:
        """The most arrays that an item is encoded to; see `__call__`."""
        return 1

    def cross_keys(self, shape: tuple[int, ...]) -> int:
        """Return the number of rows for cross-attention; 0 if the rows replace embeddings instead.

        If there are any, the item's `rows` in the prompt are ordinary tokens.
        """
        return 0

    @abstractmethod
    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        """Encode features, uint8 `[feature_bytes]` as in `MediaItem`, to arrays `[rows, hidden]`.

        The first array replaces the placeholders' embeddings. Encoders of several levels
        (DeepStack, arXiv:2406.04334) return further ones, see `MediaRows.levels`.
        """

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        """Return how `encode` divides the work on an item of this shape."""
        return Pieces(1, self.rows(shape))

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        """Encode in pieces; the result equals that of calling the encoder."""
        yield from ()
        return self(features, shape)

    @property
    def takes_several(self) -> bool:
        """Whether the features may be those of several items of one shape, one after the other. The
        rows then are theirs, in the same order.
        """
        return False


class CutEncoder(MediaEncoder):
    """An encoder that works in pieces: by layers, and by independent parts of an item if there are
    any.

    The pieces depend only on the shape, so the result does not depend on the steps' time.
    """

    @abstractmethod
    def pieces(self, shape: tuple[int, ...]) -> Pieces: ...

    @abstractmethod
    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        """Encode in pieces. Between pieces, yield the hidden states that the next piece needs."""

    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        return finished(self.encode(features, shape))


def finished(encoding: Encoding, pieces: int | None = None) -> tuple[mx.array, ...]:
    """Compute all remaining pieces and return the rows.

    Args:
        pieces: number of remaining pieces; None if unknown.
    """
    done = 0
    while True:
        try:
            next(encoding)
        except StopIteration as end:
            rows: tuple[mx.array, ...] = end.value
            return rows
        done += 1
        assert done != pieces, "an encoding has more pieces than its encoder said"


class LanguageModel(Module):
    """Base class of decoders and encoders of text. Subclasses use their checkpoint's names.

    Attributes:
        typed_by: name of the weight whose type is that of the activations.
    """

    typed_by: ClassVar[str] = "model.norm.weight"

    @property
    def projections(self) -> Sequence[Callable[[mx.array], mx.array]]:
        """The layers that a pooled vector passes, in order; the loader adds them as "pooled"."""
        layers: Sequence[Callable[[mx.array], mx.array]] = self.get("pooled", ())
        return layers

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        """Encoders by media kind; empty for models that take only text."""
        return {}

    def positions(
        self, tokens: Sequence[int], media: Sequence[PlacedMedia]
    ) -> npt.NDArray[np.float32] | None:
        """Return the positions of a prompt's tokens, `[axes, T]`, usually time, height and width.

        They may be fractional. Return None if a token's position is its index. Families with
        multimodal RoPE override this.
        """
        return None

    @property
    def position_axes(self) -> int:
        """Axes of `positions` of prompts with media; 0 if a token's position is its index."""
        return 0

    def cross_media(self, media: Sequence[PlacedMedia]) -> tuple[CrossMedia, ...]:
        """Return the media that a prompt's tokens attend to by cross-attention, in order."""
        return ()

    @property
    @abstractmethod
    def layout(self) -> tuple[LayerSpec, ...]:
        """The state that each layer keeps, in order.

        A layer here is a block that mixes tokens; a checkpoint's layer may have none of these, or
        two.
        """

    @property
    def own_layout(self) -> tuple[LayerSpec, ...]:
        """The layout without the layers of multi-token prediction heads."""
        return self.layout

    def add_heads(self, tensors: Iterable[str]) -> int:
        """Add the checkpoint's heads for `look_ahead`, before the weights are loaded.

        Args:
            tensors: names of the checkpoint's tensors.

        Returns:
            Number of heads.
        """
        return 0

    def final(self, output: mx.array) -> mx.array:
        """Return the final hidden states `[T, hidden]` of a step's output."""
        return output

    def look_ahead(
        self, hidden: mx.array, following: mx.array, step: ForwardContext, head: int = 0
    ) -> mx.array:
        """Return the expected final hidden states of the tokens after a step's rows.

        Writes the keys and values of the head's layer. For models with heads.

        Args:
            hidden: `[T, hidden]`, final states of the rows, or what the head before returned.
            following: `[T]` int32, the token after each row's token; for each head before, one
                token later.
            head: number of the head.

        Returns:
            `[T, hidden]`, ready for `logits`.
        """
        raise NotImplementedError

    @cached_property
    def bidirectional(self) -> bool:
        """Whether tokens see those after them: the model embeds texts, and generates none."""
        return any(spec.uncached is not None for spec in self.layout)

    @property
    def token_types(self) -> int:
        """Number of kinds of tokens; 0 if it knows none, else positions are index and kind."""
        return 0

    @property
    def labels(self) -> int:
        """Number of results of `classify`; 0 without a classification head."""
        return 0

    def classify(self, hidden: mx.array) -> mx.array:
        """Return the classification head's logits `[labels]` for a text's rows `[T, hidden]`."""
        raise NotImplementedError

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of columns of `logits`."""

    @property
    def embedded_tokens(self) -> int:
        """Number of token ids that a prompt may hold. More than `vocab_size` if media placeholders
        are never generated.
        """
        return self.vocab_size

    @abstractmethod
    def __call__(self, step: ForwardContext) -> mx.array:
        """Return final hidden states, normalised, as input of `logits`: `[T, hidden]`.

        The shape is `[R, hidden]` if the model used `ForwardContext.sampled_rows_only`.
        """

    @abstractmethod
    def logits(self, hidden: mx.array) -> mx.array:
        """Compute logits in float32, with the family's softcap: `[R, hidden]` -> `[R, vocab]`."""

    @abstractmethod
    def share(self, split: Split) -> tuple[Self, Cuts]:
        """Return a rank's share of the model, without weights, and how these are cut.

        The head is a separate `lm_head`, even if the model reuses its embedding table.

        Raises:
            ModelError: a layer cannot be divided by so many.
        """

    @abstractmethod
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Translate names and layouts of foreign checkpoints (Hugging Face, MLX) to this module's.

        Tensors are dropped only by name. Arrays may be quantised codes with their `scales`.
        """


def named_parameters(module: nn.Module) -> dict[str, mx.array]:
    """Return all weights by their path, e.g. `model.norm.weight`."""
    flat: Any = tree_flatten(module.parameters())
    return dict(flat)


def named_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules without submodules by path, e.g. `model.norm`."""
    flat: Any = tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module)
    return dict(flat)
