"""InternVL (arXiv:2504.10479): InternViT with decoders of other families."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.errors import ModelError
from quire.models.base import LanguageModel
from quire.models.description import Norm
from quire.models.families.common import Family, projector_activation
from quire.models.families.vision import (
    INTERNVIT,
    decoder_of,
    tiled_vision_model,
    vision_transformer,
    without_vision,
)
from quire.models.settings import Settings
from quire.models.vision.packing import InOrder
from quire.models.vision.projectors import LayersProjector
from quire.models.weights import original_names
from quire.models.weights.names import Weights


def internvl_chat(s: Settings) -> LanguageModel:
    return _internvl(s, original_names.internvl_chat)


def internvl(s: Settings) -> LanguageModel:
    return _internvl(s, prepare=None)


def _internvl(s: Settings, prepare: Callable[[Weights], Weights] | None) -> LanguageModel:
    s = s.filled(tie_word_embeddings=True)
    text = decoder_of(s, *_DECODERS)
    if not s.has("vision_config"):
        return without_vision(text)
    s.only("vision_feature_select_strategy", "default")
    v = s.within("vision_config").filled(model_type=INTERNVIT)
    layer = s.integer("vision_feature_layer", default=-1, minimum=None)
    # The encoder's own norm is for its whole output, and only where nothing is averaged.
    last_norm = layer == -1 and not v.flag("use_mean_pooling", default=True)
    kind = vision_transformer(v, (layer,), last_norm=last_norm)
    name = projector_activation(s)
    ratio = s.number("downsample_ratio", default=0.5)
    if not 0 < ratio <= 1:
        raise ModelError(f"config.json: downsample_ratio = {ratio} is not above 0 and at most 1")
    norm = Norm(1e-5, centred=True, bias=True)
    projector = LayersProjector(name, square=int(1 / ratio), norm=norm)
    return tiled_vision_model(
        text, kind, projector, packings={"image": InOrder(), "video": InOrder()}, prepare=prepare
    )


_DECODERS = (
    *("qwen2", "llama", "internlm2", "internlm3"),
    *("phi3", "qwen3", "qwen3_moe", "gpt_oss"),
)

FAMILIES = (
    Family("internvl", "InternVL 3 and 3.5, text, images and video", internvl),
    Family(
        "internvl_chat", "InternVL 2 to 3.5 as OpenGVLab has them, text and images", internvl_chat
    ),
)
