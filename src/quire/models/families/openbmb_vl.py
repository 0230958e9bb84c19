"""MiniCPM-V 4.6: Qwen3.5 with SigLIP (arXiv:2303.15343), whose patches are merged on the way."""

from __future__ import annotations

from functools import partial

from quire.core.errors import ModelError
from quire.core.values import require
from quire.models.base import LanguageModel
from quire.models.description import Norm
from quire.models.families.common import Family, described, text_of
from quire.models.families.qwen import QWEN3_5_NAMES, qwen3_5_ahead, qwen3_5_layers
from quire.models.families.qwen_vl import vision_language_model
from quire.models.families.siglip import SIGLIP_PARTS, siglip
from quire.models.settings import Settings
from quire.models.vision.lfm import LayersMerging
from quire.models.vision.minicpm import WINDOW, MiniCpmTower, WindowsMerging
from quire.models.vision.place_table import Table
from quire.models.vision.projectors import LayersProjector
from quire.models.vision.qwen import QwenVision
from quire.models.vision.vision_language import TextPositionsModel
from quire.models.weights.names import Weights

_TOWERS = ("minicpmv4_6_vision", "siglip_vision_model")
"""Model types of the encoder, in published and converted configurations."""


def minicpmv4_6(s: Settings) -> LanguageModel:
    text = text_of(s)
    text.only("model_type", "qwen3_5_text")
    s.only("merge_kernel_size", [WINDOW, WINDOW])
    s.only("merger_times", 1)
    s.only("drop_vision_last_layer", False)
    mode = s.word("downsample_mode", default="16x")
    require("downsample_mode", mode, ("16x", "4x"))
    layer = s.integer("insert_layer_id", default=6, minimum=0)
    merging = layer if mode == "16x" else None
    return vision_language_model(
        s,
        described(text, qwen3_5_layers(text), ahead=qwen3_5_ahead(text)),
        partial(_vision, merging),
        names=QWEN3_5_NAMES,
        tower=partial(MiniCpmTower, merging),
        parts=_PARTS,
        model=TextPositionsModel,
        prepare=partial(_within_layer, merging),
    )


def _vision(merging: int | None, v: Settings, width: int) -> QwenVision:
    """Describe the encoder; windows are merged behind the layer with index `merging`."""
    v.only("model_type", *_TOWERS)
    v.only("window_kernel_size", [WINDOW, WINDOW])
    v = v.filled(
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        image_size=224,
        patch_size=16,
    )
    layers = v.integer("num_hidden_layers")
    if merging is not None and merging >= layers:
        raise ModelError(
            f"config.json: insert_layer_id = {merging} of a vision encoder of {layers} layers"
        )
    projector = LayersProjector(
        "gelu",
        norm=Norm(1e-6, centred=True, bias=True),
        width=WINDOW**2 * v.integer("hidden_size"),
    )
    return siglip(
        v,
        width,
        patch=16,
        merge=WINDOW if merging is None else WINDOW**2,
        merging=LayersMerging(projector) if merging is None else WindowsMerging(projector),
        rotated=False,
        table=Table(v.integer("image_size") // v.integer("patch_size"), nearest=True),
    )


def _within_layer(merging: int | None, kind: QwenVision, weights: Weights) -> Weights:
    """Move the tensors that merge windows into their layer; drop them if no windows are merged."""
    ready: Weights = {}
    for name, array in weights.items():
        if not name.startswith(_WINDOWS):
            ready[name] = array
        elif merging is not None:
            ready[f"layers.{merging}.{name}"] = array
    return ready


_WINDOWS = "vit_merger."
_PARTS = SIGLIP_PARTS | {
    "post_layernorm": "merger.post_layernorm",
    "merger.post_layernorm": "merger.post_layernorm",
    "merger.mlp.0": "merger",
    "merger.mlp.0.pre_norm": "merger.norm",
    "vit_merger": "merger",
    "vit_merger.pre_norm": "merger.mlp.norm",
    "vit_merger.linear_1": "merger.mlp.linear_1",
    "vit_merger.linear_2": "merger.mlp.linear_2",
}

FAMILIES = (Family("minicpmv4_6", "MiniCPM-V 4.6, text, images and video", minicpmv4_6),)
