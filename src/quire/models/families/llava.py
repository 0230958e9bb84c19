"""LLaVA 1.5 (arXiv:2310.03744), LLaVA-NeXT and LLaVA-OneVision (arXiv:2408.03326)."""

from __future__ import annotations

from quire.core.errors import ModelError
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.families.common import Family, projector_activation
from quire.models.families.mistral_vl import pixtral_12b
from quire.models.families.vision import (
    CLIP,
    SIGLIP,
    decoder_of,
    tiled_vision_model,
    vision_transformer,
    without_vision,
)
from quire.models.settings import Settings
from quire.models.vision.packing import AnyResolution, HalvedFrames, InOrder, Packing
from quire.models.vision.projectors import LayersProjector


def llava(s: Settings) -> LanguageModel:
    if s.nested("vision_config", needed=False).value("model_type") == "pixtral":
        return pixtral_12b(s)
    return _llava(s, {"image": InOrder()}, CLIP, layer=-2)


def llava_next(s: Settings) -> LanguageModel:
    return _llava(s, {"image": AnyResolution()}, CLIP, layer=-2)


def llava_onevision(s: Settings) -> LanguageModel:
    return _llava(s, {"image": AnyResolution(), "video": HalvedFrames()}, SIGLIP, layer=-1)


def _llava(s: Settings, packings: dict[str, Packing], tower: str, layer: int) -> LanguageModel:
    """Build the model. `tower` and `layer` are the defaults of absent keys."""
    text = decoder_of(s, *(("qwen2", "llama") if tower == SIGLIP else _TEXT))
    if not s.has("vision_config"):
        return without_vision(text)
    v = s.within("vision_config")
    if not v.has("model_type"):
        v = v.changed(model_type=tower)
    kind = vision_transformer(v, _layers(s, layer), last_norm=False)
    # The output leaves the class token out, and nothing else.
    strategy = "default" if kind.class_token else "full"
    usual = "full" if tower == SIGLIP else "default"
    found = s.word("vision_feature_select_strategy", default=usual)
    if found != strategy:
        raise ModelError(
            f"config.json: vision_feature_select_strategy = {found!r} is not supported with this "
            f"encoder (known: {strategy!r})"
        )
    name = projector_activation(s)
    bias = s.flag("multimodal_projector_bias", default=True)
    assert isinstance(text, DecoderModel)
    return tiled_vision_model(
        text,
        kind,
        LayersProjector(name, bias=bias),
        packings=packings,
        multiplier=text.description.embedding_multiplier,  # Granite's
    )


_TEXT = ("llama", "mistral", "qwen2", "granite")


def _layers(s: Settings, default: int) -> tuple[int, ...]:
    if isinstance(s.values.get("vision_feature_layer"), list):
        return s.integers("vision_feature_layer") or (default,)
    return (s.integer("vision_feature_layer", default=default, minimum=None),)


FAMILIES = (
    Family("llava", "LLaVA 1.5 and Pixtral 12B, text and images", llava),
    Family("llava_next", "LLaVA-NeXT (1.6) and Granite Vision 3, text and images", llava_next),
    Family("llava_onevision", "LLaVA-OneVision, text, images and video", llava_onevision),
)
