"""Idefics 3 (arXiv:2408.12637) and SmolVLM (arXiv:2504.05299): SigLIP's tiles and Llama."""

from __future__ import annotations

from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.families.common import Family
from quire.models.families.vision import (
    SIGLIP,
    decoder_of,
    tiled_vision_model,
    vision_transformer,
    without_vision,
)
from quire.models.settings import Settings
from quire.models.vision.projectors import LinearProjector
from quire.models.weights.names import Weights

_TOWERS = ("idefics3", "idefics3_vision", "smolvlm", "smolvlm_vision", SIGLIP)
"""Model types of the encoder. It supports pictures of any shape; for this family's tiles it equals
SigLIP.
"""


def idefics3(s: Settings) -> LanguageModel:
    text = decoder_of(s, "llama")
    if not s.has("vision_config"):
        return without_vision(text)
    v = s.within("vision_config")
    require("vision_config.model_type", v.word("model_type", default=_TOWERS[0]), _TOWERS)
    v = v.filled(**_SIZES).changed(model_type=SIGLIP)
    kind = vision_transformer(v, (-1,), last_norm=True)
    projector = LinearProjector(s.integer("scale_factor", default=2))
    return tiled_vision_model(text, kind, projector, prepare=_by_usual_names)


_SIZES = {
    "hidden_size": 1152,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 32,
}
_PREFIXES = {
    "text_model.": "language_model.",
    "vision_model.": "vision_tower.vision_model.",
    "connector.modality_projection.proj.": "multi_modal_projector.linear.",
}


def _by_usual_names(weights: Weights) -> Weights:
    """Rename tensors to the names of most families."""
    ready: Weights = {}
    for name, array in weights.items():
        plain = name.removeprefix("model.")
        known = (each for each in _PREFIXES if plain.startswith(each))
        prefix = next(known, None)
        if prefix is not None:
            name = f"model.{_PREFIXES[prefix]}{plain.removeprefix(prefix)}"
        ready[name] = array
    return ready


FAMILIES = (
    Family("idefics3", "Idefics 3, SmolVLM and Granite-Docling 258M, text and images", idefics3),
    Family("smolvlm", "SmolVLM 2, text and images", idefics3),
)
