"""LightOnOCR (arXiv:2601.14251): Qwen3 with Pixtral's encoder, without rows that end a line."""

from __future__ import annotations

from functools import partial

from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Norm
from quire.models.families.common import Family
from quire.models.families.mistral_vl import PIXTRAL_PARTS, pixtral
from quire.models.families.qwen_vl import vision_language_model
from quire.models.families.vision import decoder_of
from quire.models.settings import Settings
from quire.models.vision.paddle import PictureTower
from quire.models.vision.pixtral import PixtralMerging
from quire.models.vision.vision_language import TextPositionsModel
from quire.models.weights.names import Weights


class LightOnModel(TextPositionsModel):
    """Qwen3 with the encoder, whose tensors have other names than usual."""

    def sanitize(self, weights: Weights) -> Weights:
        return super().sanitize({_usual(name): array for name, array in weights.items()})


_PREFIXES = {"vision_encoder.": "vision_tower.", "vision_projection.": "multi_modal_projector."}


def _usual(name: str) -> str:
    plain = name.removeprefix("model.")
    for prefix, usual in _PREFIXES.items():
        if plain.startswith(prefix):
            return usual + plain.removeprefix(prefix)
    return name


def lighton_ocr(s: Settings) -> LanguageModel:
    text = decoder_of(s.filled(tie_word_embeddings=True), "qwen3")
    if not s.has("vision_config"):
        return text
    assert isinstance(text, DecoderModel)
    merging = PixtralMerging(Norm(text.description.norm.eps), "gelu", bias=False)
    vision = partial(pixtral, merging, s.integer("spatial_merge_size", default=2))
    return vision_language_model(
        s,
        text.description,
        vision,
        names=text.names,
        tower=PictureTower,
        parts=PIXTRAL_PARTS,
        model=LightOnModel,
    )


FAMILIES = (Family("lighton_ocr", "LightOnOCR 1 and 2, text and images", lighton_ocr),)
