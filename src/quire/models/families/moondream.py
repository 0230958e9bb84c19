"""Moondream 2 and 3: answers about a picture."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.core.media import EVEN_COLOURS
from quire.models.base import LanguageModel, MediaEncoder
from quire.models.decoder import DecoderModel
from quire.models.description import Description, Layer, Norm, NormPlacement
from quire.models.families.common import (
    Family,
    described,
    query_key_value,
    uniform_layers,
    with_dense,
)
from quire.models.layers.attention import Attention
from quire.models.layers.feed_forward import MLP
from quire.models.layers.moe import Mixture
from quire.models.layers.rope import RopeParameters
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import Settings
from quire.models.vision.moondream import MoondreamVision, OverlappingTiles, TauAttention
from quire.models.vision.tiles import TileEncoder
from quire.models.vision.vit import VisionTransformer
from quire.models.weights.names import Names, Weights, float_type, renamed

_TEXT_2: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "vocab_size": 51200,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_TEXT_3 = _TEXT_2 | {
    "max_position_embeddings": 4096,
    "rope_theta": 1.5e6,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "moe_start_layer": 4,
}
_VISION = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "crop_size": 378,
    "overlap_margin": 4,
    "proj_inner_dim": 8192,
    # As in the publisher's code; conversions to MLX have another value.
    "layer_norm_eps": 1e-5,
}
"""Defaults of keys that configurations omit."""
_TEXT_KEYS = {
    "dim": "hidden_size",
    "ff_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "max_context": "max_position_embeddings",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
}
_EXPERT_KEYS = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_inner_dim": "moe_intermediate_size",
    "start_layer": "moe_start_layer",
}
_VISION_KEYS = {
    "enc_dim": "hidden_size",
    "enc_ff_dim": "intermediate_size",
    "enc_n_layers": "num_hidden_layers",
    "enc_n_heads": "num_attention_heads",
    "enc_patch_size": "patch_size",
}


def moondream2(s: Settings) -> LanguageModel:
    """Build Moondream 2, as its revisions with Moondream 3's tokenizer have it."""
    text = _text(s, _TEXT_2)
    attention = _attention(text)
    layers = uniform_layers(text, attention, _dense(text))
    return _model(s, text, attention, layers=layers)


def moondream3(s: Settings) -> LanguageModel:
    text = _text(s, _TEXT_3)
    attention = TauAttention(**vars(_attention(text)))
    mixture = Mixture(
        experts=text.integer("num_experts"),
        width=text.integer("moe_intermediate_size"),
        activation="gelu",
        router=SoftmaxRouter(text.integer("num_experts_per_tok"), normalise=True),
        bias=True,  # the router's; and what is gated has one added to it
    )
    first = text.integer("moe_start_layer", minimum=0)
    layers = uniform_layers(text, attention, mixture)
    layers = with_dense(layers, _dense(text), lambda layer: layer < first)
    return _model(s, text, attention, layers=layers)


def _attention(text: Settings) -> Attention:
    heads = text.integer("num_attention_heads")
    head_dim = text.integer("head_dim", default=text.integer("hidden_size") // heads)
    if text.integer("num_key_value_heads") != heads:
        raise ModelError("config.json: num_key_value_heads is not num_attention_heads")
    rotated = text.integer("rope_dim", default=head_dim // 2)
    return Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rope=RopeParameters(text.positive("rope_theta"), partial_rotary_factor=rotated / head_dim),
        qkv_bias=True,
        out_bias=True,
        bidirectional_media=True,
    )


def _dense(text: Settings) -> MLP:
    return MLP(text.integer("intermediate_size"), "gelu_pytorch_tanh", gated=False, bias=True)


def _model(
    s: Settings, text: Settings, attention: Attention, layers: tuple[Layer, ...]
) -> LanguageModel:
    """Build the model of these layers, with the encoder."""
    vision = _vision(s)
    description = described(
        text,
        layers,
        norm=Norm(text.number("rms_norm_eps", minimum=0.0), centred=True, bias=True),
        placement=NormPlacement.PARALLEL,
        head_bias=True,
    )
    visual = MoondreamVision(
        _transformer(vision), vision.integer("proj_inner_dim"), description.hidden_size
    )
    seen = 1 + visual.kind.patches
    prefix = text.integer("prefix_attn", default=seen)
    if prefix != seen:
        raise ModelError(f"config.json: prefix_attn = {prefix}, and a picture has {seen} rows")
    names = Names(renamed=_PARTS, fused={"qkv": query_key_value(attention)}, prepare=_experts)
    return Moondream(
        description,
        names,
        visual,
        margin=vision.integer("overlap_margin", minimum=0),
        first=s.integer("bos_token_id", default=0, minimum=0),
    )


def _part(s: Settings, names: tuple[str, ...], keys: Mapping[str, str]) -> Settings:
    """Return a part of the configuration under the usual key names."""
    whole = s.within("config")
    found = whole.nested(*names, needed=False)
    given = {ours: found.values[key] for key, ours in keys.items() if found.has(key)}
    return found.filled(**given)


def _text(s: Settings, defaults: Mapping[str, Any]) -> Settings:
    found = _part(s, ("text_config", "text"), _TEXT_KEYS)
    experts = found.nested("moe", needed=False)
    given = {ours: experts.values[key] for key, ours in _EXPERT_KEYS.items() if experts.has(key)}
    return found.filled(**given).filled(**defaults)


def _vision(s: Settings) -> Settings:
    return _part(s, ("vision_config", "vision"), _VISION_KEYS).filled(**_VISION)


def _transformer(v: Settings) -> VisionTransformer:
    depth = v.integer("num_hidden_layers")
    return VisionTransformer(
        depth=depth,
        taken=(depth,),
        hidden_size=v.integer("hidden_size"),
        heads=v.integer("num_attention_heads"),
        mlp=MLP(v.integer("intermediate_size"), "gelu_pytorch_tanh", gated=False, bias=True),
        norm=Norm(v.number("layer_norm_eps", minimum=0.0), centred=True, bias=True),
        image=v.integer("crop_size"),
        patch=v.integer("patch_size"),
        colours=EVEN_COLOURS,
        last_norm=True,
    )


class Moondream(DecoderModel):
    """The decoder and its encoder. Heads for points and boxes are left out.

    Args:
        margin: see `OverlappingTiles`.
        first: id of the token that starts a text.
    """

    def __init__(
        self,
        description: Description,
        names: Names,
        visual: MoondreamVision,
        margin: int,
        first: int,
    ) -> None:
        super().__init__(description, names)
        self.visual = visual
        self._margin, self._first = margin, first

    @property
    def encoders(self) -> Mapping[str, MediaEncoder]:
        packing = OverlappingTiles(
            self.visual, self._margin, self.model.embed_tokens, first=self._first
        )
        return {"image": TileEncoder(self.visual, packing, "An image")}

    def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        text: Weights = {}
        visual: Weights = {}
        for name, array in weights.items():
            part, _, rest = name.removeprefix("model.").partition(".")
            if part == "vision":
                visual |= _encoder_tensor(rest.removeprefix("encoder."), array)
            elif part == "text":
                text[rest + ".weight" * (rest == "wte")] = array
            elif part != "region":  # finds points and boxes, which are no text
                (visual if part == "visual" else text)[name] = array
        return super().sanitize(text) | visual


_PARTS = {
    "wte": "embed_tokens",
    "blocks": "layers",
    "ln": "input_layernorm",
    "attn": "self_attn",
    "proj": "o_proj",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    "router": "gate",
    "post_ln": "norm",
}
_ENCODER_PARTS = {
    "blocks": "vision_tower.layers",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn.proj": "self_attn.out_proj",
    "attn": "self_attn",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    "patch_emb": "vision_tower.embeddings.patch_embedding",
    "pos_emb": "vision_tower.embeddings.position_embedding.weight",
    "post_ln": "vision_tower.last_norm",
    "proj_mlp.fc1": "multi_modal_projector.linear_1",
    "proj_mlp.fc2": "multi_modal_projector.linear_2",
}


def _experts(weights: Weights) -> Weights:
    """Rename the experts' matrices, and add one to the gated part."""
    ready: Weights = {}
    dtype = float_type(weights)
    for name, array in weights.items():
        *path, module, kind = name.split(".")
        base = ".".join([*path, "experts"])
        if array.ndim != 3 or module not in ("fc1", "fc2"):
            ready[name] = array
        elif module == "fc2":
            ready[f"{base}.down_proj.{kind}"] = array
            if kind == "weight":
                ready[f"{base}.down_proj.bias"] = mx.zeros(array.shape[:2], dtype)
        else:
            gate, up = mx.split(array, 2, axis=1)
            ready |= {f"{base}.gate_proj.{kind}": gate, f"{base}.up_proj.{kind}": up}
            if kind == "weight":
                ready[f"{base}.gate_proj.bias"] = mx.zeros(gate.shape[:2], dtype)
                ready[f"{base}.up_proj.bias"] = mx.ones(up.shape[:2], dtype)
    return ready


def _encoder_tensor(name: str, array: mx.array) -> Weights:
    """Rename an encoder tensor; fused queries, keys and values become three tensors."""
    ours = "visual." + renamed(name, _ENCODER_PARTS)
    if ours.endswith("patch_embedding.weight"):
        # Published patches have the colours as the outermost axis.
        side = round((array.shape[1] / 3) ** 0.5)
        array = array.reshape(-1, 3, side, side).moveaxis(1, -1).flatten(1)
    elif ours.endswith("position_embedding.weight"):
        array = array.reshape(array.shape[-2:])
    if ".qkv." in ours:
        parts = zip("qkv", mx.split(array, 3), strict=True)
        return {ours.replace(".qkv.", f".{part}_proj."): rows for part, rows in parts}
    return {ours: array}


def _context(s: Settings, defaults: Mapping[str, Any]) -> int:
    return _text(s, defaults).integer("max_position_embeddings")


_SECOND = partial(_context, defaults=_TEXT_2)
FAMILIES = (
    Family("moondream1", "Moondream 2, text and an image", moondream2, context=_SECOND),
    Family("moondream2", "Moondream 2, text and an image", moondream2, context=_SECOND),
    Family(
        "moondream3",
        "Moondream 3, text and an image",
        moondream3,
        context=partial(_context, defaults=_TEXT_3),
    ),
)
