"""SigLIP's encoder of pictures of any shape, for PaddleOCR-VL, Youtu-VL and Phi-4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.core.media import EVEN_COLOURS
from quire.models.description import Norm
from quire.models.families.common import activation
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.vision.qwen import QwenVision


def siglip(v: Settings, width: int, *, patch: int, **changes: Any) -> QwenVision:
    """Describe the encoder of a `vision_config`.

    Args:
        width: the decoder's width.
        patch: default pixels on a patch's side.
        changes: fields of the description that differ from SigLIP's.
    """
    inner = v.integer("intermediate_size")
    usual = QwenVision(
        depth=v.integer("num_hidden_layers"),
        hidden_size=v.integer("hidden_size"),
        heads=v.integer("num_attention_heads"),
        mlp=MLP(inner, activation(v, "gelu_pytorch_tanh"), gated=False, bias=True),
        norm=Norm(v.number("layer_norm_eps", default=1e-6, minimum=0.0), centred=True, bias=True),
        output_size=width,
        patch=v.integer("patch_size", default=patch),
        frames=1,
        merge=v.integer("spatial_merge_size", default=2),
        colours=EVEN_COLOURS,
        patch_bias=True,
    )
    return replace(usual, **changes)


SIGLIP_PARTS = {
    "embeddings.patch_embedding": "patch_embed.proj",
    "embeddings.position_embedding": "pos_embed",
    "encoder.layers": "blocks",
    "layers": "blocks",
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn": "attn",
    "self_attn.out_proj": "attn.proj",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
"""Parts of names for `Names.renamed`."""
UNREAD = "head"
"""Prefix for SigLIP's tensors that a family leaves out."""
