"""The keys of `vision_config` of CLIP and SigLIP, and what their tensors are called."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.core.errors import ModelError
from quire.core.media import TOWER_COLOURS
from quire.models.arguments import require
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Norm
from quire.models.families.common import activation
from quire.models.feed_forward import MLP
from quire.models.names import Weights, renamed
from quire.models.projectors import Projector
from quire.models.settings import Settings
from quire.models.tiles import TILES, InOrder, Packing, TiledModel
from quire.models.vit import VisionTransformer

SIGLIP, CLIP = "siglip_vision_model", "clip_vision_model"


def transformer(v: Settings, layers: tuple[int, ...], *, last_norm: bool) -> VisionTransformer:
    """The encoder of a `vision_config`.

    Args:
        layers: those that its output is taken of, counted from the end if negative; see
            `VisionTransformer.taken`.
        last_norm: the output is normalised.

    Raises:
        ModelError: it has no such layer, or it is none of CLIP and SigLIP.
    """
    kind = v.word("model_type", default=SIGLIP)
    require("vision_config.model_type", kind, (CLIP, SIGLIP))
    v = v.filled(**_DEFAULTS[kind])
    usual = VisionTransformer(
        depth=v.integer("num_hidden_layers"),
        taken=(),
        hidden_size=v.integer("hidden_size"),
        heads=v.integer("num_attention_heads"),
        mlp=MLP(v.integer("intermediate_size"), activation(v), gated=False, bias=True),
        norm=Norm(v.number("layer_norm_eps"), centred=True, bias=True),
        image=v.integer("image_size"),
        patch=v.integer("patch_size"),
        colours=TOWER_COLOURS[kind],
        last_norm=last_norm,
    )
    if kind == CLIP:
        usual = replace(usual, class_token=True, patch_bias=False, first_norm=True)
    return taking(usual, layers)


_DEFAULTS = {
    SIGLIP: {
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-6,
    },
    CLIP: {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "image_size": 336,
        "patch_size": 14,
        "hidden_act": "quick_gelu",
        "layer_norm_eps": 1e-5,
    },
}


def taking(kind: VisionTransformer, layers: tuple[int, ...]) -> VisionTransformer:
    """The encoder, no deeper than the last of these layers, whose output is taken.

    Raises:
        ModelError: it has no such layer.
    """
    taken = tuple(layer if layer >= 0 else kind.depth + 1 + layer for layer in layers)
    for layer, place in zip(layers, taken, strict=True):
        if not 0 <= place <= kind.depth:
            raise ModelError(
                f"config.json: vision_feature_layer = {layer} of a vision encoder of {kind.depth} "
                "layers"
            )
    return replace(kind, taken=taken, depth=max(1, *taken))


def seeing_tiles(
    text: LanguageModel,
    kind: VisionTransformer,
    projector: Projector,
    packings: dict[str, Packing] | None = None,
) -> LanguageModel:
    """The decoder with a vision transformer."""
    assert isinstance(text, DecoderModel)
    names = partial(visual_names, kind)
    return TiledModel(text, kind, projector, packings or {"image": InOrder()}, names)


def without_vision(text: LanguageModel) -> LanguageModel:
    """The decoder alone, of a checkpoint that may hold an encoder's tensors."""
    assert isinstance(text, DecoderModel)
    names = text.names
    return DecoderModel(text.description, replace(names, unused=(*names.unused, *TILES)))


_TOWER = {
    "encoder.layers": "layers",
    "pre_layrnorm": "first_norm",
    "post_layernorm": "last_norm",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
}
_PROJECTOR = {
    "mm_soft_emb_norm": "norm",
    "layer_norm": "norm",
    "layernorm": "norm",
}


def visual_names(kind: VisionTransformer, weights: Weights) -> Weights:
    """The encoder's tensors, without those that its output does not depend on."""
    ready: Weights = {}
    for name, array in weights.items():
        part, _, inner = name.removeprefix("visual.").partition(".")
        if part != "vision_tower":
            found = f"{part}.{renamed(inner, _PROJECTOR)}" if inner else part
            ready[found] = array
            continue
        inner = renamed(inner.removeprefix("vision_model."), _TOWER)
        if not _is_unused(kind, inner):
            ready[f"{part}.{inner}"] = _flat(array) if inner == _PATCHES else array
    # Gemma 3's norm is stored less one, and its matrix turned.
    norm, matrix = (f"multi_modal_projector.{each}" for each in ("norm.weight", _TURNED))
    if matrix in ready:
        ready[norm] = ready[norm] + 1.0
        ready["multi_modal_projector.linear.weight"] = ready.pop(matrix).T
    return ready


_PATCHES = "embeddings.patch_embedding.weight"
_TURNED = "mm_input_projection_weight"


def _is_unused(kind: VisionTransformer, name: str) -> bool:
    first, *rest = name.split(".")
    if first == "layers":
        return int(rest[0]) >= kind.depth
    ends = first == "last_norm" and not kind.last_norm
    return ends or first == "head" or name.endswith("position_ids")


def _flat(kernel: mx.array) -> mx.array:
    """A convolution over patches as a matrix; its colours are the second axis, or the last."""
    if kernel.ndim == 2:
        return kernel
    last = kernel.shape[-1] == 3
    return (kernel if last else kernel.moveaxis(1, -1)).flatten(1)
