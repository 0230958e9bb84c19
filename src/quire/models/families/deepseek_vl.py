"""DeepSeek-VL (arXiv:2403.05525), which sees a picture as one tile."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.families.common import Family
from quire.models.families.vision import decoder_of, seeing_tiles, transformer, without_vision
from quire.models.projectors import LayersProjector
from quire.models.settings import Settings

_PARTS = {
    "vision_model.": "vision_tower.",
    "aligner.linear1.": "multi_modal_projector.linear_1.",
    "aligner.linear2.": "multi_modal_projector.linear_2.",
}


def deepseek_vl(s: Settings) -> LanguageModel:
    decoder = decoder_of(s, "llama")
    if not s.has("vision_config"):
        return without_vision(decoder)
    kind = transformer(s.within("vision_config"), (-1,), last_norm=True)
    return seeing_tiles(decoder, kind, LayersProjector("gelu"), parts=_PARTS)


FAMILIES = (Family("deepseek_vl", "DeepSeek-VL 1.3B, text and images", deepseek_vl),)
