"""Translates tensor names of checkpoints older than transformers' support to transformers'
names.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

from quire.models.weights.names import Weights

log = logging.getLogger("quire.models")

_GENERATION = ("gen_vision_model.", "gen_aligner.", "gen_head.", "gen_embed.")
"""Prefixes of Janus's tensors that generate images."""


def internvl_chat(weights: Weights) -> Weights:
    """Translate OpenGVLab's InternVL."""
    ready: Weights = {}
    for name, array in _split_qkv(weights, "vision_model.").items():
        if not name.startswith("vision_model."):
            ready[_with_our_prefix(name, _INTERNVL_PARTS)] = array
            continue
        inner = _layer_name(name.removeprefix("vision_model."))
        inner = re.sub(r"\.ls(\d)$", r".scale\1", inner)
        if inner == "embeddings.position_embedding":
            inner += ".weight"
        ready["vision_tower." + inner] = array
    return ready


_INTERNVL_PARTS = {
    "mlp1.0.": "multi_modal_projector.layer_norm.",
    "mlp1.1.": "multi_modal_projector.linear_1.",
    "mlp1.3.": "multi_modal_projector.linear_2.",
}


def deepseek_vl(weights: Weights) -> Weights:
    """Translate DeepSeek's DeepSeek-VL and Janus with one encoder, whose parts have timm's
    names.
    """
    ready: Weights = {}
    for name, array in _split_qkv(_without_generation(weights), "vision_model.").items():
        if name.startswith("vision_model."):
            inner = name.removeprefix("vision_model.").removeprefix("vision_tower.")
            if not inner.startswith("attn_pool."):
                ready["vision_tower." + _siglip_name(inner)] = array
        else:
            ready[_with_our_prefix(name, _ALIGNER)] = array
    return ready


_ALIGNER = {
    "aligner.layers.0.": "multi_modal_projector.linear_1.",
    "aligner.layers.2.": "multi_modal_projector.linear_2.",
}


def deepseek_vl_hybrid(weights: Weights) -> Weights:
    """Translate DeepSeek's DeepSeek-VL with two encoders."""
    ready: Weights = {}
    low = "vision_model.vision_tower_low."
    for name, array in _split_qkv(weights, low).items():
        if name.startswith(low):
            inner = name.removeprefix(low).removeprefix("vision_tower.")
            if not inner.startswith("attn_pool."):
                ready["vision_model." + _siglip_name(inner)] = array
        elif name.startswith(_HIGH):
            ready[_sam_name(name.removeprefix(_HIGH).removeprefix("vision_tower."))] = array
        else:
            ready[_with_our_prefix(name, _HYBRID_ALIGNER)] = array
    return ready


_HIGH = "vision_model.vision_tower_high."
_HYBRID_ALIGNER = {
    "aligner.high_up_proj.": "aligner.high_res_vision_proj.",
    "aligner.low_up_proj.": "aligner.vision_proj.",
    "aligner.layers.1.": "aligner.proj.",
}
_NECK = {"0": "conv1", "1": "layer_norm1", "2": "conv2", "3": "layer_norm2"}


def _sam_name(name: str) -> str:
    """Translate a tensor name of the large encoder."""
    part, _, rest = name.partition(".")
    if part == "hd_alpha_downsamples":
        return "high_res_vision_alpha"
    if part in ("neck", "neck_hd"):
        number, _, kind = rest.partition(".")
        place = "high_res_vision_model.neck" if part == "neck" else "high_res_vision_neck"
        return f"{place}.{_NECK[number]}.{kind}"
    if part == "downsamples":
        number, _, kind = rest.partition(".")
        return f"high_res_vision_proj.conv{int(number) + 1}.{kind}"
    inner = re.sub(r"^blocks\.", "layers.", name).replace(".norm", ".layer_norm")
    return "high_res_vision_model." + inner.replace("patch_embed.proj.", "patch_embed.projection.")


def _siglip_name(name: str) -> str:
    """Translate a tensor name of timm's vision transformer."""
    fixed = {
        "pos_embed": "embeddings.position_embedding.weight",
        "patch_embed.proj.weight": "embeddings.patch_embedding.weight",
        "patch_embed.proj.bias": "embeddings.patch_embedding.bias",
        "norm.weight": "post_layernorm.weight",
        "norm.bias": "post_layernorm.bias",
    }
    return fixed.get(name) or _layer_name(re.sub(r"^blocks\.", "encoder.layers.", name))


def _layer_name(name: str) -> str:
    """Translate a tensor name within a layer."""
    for theirs, ours in (
        (".attn.", ".self_attn."),
        (".self_attn.proj.", ".self_attn.out_proj."),
        (".norm1.", ".layer_norm1."),
        (".norm2.", ".layer_norm2."),
    ):
        name = name.replace(theirs, ours)
    return name


def _split_qkv(weights: Weights, prefix: str) -> Weights:
    """Split fused queries, keys and values of the encoder with this prefix."""
    ready: Weights = {}
    for name, array in weights.items():
        if not name.startswith(prefix) or ".attn.qkv." not in name:
            ready[name] = array
            continue
        width = len(array) // 3
        for number, part in enumerate(("q_proj", "k_proj", "v_proj")):
            rows = array[number * width : (number + 1) * width]
            ready[name.replace(".qkv.", f".{part}.")] = rows
    return ready


def _with_our_prefix(name: str, parts: Mapping[str, str]) -> str:
    """Replace a prefix by its translation in `parts`."""
    for theirs, ours in parts.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def _without_generation(weights: Weights) -> Weights:
    """Drop the tensors that generate images."""
    kept = {name: array for name, array in weights.items() if not name.startswith(_GENERATION)}
    if len(kept) < len(weights):
        log.info("Image generation is not supported: the model answers in text")
    return kept
