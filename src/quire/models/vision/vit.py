"""The vision transformer (arXiv:2010.11929) of CLIP, SigLIP, InternViT and Llama 4.

Pictures are tiles, squares of one size. Patches see only patches of their own tile, so a tile's
encoding does not depend on other tiles. Each patch position has a learned embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from quire.core.errors import ModelError
from quire.core.media import Colours
from quire.models.base import Encoding, Module
from quire.models.description import Norm
from quire.models.layers.common import embed
from quire.models.layers.encoder_attention import Parts
from quire.models.layers.feed_forward import MLP
from quire.models.layers.rope import Rope, RopeParameters, Rotate, still


@dataclass(frozen=True)
class VisionTransformer:
    """Description of the encoder.

    Attributes:
        depth: number of layers that are computed; layers after the last one in `taken` are not.
        taken: layers, counted from one, whose outputs are concatenated; 0 stands for the first
            layer's input.
        image: pixels on a tile's side.
        patch: pixels on a patch's side; pixels beyond the last whole patch are dropped.
        colours: the pixel normalisation.
        class_token: whether there is one more row before those of the patches; it is not part of
            the output.
        patch_bias: whether the first projection has a bias.
        first_norm: whether there is a norm before the first layer (CLIP).
        last_norm: whether the output, then of a single layer, is normalised.
        qk_norm: norm of queries and keys over all heads; None for none.
        scaled: whether a block's output is multiplied by a learned vector (arXiv:2103.17239).
        rope: how queries and keys are rotated by a patch's column and row, counted from one; the
            class token's are not. None for no rotation.
    """

    depth: int
    taken: tuple[int, ...]
    hidden_size: int
    heads: int
    mlp: MLP
    norm: Norm
    image: int
    patch: int
    colours: Colours
    class_token: bool = False
    patch_bias: bool = True
    first_norm: bool = False
    last_norm: bool = False
    attention_bias: bool = True
    qk_norm: Norm | None = None
    scaled: bool = False
    rope: RopeParameters | None = None

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ModelError(
                f"config.json: a vision encoder of width {self.hidden_size} cannot have "
                f"{self.heads} heads"
            )
        if self.side < 1:
            raise ModelError(
                f"config.json: a vision encoder's patch of {self.patch} pixels is larger than its "
                f"image of {self.image}"
            )

    @property
    def side(self) -> int:
        """Patches on a tile's side."""
        return self.image // self.patch

    @property
    def patches(self) -> int:
        """Number of patches of a tile."""
        return self.side**2

    @property
    def places(self) -> npt.NDArray[np.int64]:
        """Column and row of each row of a tile, `[2, rows]`: 0 for the class token."""
        rows, columns = np.indices((self.side, self.side)).reshape(2, -1) + 1
        return np.pad([columns, rows], [(0, 0), (int(self.class_token), 0)])

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile's pixels."""
        return self.patches * self.patch**2 * 3

    @property
    def output_size(self) -> int:
        return self.hidden_size * len(self.taken)

    def module(self) -> Module:
        return VisionTower(self)


class Embeddings(Module):
    """Embeds patches: a projection of their pixels plus position embeddings."""

    def __init__(self, kind: VisionTransformer) -> None:
        super().__init__()
        self._kind = kind
        if kind.class_token:
            self.class_embedding = mx.zeros((kind.hidden_size,))
        self.patch_embedding = nn.Linear(3 * kind.patch**2, kind.hidden_size, bias=kind.patch_bias)
        places = kind.patches + kind.class_token
        self.position_embedding = nn.Embedding(places, kind.hidden_size)

    def __call__(self, pixels: mx.array, dtype: mx.Dtype) -> mx.array:
        """Embed uint8 `[tiles, patches, patch * patch * 3]` to `[tiles, rows, hidden]` of
        `dtype`.
        """
        kind = self._kind
        mean, std = (mx.array(each) for each in (kind.colours.mean, kind.colours.std))
        colours = pixels.reshape(-1, 3).astype(mx.float32) * (1 / (255 * std)) - mean / std
        x: mx.array = self.patch_embedding(colours.astype(dtype).reshape(pixels.shape))
        if kind.class_token:
            first = self.class_embedding.astype(dtype)
            first = mx.broadcast_to(first, (len(x), 1, kind.hidden_size))
            x = mx.concatenate([first, x], axis=1)
        return x + embed(self.position_embedding, mx.arange(x.shape[1]), dtype)


class SelfAttention(Module):
    """Self-attention within each tile."""

    def __init__(self, kind: VisionTransformer) -> None:
        super().__init__()
        self._heads, width = kind.heads, kind.hidden_size
        self.q_proj = nn.Linear(width, width, bias=kind.attention_bias)
        self.k_proj = nn.Linear(width, width, bias=kind.attention_bias)
        self.v_proj = nn.Linear(width, width, bias=kind.attention_bias)
        self.out_proj = nn.Linear(width, width)
        self._normed = kind.qk_norm is not None
        if kind.qk_norm is not None:
            self.q_norm, self.k_norm = kind.qk_norm.module(width), kind.qk_norm.module(width)

    def __call__(self, x: mx.array, tiles: Parts, rotate: Rotate) -> mx.array:
        """`[tiles * rows, hidden]` -> the same."""
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self._normed:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.reshape(len(x), self._heads, -1) for each in (q, k, v))
        out = tiles.attend(rotate(q), rotate(k), v, scale=q.shape[-1] ** -0.5)
        y: mx.array = self.out_proj(out.reshape(x.shape))
        return y


class EncoderLayer(Module):
    """A layer: attention and feed-forward, each after a norm."""

    def __init__(self, kind: VisionTransformer) -> None:
        super().__init__()
        self.layer_norm1 = kind.norm.module(kind.hidden_size)
        self.self_attn = SelfAttention(kind)
        self.layer_norm2 = kind.norm.module(kind.hidden_size)
        self.mlp = kind.mlp.module(kind.hidden_size)
        self._scaled = kind.scaled
        if kind.scaled:
            self.scale1, self.scale2 = mx.ones((kind.hidden_size,)), mx.ones((kind.hidden_size,))

    def __call__(self, x: mx.array, tiles: Parts, rotate: Rotate = still) -> mx.array:
        """`[tiles * rows, hidden]` -> the same."""
        x = x + self._scale("scale1", self.self_attn(self.layer_norm1(x), tiles, rotate))
        return x + self._scale("scale2", self.mlp(self.layer_norm2(x)))

    def _scale(self, name: str, y: mx.array) -> mx.array:
        return y * self[name] if self._scaled else y


class VisionTower(Module):
    """The encoder of tiles, `vision_tower.` in checkpoints."""

    def __init__(self, kind: VisionTransformer) -> None:
        super().__init__()
        self.kind = kind
        self.embeddings = Embeddings(kind)
        if kind.first_norm:
            self.first_norm = kind.norm.module(kind.hidden_size)
        self.layers = [EncoderLayer(kind) for _ in range(kind.depth)]
        if kind.last_norm:
            self.last_norm = kind.norm.module(kind.hidden_size)
        head_dim = kind.hidden_size // kind.heads
        self._rope = None if kind.rope is None else Rope(head_dim, kind.rope)

    @property
    def dtype(self) -> mx.Dtype:
        """The activations' type, which is that of a tensor that is never quantised."""
        bias: mx.array = self.layers[0].self_attn.out_proj.bias
        return bias.dtype

    def encode(self, pixels: mx.array) -> Encoding:
        """Encode uint8 `[tiles, patches, patch * patch * 3]` to `[tiles, patches, output_size]`.

        Patches are ordered by rows, and so are the pixels of a patch. Each layer is a piece.
        """
        kind, tiles = self.kind, Parts(len(pixels))
        x = self.embeddings(pixels, self.dtype).flatten(0, 1)
        if kind.first_norm:
            x = self.first_norm(x)
        rotate = self._rotation(tiles.count)
        found = {0: x} if 0 in kind.taken else {}
        for number, layer in enumerate(self.layers, 1):
            x = layer(x, tiles, rotate)
            if number in kind.taken:
                found[number] = x
            yield x, *found.values()
        taken = [found[number] for number in kind.taken]
        y = taken[0] if len(taken) == 1 else mx.concatenate(taken, axis=-1)
        if kind.last_norm:
            y = self.last_norm(y)
        y = y.reshape(tiles.count, -1, y.shape[-1])
        return (y[:, 1:] if kind.class_token else y,)

    def _rotation(self, tiles: int) -> Rotate:
        """Return the rotation of the rows of so many tiles."""
        if self._rope is None:
            return still
        return self._rope(mx.tile(mx.array(self.kind.places), (1, tiles)))
