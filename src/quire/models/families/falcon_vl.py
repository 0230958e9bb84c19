"""Falcon-OCR and Falcon Perception (arXiv:2603.27365): one decoder reads patches and text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt

from quire.core.media import PlacedMedia
from quire.models.base import LanguageModel, MediaEncoder
from quire.models.decoder import DecoderModel
from quire.models.description import Description, Norm
from quire.models.families.common import Family, described, gate_up, query_key_value, uniform_layers
from quire.models.layers.attention import QKNorm
from quire.models.layers.feed_forward import MLP
from quire.models.layers.rope import RopeParameters
from quire.models.settings import Settings
from quire.models.vision.fused import PatchEncoder, PatchRotaryAttention, positions
from quire.models.weights.names import Names, Weights

_KEYS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "max_seq_len": "max_position_embeddings",
}
_AROUND = ("image_cls_token_id", *(f"image_reg_{number}_token_id" for number in range(1, 5)))


def falcon_vl(s: Settings) -> LanguageModel:
    s = _renamed(s).filled(rms_norm_eps=1e-5)
    s.only("temporal_patch_size", 1)
    s.only("channel_size", 3)
    unweighted = Norm(s.number("rms_norm_eps", minimum=0.0), weighted=False)
    heads, head_dim = s.integer("num_attention_heads"), s.integer("head_dim")
    attention = PatchRotaryAttention(
        heads=heads,
        kv_heads=s.integer("num_key_value_heads", default=heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeParameters(
            s.positive("rope_theta", default=1e4), partial_rotary_factor=0.5, interleaved=True
        ),
        qk_norm=QKNorm(unweighted),
        sinks=True,
        bidirectional_media=True,
    )
    layers = uniform_layers(s, attention, MLP(s.integer("intermediate_size"), "relu2"))
    names = Names(
        renamed=_PARTS,
        fused={"wqkv": query_key_value(attention), "w13": gate_up(s)},
        unused=_HEADS,
        prepare=partial(_prepared, layers=len(layers)),
    )
    around = tuple(s.integer(key, default=244 + n) for n, key in enumerate(_AROUND))
    patch = s.integer("spatial_patch_size", default=16)
    return FusedModel(described(s, layers, block_norm=unweighted), names, patch, around=around)


def _renamed(s: Settings) -> Settings:
    """Return the settings under their usual names, merged with `text_config` if present."""
    if s.has("text_config"):
        s = s.filled(**s.within("text_config").values)
    return s.filled(**{ours: s.values[key] for key, ours in _KEYS.items() if s.has(key)})


class FusedModel(DecoderModel):
    """A decoder that reads patches itself.

    Args:
        patch: pixels on a patch's side.
        around: token ids of the learned rows before a picture.
    """

    def __init__(
        self, description: Description, names: Names, patch: int, around: Sequence[int]
    ) -> None:
        super().__init__(description, names)
        self.img_projector = nn.Linear(3 * patch**2, description.hidden_size, bias=False)
        self._patch, self._around = patch, around

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        table, dtype = self.model.embed_tokens, self.model.norm.weight.dtype
        return {
            "image": PatchEncoder(
                table, self.img_projector, self._patch, around=self._around, dtype=dtype
            )
        }

    @property
    def position_axes(self) -> int:
        return 5

    def positions(
        self, tokens: Sequence[int], media: Sequence[PlacedMedia]
    ) -> npt.NDArray[np.float32] | None:
        return positions(len(tokens), media) if media else None


_PARTS = {
    "attention": "self_attn",
    "feed_forward": "mlp",
    "wo": "o_proj",
    "w2": "down_proj",
    "tok_embeddings": "embed_tokens",
    "model.output": "lm_head",
    "model.img_projector": "img_projector",
}
_HEADS = (
    "coord_encoder.",
    "coord_decoder.",
    "size_encoder.",
    "size_decoder.",
    "conv_segm.",
    "proj_segm.",
    "itok_upsampler.",
)
"""Prefixes of Falcon Perception's heads for points, boxes and masks, which are left out."""
_PLACES = "freqs_cis_golden"


def _prepared(weights: Weights, layers: int) -> Weights:
    """Give each layer its table of angles by place, and order gated projections' rows.

    The publisher's files interleave the rows of gates and of the gated projection and share one
    table of angles. Conversions to MLX separate the rows, and hold tables of cosines and sines,
    which are dropped.
    """
    ready: Weights = {}
    for name, array in weights.items():
        *path, last = name.split(".")
        if last == _PLACES:
            prefix = ".".join([*path, "layers"])
            ready |= {f"{prefix}.{n}.self_attn.places": array for n in range(layers)}
        elif name.startswith("layers.") and path[-1] == "w13":
            ready[name] = mx.concatenate([array[0::2], array[1::2]])
        elif last not in ("cos_1d", "sin_1d"):
            ready[name] = array
    return ready


def _context(s: Settings) -> int:
    return _renamed(s).integer("max_position_embeddings")


FAMILIES = (
    Family("falcon_ocr", "Falcon-OCR, text and images", falcon_vl, context=_context),
    Family("falcon_perception", "Falcon Perception, text and images", falcon_vl, context=_context),
)
