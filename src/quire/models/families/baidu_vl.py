"""PaddleOCR-VL (arXiv:2510.14528), which reads pictures."""

from __future__ import annotations

from quire.core.media import EVEN_COLOURS
from quire.models.base import LanguageModel
from quire.models.description import Norm
from quire.models.families.common import (
    Family,
    activation,
    alike,
    attention,
    described,
    mlp,
    rms,
)
from quire.models.families.qwen import with_axes
from quire.models.families.qwen_vl import seeing, text_of
from quire.models.feed_forward import MLP
from quire.models.names import Names
from quire.models.paddle_vision import PaddleMerging, PictureTower
from quire.models.qwen_vision import QwenVision, Table
from quire.models.settings import Settings


def paddleocr_vl(s: Settings) -> LanguageModel:
    """ERNIE 4.5's decoder with positions of three axes; the first files keep its keys outside."""
    text = text_of(s.filled(tie_word_embeddings=True)).filled(rope_theta=5e5, head_dim=128)
    text = with_axes(text, (16, 24, 24), interleaved=False)
    bias = text.flag("use_bias", default=False)
    usual = attention(text, qkv_bias=bias, out_bias=bias)
    layers = alike(text, usual, mlp(text, bias=bias))
    description = described(text, layers, tied=True, norm=rms(text, 1e-5))
    return seeing(s, description, _vision, Names(), PictureTower, _PARTS)


def _vision(v: Settings, width: int) -> QwenVision:
    patch = v.integer("patch_size", default=14)
    inner = v.integer("intermediate_size")
    return QwenVision(
        depth=v.integer("num_hidden_layers"),
        hidden_size=v.integer("hidden_size"),
        heads=v.integer("num_attention_heads"),
        mlp=MLP(inner, activation(v, "gelu_pytorch_tanh"), gated=False, bias=True),
        norm=Norm(v.number("layer_norm_eps", default=1e-6), centred=True, bias=True),
        output_size=width,
        patch=patch,
        frames=1,
        merge=v.integer("spatial_merge_size", default=2),
        colours=EVEN_COLOURS,
        merging=PaddleMerging(),
        patch_bias=True,
        table=Table(v.integer("image_size", default=384) // patch, ends=False),
    )


_PARTS = {
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
    "post_layernorm": "merger.post_layernorm",
    "merger.post_layernorm": "merger.post_layernorm",
    "merger.pre_norm": "merger.norm",
    "merger.linear_1": "merger.linear_fc1",
    "merger.linear_2": "merger.linear_fc2",
}

FAMILIES = (Family("paddleocr_vl", "PaddleOCR-VL, text and images", paddleocr_vl),)
