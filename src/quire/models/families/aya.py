"""Aya Vision (arXiv:2505.08751), Command A Vision: SigLIP's tiles and Command R7B's decoder."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.description import Norm
from quire.models.families.common import Family
from quire.models.families.vision import (
    decoder_of,
    tiled_vision_model,
    vision_transformer,
    without_vision,
)
from quire.models.settings import Settings
from quire.models.vision.projectors import LayersProjector


def aya_vision(s: Settings) -> LanguageModel:
    s = s.filled(tie_word_embeddings=True)
    text = decoder_of(s, "cohere2")
    if not s.has("vision_config"):
        return without_vision(text)
    s.only("vision_feature_select_strategy", "full")
    layer = s.integer("vision_feature_layer", default=-1, minimum=None)
    kind = vision_transformer(s.within("vision_config"), (layer,), last_norm=False)
    width = s.within("text_config").integer("hidden_size")
    projector = LayersProjector(
        "silu",
        square=s.integer("downsample_factor", default=2),
        norm=Norm(
            s.number("adapter_layer_norm_eps", default=1e-6, minimum=0.0), centred=True, bias=True
        ),
        width=s.integer("alignment_intermediate_size", default=width),
        gated=True,
    )
    return tiled_vision_model(text, kind, projector)


def cohere2_vision(s: Settings) -> LanguageModel:
    s = s.filled(tie_word_embeddings=True)
    text = decoder_of(s, "cohere2")
    if not s.has("vision_config"):
        return without_vision(text)
    kind = vision_transformer(s.within("vision_config"), (-1,), last_norm=True)
    projector = LayersProjector(
        "silu",
        square=s.integer("downsample_factor", default=2),
        width=s.integer("alignment_intermediate_size", default=36864),
        gated=True,
    )
    return tiled_vision_model(text, kind, projector)


FAMILIES = (
    Family("aya_vision", "Aya Vision, text and images", aya_vision),
    Family("cohere2_vision", "Command A Vision, text and images", cohere2_vision),
)
