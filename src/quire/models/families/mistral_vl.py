"""Mistral Small 3.1 to 4, Ministral 3 and Pixtral 12B, with Pixtral's encoder
(arXiv:2410.07073).
"""

from __future__ import annotations

from functools import partial

from quire.core.media import CLIP_COLOURS
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Norm
from quire.models.families.common import Family, activation, projector_activation
from quire.models.families.mistral import mistral3_text
from quire.models.families.qwen_vl import vision_language_model
from quire.models.families.vision import decoder_of
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.vision.phi import MLPMerging
from quire.models.vision.pixtral import PixtralMerging, PixtralModel
from quire.models.vision.qwen import Merging, QwenVision


def mistral3(s: Settings) -> LanguageModel:
    text = mistral3_text(s)
    if not s.has("vision_config"):
        return text
    assert isinstance(text, DecoderModel)
    s.only("vision_feature_layer", -1)
    name = projector_activation(s)
    bias = s.flag("multimodal_projector_bias", default=False)
    merging = PixtralMerging(Norm(text.description.norm.eps), name, bias)
    vision = partial(pixtral, merging, s.integer("spatial_merge_size", default=2))
    return vision_language_model(
        s, text.description, vision, names=text.names, parts=PIXTRAL_PARTS, model=PixtralModel
    )


def pixtral_12b(s: Settings) -> LanguageModel:
    """Build Pixtral 12B: a LLaVA with Pixtral's encoder; each patch becomes one row."""
    text = decoder_of(s, "mistral")
    assert isinstance(text, DecoderModel)
    s.only("vision_feature_layer", -1)
    s.only("vision_feature_select_strategy", "full")
    s.only("projector_hidden_act", "gelu")
    s.only("multimodal_projector_bias", True)
    vision = partial(pixtral, MLPMerging(), 1)
    return vision_language_model(
        s, text.description, vision, names=text.names, parts=_PARTS_12B, model=PixtralModel
    )


def pixtral(merging: Merging, square: int, v: Settings, width: int) -> QwenVision:
    """Describe the encoder of a `vision_config`.

    Args:
        square: patches on the side of a square, which becomes one row.
        width: the decoder's width.
    """
    v.only("model_type", "pixtral")
    v.only("num_channels", 3)
    hidden, heads = (
        v.integer("hidden_size", default=1024),
        v.integer("num_attention_heads", default=16),
    )
    v.only("head_dim", hidden // heads)
    return QwenVision(
        depth=v.integer("num_hidden_layers", default=24),
        hidden_size=hidden,
        heads=heads,
        mlp=MLP(v.integer("intermediate_size", default=4096), activation(v, "gelu")),
        norm=Norm(1e-5),
        output_size=width,
        patch=v.integer("patch_size", default=16),
        frames=1,
        merge=square,
        colours=CLIP_COLOURS,
        merging=merging,
        patch_norm=True,
        attention_bias=False,
        taking_turns=True,
    )


PIXTRAL_PARTS = {
    "patch_conv": "patch_embed.proj",
    "ln_pre": "patch_embed.norm",
    "transformer.layers": "blocks",
    "attention_norm": "norm1",
    "attention": "attn",
    "attention.o_proj": "attn.proj",
    "ffn_norm": "norm2",
    "feed_forward": "mlp",
    "patch_merger.merging_layer": "merging_layer",
}
"""Parts of names for `Names.renamed`."""
_PARTS_12B = PIXTRAL_PARTS | {
    "merger.linear_1": "merger.linear_fc1",
    "merger.linear_2": "merger.linear_fc2",
}

FAMILIES = (
    Family("mistral3", "Mistral Small 3.1, 3.2 and 4, Ministral 3, text and images", mistral3),
)
