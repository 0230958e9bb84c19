"""Phi-4-reasoning-vision: Phi-4 with SigLIP 2's encoder (arXiv:2502.14786) of pictures of any
shape.
"""

from __future__ import annotations

from dataclasses import replace

from quire.core.errors import ModelError
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.families.common import Family
from quire.models.families.microsoft import phi3
from quire.models.families.qwen_vl import vision_language_model
from quire.models.families.siglip import SIGLIP_PARTS, UNREAD, siglip
from quire.models.settings import Settings
from quire.models.vision.paddle import PictureTower
from quire.models.vision.phi import MLPMerging
from quire.models.vision.place_table import Table
from quire.models.vision.qwen import QwenVision
from quire.models.vision.vision_language import TextPositionsModel


def phi4_siglip(s: Settings) -> LanguageModel:
    """Build the model. The decoder's keys are beside `vision_config`."""
    text = phi3(s.within("text_config"))
    assert isinstance(text, DecoderModel)
    s.only("mm_projector_type", "mlp2x_gelu")
    s.only("mm_vision_select_layer", -2)
    s.only("use_s2", False)
    tower = s.word("mm_vision_tower", default="naflex")
    if "naflex" not in tower.lower():
        raise ModelError(f"config.json: mm_vision_tower = {tower!r} is no NaFlex encoder")
    last = s.within("vision_config").integer("num_hidden_layers") - 1
    parts = _PARTS | {f"encoder.layers.{last}": UNREAD}
    return vision_language_model(
        s,
        text.description,
        _vision,
        names=text.names,
        tower=PictureTower,
        parts=parts,
        model=TextPositionsModel,
    )


def _vision(v: Settings, width: int) -> QwenVision:
    """Describe the encoder without its last layer; rows are the previous layer's unnormalised
    output.
    """
    usual = siglip(
        v.changed(spatial_merge_size=1), width, patch=16, merging=MLPMerging(), rotated=False
    )
    side = int(v.integer("num_patches", default=256) ** 0.5)
    table = Table(side, ends=False, averaged=True)
    return replace(usual, depth=usual.depth - 1, table=table)


_PARTS = SIGLIP_PARTS | {
    "post_layernorm": UNREAD,
    "merger.0": "merger.linear_fc1",
    "merger.2": "merger.linear_fc2",
    "merger.linear_1": "merger.linear_fc1",
    "merger.linear_2": "merger.linear_fc2",
}

FAMILIES = (Family("phi4-siglip", "Phi-4-reasoning-vision, text and images", phi4_siglip),)
