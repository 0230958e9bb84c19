"""GOT-OCR 2.0 (arXiv:2409.01704): SAM's encoder, two convolutions, and a small Qwen 2."""

from __future__ import annotations

from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.families.common import Family
from quire.models.families.deepseek_vl import laid_out, sam
from quire.models.families.vision import decoder_of, without_vision
from quire.models.settings import Settings
from quire.models.vision.packing import InOrder
from quire.models.vision.projectors import NarrowingProjector
from quire.models.vision.tiles import TiledModel
from quire.models.weights.names import Weights, renamed


def got_ocr2(s: Settings) -> LanguageModel:
    decoder = decoder_of(s.filled(tie_word_embeddings=True), "qwen2")
    if not s.has("vision_config"):
        return without_vision(decoder)
    assert isinstance(decoder, DecoderModel)
    v = s.within("vision_config")
    v.only("model_type", "got_ocr2_vision")
    return TiledModel(
        decoder,
        sam(v),
        NarrowingProjector(),
        packings={"image": InOrder()},
        visual_names=_by_usual_names,
        prepare=None,
    )


_PARTS = {
    "patch_embed.projection": "patch_embed",
    "mlp.lin1": "mlp.up_proj",
    "mlp.lin2": "mlp.down_proj",
    "conv_upsampler1": "conv1",
    "conv_upsampler2": "conv2",
    "multimodal_projector": "linear",
}


def _by_usual_names(weights: Weights) -> Weights:
    return {
        renamed(name.removeprefix("visual."), _PARTS): laid_out(name, array)
        for name, array in weights.items()
    }


FAMILIES = (Family("got_ocr2", "GOT-OCR 2.0, text and images", got_ocr2),)
