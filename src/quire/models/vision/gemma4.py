"""Gemma 4's vision encoder: patches of one image become rows of the decoder's width (model cards).

It is a transformer without masks. A patch's place is encoded twice: by rows of two tables, one for
x and one for y, and by RoPE, with half of a head rotated by x and half by y. Squares of patches are
then averaged to soft tokens. Images are encoded one at a time in any shape, without padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError, RequestError
from quire.core.media import Pieces
from quire.core.values import require
from quire.models.arguments import read_arguments
from quire.models.base import CutEncoder, Encoding, Module
from quire.models.layers.clipped import ClippedLinear, Projector
from quire.models.layers.common import ACTIVATIONS, GATES
from quire.models.layers.encoder_attention import Parts
from quire.models.layers.norm import RMSNorm, unweighted_norm
from quire.models.layers.rope import Rope, RopeParameters, Rotate
from quire.models.settings import Settings


@dataclass(frozen=True)
class Gemma4VisionArguments:
    """The keys of `vision_config` that affect the computation, and the decoder's width.

    Attributes:
        text_hidden_size: width of the projector's rows; `hidden_size` of the text part.
        patch_size: pixels along each side of a patch.
        pooling_kernel_size: patches along each side of the square that becomes a soft token.
        position_embedding_size: the most patches along either side of an image.
        use_clipped_linears: whether inputs and outputs of linear layers are clipped to learned
            bounds.
        standardize: whether soft tokens are shifted and scaled by learned vectors.
        rope_theta: theta of both halves of a head.
    """

    text_hidden_size: int
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_activation: str = "gelu_pytorch_tanh"
    rms_norm_eps: float = 1e-6
    patch_size: int = 16
    pooling_kernel_size: int = 3
    position_embedding_size: int = 10_240
    use_clipped_linears: bool = False
    standardize: bool = False
    rope_theta: float = 100.0

    def __post_init__(self) -> None:
        require("hidden_activation", self.hidden_activation, ACTIVATIONS)
        if self.head_dim % 4:
            raise ModelError(
                f"config.json: head_dim = {self.head_dim} of the vision encoder is no multiple of 4"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Gemma4VisionArguments | None:
        """Read a multimodal configuration; None if it has no vision part.

        Raises:
            ModelError: a value is not supported.
        """
        s = Settings(config)
        vision = s.nested("vision_config", needed=False)
        if not vision.values:
            return None
        rope = vision.nested("rope_parameters", needed=False)
        # Early checkpoints call "default" what transformers now calls "axial".
        rope.only("rope_type", "axial", "default")
        return read_arguments(
            cls,
            vision.values,
            text_hidden_size=s.within("text_config").values.get("hidden_size"),
            rope_theta=rope.values.get("rope_theta"),
        )

    @property
    def patch_values(self) -> int:
        """Number of values of a patch."""
        return 3 * self.patch_size**2


class PatchEmbedder(Module):
    """Embeds patches: a projection of their pixels plus embeddings of their places."""

    def __init__(self, args: Gemma4VisionArguments) -> None:
        super().__init__()
        size = args.position_embedding_size
        self.input_proj = nn.Linear(args.patch_values, args.hidden_size, bias=False)
        self.position_embedding_table = mx.ones((2, size, args.hidden_size))

    def __call__(self, patches: mx.array, rows: int, columns: int) -> mx.array:
        """uint8 `[items * rows * columns, patch_values]` -> `[items * rows * columns, hidden]`."""
        xs, ys = self.position_embedding_table
        places = xs[None, :columns] + ys[:rows, None]  # [rows, columns, hidden]
        colours = patches.astype(mx.float32) * (2 / 255) - 1  # -1 to 1
        x: mx.array = self.input_proj(colours.astype(places.dtype))
        places = places.reshape(rows * columns, -1)
        return (x.reshape(-1, *places.shape) + places).reshape(x.shape)


class Attention(Module):
    """Full attention. Queries, keys and values are normalised by head, so logits need no scale."""

    def __init__(self, args: Gemma4VisionArguments) -> None:
        super().__init__()
        hidden, dim, eps = args.hidden_size, args.head_dim, args.rms_norm_eps
        clips = args.use_clipped_linears
        self._heads, self._kv_heads = args.num_attention_heads, args.num_key_value_heads
        self.q_proj = ClippedLinear(clips, hidden, self._heads * dim)
        self.k_proj = ClippedLinear(clips, hidden, self._kv_heads * dim)
        self.v_proj = ClippedLinear(clips, hidden, self._kv_heads * dim)
        self.o_proj = ClippedLinear(clips, self._heads * dim, hidden)
        self.q_norm, self.k_norm = RMSNorm(dim, eps=eps), RMSNorm(dim, eps=eps)
        self._v_norm = unweighted_norm(eps)
        self._head_dim = dim

    def __call__(self, x: mx.array, rotate: Rotate, items: Parts) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        n, dim = x.shape[0], self._head_dim
        q = rotate(self.q_norm(self.q_proj(x).reshape(n, self._heads, dim)))
        k = rotate(self.k_norm(self.k_proj(x).reshape(n, self._kv_heads, dim)))
        v = self._v_norm(self.v_proj(x).reshape(n, self._kv_heads, dim))
        return self.o_proj(items.attend(q, k, v, scale=1.0).reshape(n, -1))


class MLP(Module):
    """A GeGLU block (arXiv:2002.05202) of linear layers that may clip."""

    def __init__(self, args: Gemma4VisionArguments) -> None:
        super().__init__()
        hidden, inner, clips = args.hidden_size, args.intermediate_size, args.use_clipped_linears
        self.gate_proj = ClippedLinear(clips, hidden, inner)
        self.up_proj = ClippedLinear(clips, hidden, inner)
        self.down_proj = ClippedLinear(clips, inner, hidden)
        self._gate = GATES[args.hidden_activation]

    def __call__(self, x: mx.array) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        return self.down_proj(self._gate(self.gate_proj(x), self.up_proj(x)))


class EncoderLayer(Module):
    """A layer: attention and feed-forward, with norms before and after each."""

    def __init__(self, args: Gemma4VisionArguments) -> None:
        super().__init__()
        hidden, eps = args.hidden_size, args.rms_norm_eps
        self.self_attn = Attention(args)
        self.mlp = MLP(args)
        self.input_layernorm = RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps=eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps=eps)

    def __call__(self, x: mx.array, rotate: Rotate, items: Parts) -> mx.array:
        """`[N, hidden]` -> `[N, hidden]`."""
        y = self.self_attn(self.input_layernorm(x), rotate, items)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Encoder(Module):
    """The layers, and their shared rotation."""

    def __init__(self, args: Gemma4VisionArguments) -> None:
        super().__init__()
        self.layers = [EncoderLayer(args) for _ in range(args.num_hidden_layers)]
        self._rope = Rope(args.head_dim // 2, RopeParameters(rope_theta=args.rope_theta))

    def __call__(self, x: mx.array, rows: int, columns: int) -> Iterator[mx.array]:
        """Yield each layer's output, `[items * rows * columns, hidden]`."""
        items = Parts(x.shape[0] // (rows * columns))
        rotate = self._rotation(rows, columns, items.count)
        for layer in self.layers:
            x = layer(x, rotate, items)
            yield x

    def _rotation(self, rows: int, columns: int, items: int) -> Rotate:
        """Return a rotation of each head's first half by the patch's column, and of the second by
        its row.
        """
        index = mx.tile(mx.arange(rows * columns), items)
        turn_x, turn_y = self._rope(index % columns), self._rope(index // columns)

        def rotate(x: mx.array) -> mx.array:
            first, second = mx.split(x, 2, axis=-1)
            return mx.concatenate([turn_x(first), turn_y(second)], axis=-1)

        return rotate


class VisionTower(Module):
    """The encoder of patches to soft tokens, `vision_tower.` in checkpoints."""

    def __init__(self, args: Gemma4VisionArguments) -> None:
        super().__init__()
        self.args = args
        self.patch_embedder = PatchEmbedder(args)
        self.encoder = Encoder(args)
        if args.standardize:
            self.std_bias = mx.zeros((args.hidden_size,))
            self.std_scale = mx.ones((args.hidden_size,))

    @property
    def dtype(self) -> mx.Dtype:
        """The activations' type, which is that of the only tensor that is never quantised."""
        return self.patch_embedder.position_embedding_table.dtype

    def layers(self, patches: mx.array, rows: int, columns: int) -> Iterator[mx.array]:
        """Yield each layer's output `[items * rows * columns, hidden]`, for uint8 patches `[items *
        rows * columns, patch_values]`.
        """
        return self.encoder(self.patch_embedder(patches, rows, columns), rows, columns)

    def pooled(self, x: mx.array, columns: int) -> mx.array:
        """Pool the last layer's output to `[items * tokens, hidden]`.

        This is in float32: scaled values would overflow in float16, and standardisation subtracts a
        bias about as large as the values.
        """
        k, hidden = self.args.pooling_kernel_size, self.args.hidden_size
        squares = x.astype(mx.float32).reshape(-1, k, columns // k, k, hidden)
        pooled: mx.array = squares.mean(axis=(1, 3)).reshape(-1, hidden) * hidden**0.5
        if self.args.standardize:
            bias, scale = self.std_bias.astype(mx.float32), self.std_scale.astype(mx.float32)
            pooled = (pooled - bias) * scale
        return pooled


class Gemma4VisionEncoder(CutEncoder):
    """The tower and the projector as a `MediaEncoder`. Each layer is a piece, and so is the
    projection.
    """

    def __init__(self, vision_tower: VisionTower, embed_vision: Projector) -> None:
        super().__init__()
        self.args = vision_tower.args
        self.vision_tower = vision_tower
        self.embed_vision = embed_vision

    def feature_bytes(self, shape: tuple[int, ...]) -> int:
        return prod(shape) * self.args.patch_values

    def rows(self, shape: tuple[int, ...]) -> int:
        return soft_tokens(shape, self.args.pooling_kernel_size, self.args.position_embedding_size)

    def pieces(self, shape: tuple[int, ...]) -> Pieces:
        rows, columns = shape
        return Pieces(self.args.num_hidden_layers + 1, rows * columns)

    @property
    def takes_several(self) -> bool:
        return True

    def encode(self, features: mx.array, shape: tuple[int, ...]) -> Encoding:
        rows, columns = shape
        x = patches = features.reshape(-1, self.args.patch_values)
        for x in self.vision_tower.layers(patches, rows, columns):
            yield (x,)
        soft_tokens = self.vision_tower.pooled(x, columns)
        return (self.embed_vision(soft_tokens, self.vision_tower.dtype),)


def soft_tokens(shape: tuple[int, ...], square: int, most: int) -> int:
    """Return the number of rows of an image, from its rows and columns of patches.

    Args:
        square: patches along each side of the square that becomes one row.
        most: the most patches along either side.

    Raises:
        RequestError: the image cannot be cut into squares, or is too large.
    """
    rows, columns = shape
    said = f"An image of {rows} rows and {columns} columns of patches"
    if min(rows, columns) < square or rows % square or columns % square:
        raise RequestError(f"{said} cannot be cut into squares of {square} by {square}.")
    if max(rows, columns) > most:
        raise RequestError(f"{said} is too large: the model takes at most {most} of either.")
    return rows * columns // square**2
