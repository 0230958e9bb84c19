"""The contract between a model and the engine.

A model is a function of weights, a step's inputs and the KV pools. It never sees a mask, a cache
object, a batch size or a request: the tokens of all sequences in a step come as one flat list, each
with its own position, and `ForwardContext.attend` lets a row see exactly its visible keys.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from quire.cache.specs import LayerSpec
from quire.core.media import CrossMedia, Pieces, PlacedMedia
from quire.device.recurrence import DeltaGates


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows of a step that stand for media; an encoder made their embeddings.

    Attributes:
        rows: `[M]` int32, among the step's T.
        values: `[M, hidden]`.
        deeper: further values, of those rows whose encoder has several levels: the first are added
            behind the decoder's first layer, and so on.
    """

    rows: mx.array
    values: mx.array
    deeper: tuple[MediaRows, ...] = ()

    @classmethod
    def of(cls, items: Sequence[tuple[npt.NDArray[np.int32], tuple[mx.array, ...]]]) -> MediaRows:
        """Combine each item's row indices with its encoder's outputs, level by level."""
        first, *deeper = (
            cls(
                mx.array(np.concatenate([rows for rows, made in items if level < len(made)])),
                mx.concatenate([made[level] for _, made in items if level < len(made)]),
            )
            for level in range(max(len(made) for _, made in items))
        )
        return cls(first.rows, first.values, tuple(deeper))

    def placed(self, embeddings: mx.array) -> mx.array:
        """Return the embeddings of all rows `[T, hidden]`, with the encoder's in their places."""
        embeddings[self.rows] = self.values.astype(embeddings.dtype)
        return embeddings

    def deepened(self, hidden: mx.array, layer: int) -> mx.array:
        """Add the encoder's values of this level to a layer's output, `[T, hidden]`."""
        if layer >= len(self.deeper):
            return hidden
        added = self.deeper[layer]
        return hidden.at[added.rows].add(added.values.astype(hidden.dtype))


@dataclass(frozen=True, slots=True)
class CrossRows:
    """The media that rows of a step attend to through cross-attention layers.

    Attributes:
        attending: `[T, 1]`, true for rows that attend to anything; None where all do.
        states: `[M, hidden]`, an encoder's rows for the media whose keys and values this step
            computes; None where earlier steps have computed all of them.
    """

    attending: mx.array | None
    states: mx.array | None


class ForwardContext(Protocol):
    """A model's view of one step: T rows, one per token, of any number of sequences.

    Attributes:
        tokens: `[T]` int32; a row of media has the id of the token that marks it.
        positions: `[T]` int32, or `[axes, T]` float32 for multimodal RoPE.
        media: None when there are no such rows.
        cross: None when no row attends to media; cross-attention layers then change nothing.
    """

    tokens: mx.array
    positions: mx.array
    media: MediaRows | None
    cross: CrossRows | None

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
        """Writes k and v, then lets each row of q see the keys in its range.

        Args:
            layer: index into the model's `layout`; its spec says what is visible.
            q: `[T, heads, head_dim]`, rotated.
            k, v: `[T, kv_heads, head_dim]`, rotated, and `[T, kv_heads, value_dim]`; None for a
                `SharedKV` layer. Of a `CrossKV` layer `[M, ...]`, those of `cross.states`.
            scale: multiplies the logits.
            softcap: caps them then: `softcap * tanh(logits / softcap)`.
            sinks: `[heads]`, extra logits that take weight and give nothing.
            chosen_by: a layer whose `choose` said which of the keys in its range each row sees;
                None lets it see all.

        Returns:
            `[T, heads, value_dim]`; zeros for rows that see nothing.
        """
        ...

    def choose(self, layer: int, q: mx.array, k: mx.array, weights: mx.array, limit: int) -> None:
        """Writes an indexer's keys, then has it choose keys for each row, see `attend`.

        A key's score is the sum over heads of `weights * max(q . k, 0)`, in float32. The keys of
        highest score among those that are visible are chosen, of equal ones the first.

        Args:
            layer: index into the model's `layout`; its spec has an `index_dim`.
            q: `[T, heads, index_dim]`, rotated.
            k: `[T, index_dim]`, rotated.
            weights: `[T, heads]`.
            limit: the most keys that a row sees.
        """
        ...

    def convolve(
        self, layer: int, x: mx.array, taps: mx.array, bias: mx.array | None, *, silu: bool
    ) -> mx.array:
        """Apply one filter per channel over each sequence's last tokens, then SiLU if `silu`.

        Reads and replaces the array "conv" of the layer's `RecurrentState`.

        Args:
            x: `[T, channels]`.
            taps: `[channels, kernel]`.
            bias: `[channels]`.

        Returns:
            `[T, channels]`.
        """
        ...

    def delta_rule(
        self, layer: int, mixed: mx.array, gates: DeltaGates, key_heads: int
    ) -> mx.array:
        """Advance each sequence's array "delta" by the gated delta rule (arXiv:2412.06464).

        Args:
            mixed: `[T, channels]`, see `Operations.gated_delta`.
            gates: whose `steps` and `betas` begin with an axis of `T`.

        Returns:
            `[T, value_heads, value_dim]`.
        """
        ...

    def state_space(
        self,
        layer: int,
        values: mx.array,
        keys: mx.array,
        queries: mx.array,
        steps: mx.array,
        rates: mx.array,
    ) -> mx.array:
        """Advance each sequence's array "state": decay, add the value at the key, read.

        Args:
            values: `[T, heads, head_dim]`.
            keys, queries: `[T, groups, state_dim]`.
            steps: `[T, heads]`.
            rates: see `Operations.state_space`. All are float32.

        Returns:
            `[T, heads, head_dim]`.
        """
        ...

    def sampled_rows_only(self) -> tuple[ForwardContext, mx.array] | None:
        """Return the narrowed context for layers after which nothing more is stored.

        Then only the rows matter whose hidden states are wanted, the last of each prompt that is
        read to its end among them.

        Returns:
            A step of those rows, and where they are among this one's, `[R]`; the model returns
            `[R, hidden]` then. None when they are all of them, or when nobody wants any.
        """
        ...


class Module(nn.Module):
    """MLX's module with a typed constructor. A leading underscore marks what is no weight."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # MLX does not annotate it


Encoding = Generator[tuple[mx.array, ...], None, tuple[mx.array, ...]]
"""An item that is being encoded: gives what each piece but the last has computed, then the rows."""


class MediaEncoder(Module):
    """Makes embedding rows of one kind of media: encoder and projector of a checkpoint.

    A step computes as many pieces of an item as its time allows. One that is not cut is one piece;
    `CutEncoder` is the base of those that are.
    """

    @abstractmethod
    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the features of an item of this shape."""

    @abstractmethod
    def rows(self, shape: tuple[int, ...]) -> int:
        """Return the rows that an item of this shape becomes.

        Raises:
            RequestError: the encoder does not take that shape; names the limit.
        """

    def cross_keys(self, shape: tuple[int, ...]) -> int:
        """Return how many rows cross-attention layers attend to; 0 where rows replace embeddings.

        Where there are any, the item stands in the prompt as `rows` usual tokens.
        """
        return 0

    @abstractmethod
    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        """uint8 `[feature_bytes]`, as in `MediaItem`, to arrays `[rows, hidden]`.

        The first takes the place of the placeholders' embeddings. An encoder of several levels
        (DeepStack, arXiv:2406.04334) gives more of them; see `MediaRows.deeper`.
        """

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        """Return how `encode` cuts the work on an item of this shape."""
        return Pieces(1, self.rows(shape))

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        """Encode in pieces; the result is that of calling the encoder."""
        yield from ()
        return self(features, shape)


class CutEncoder(MediaEncoder):
    """An encoder that is cut: by layers where all of an item sees all of it, else by its parts too.

    The cuts depend on the shape alone, so that the rows do not depend on the steps' time.
    """

    @abstractmethod
    def pieces(self, shape: tuple[int, ...]) -> Pieces: ...

    @abstractmethod
    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        """Encode in pieces. Between pieces, yield the hidden states that the next one needs."""

    def __call__(self, features: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, ...]:
        return finished(self.encode(features, shape))


def finished(encoding: Encoding, pieces: int | None = None) -> tuple[mx.array, ...]:
    """Return the rows, by all the pieces that are left.

    Args:
        pieces: how many those are; None if the caller does not know.
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
    """Base of every decoder. Subclasses mirror their checkpoint's names."""

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        """Encoders by media kind; empty for a model that takes text only."""
        return {}

    def positions(
        self, tokens: Sequence[int], media: Sequence[PlacedMedia]
    ) -> npt.NDArray[np.float32] | None:
        """Return the positions of a prompt's tokens, `[axes, T]`: usually time, height, width.

        They need not be whole. None where a token's position is its index. Families with multimodal
        RoPE override it.
        """
        return None

    def cross_media(self, media: Sequence[PlacedMedia]) -> tuple[CrossMedia, ...]:
        """Return the media that a prompt's tokens attend to through cross-attention, in order."""
        return ()

    @property
    @abstractmethod
    def layout(self) -> tuple[LayerSpec, ...]:
        """The state that each layer keeps, in order.

        Here a layer is a block that mixes tokens: a checkpoint's may have none of these, or two.
        """

    @property
    def own_layout(self) -> tuple[LayerSpec, ...]:
        """The same without the layer of a head that looks ahead."""
        return self.layout

    def add_head(self, tensors: Iterable[str]) -> bool:
        """Add the checkpoint's head for `look_ahead`, before the weights are loaded.

        Args:
            tensors: names of the checkpoint's tensors.

        Returns:
            Whether there is one.
        """
        return False

    def look_ahead(self, hidden: mx.array, following: mx.array, step: ForwardContext) -> mx.array:
        """Return the expected final hidden states of the tokens after a step's rows.

        Writes the keys and values of the head's layer. For models with a head.

        Args:
            hidden: `[T, hidden]`, final states of the rows.
            following: `[T]` int32, the token after each row's token.

        Returns:
            `[T, hidden]`, ready for `logits`.
        """
        raise NotImplementedError

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Columns of `logits`."""

    @property
    def embedded_tokens(self) -> int:
        """Tokens that a prompt may hold: ids below it. More than `vocab_size` where those that mark
        media are generated by nobody."""
        return self.vocab_size

    @abstractmethod
    def __call__(self, step: ForwardContext) -> mx.array:
        """Final hidden states, normalised, ready for `logits`: `[T, hidden]`.

        `[R, hidden]` when it took `ForwardContext.sampled_rows_only`.
        """

    @abstractmethod
    def logits(self, hidden: mx.array) -> mx.array:
        """`[R, hidden]` -> `[R, vocab]` in float32, softcapped where the family does so."""

    @abstractmethod
    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Translates foreign checkpoint names and layouts (Hugging Face, MLX) to this module's.

        What it leaves out is left out by name. Arrays may be packed codes with their `scales`.
        """


def named_parameters(module: nn.Module) -> dict[str, mx.array]:
    """Return all weights by their path, e.g. `model.norm.weight`."""
    flat: Any = tree_flatten(module.parameters())
    return dict(flat)


def named_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold no others, by their path, e.g. `model.norm`."""
    flat: Any = tree_flatten(module.leaf_modules(), is_leaf=nn.Module.is_module)
    return dict(flat)
