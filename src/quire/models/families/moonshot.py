"""Kimi K2.5 (arXiv:2602.02276), Kimi-VL (arXiv:2504.07491), Kimi Linear (arXiv:2510.26692) and K3.

The first two use DeepSeek V3's decoder, and take pictures. Kimi Linear combines
delta nets with per-channel decay and latent attention without positions, and so does Kimi K3.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np

from quire.core.media import EVEN_COLOURS
from quire.models.base import LanguageModel
from quire.models.description import Mixer, Norm, NormPlacement
from quire.models.families.common import (
    EXPERT_PARTS,
    Family,
    activation,
    by_type,
    decoder,
    dense_by_type,
    mlp,
    rms,
    sigmoid_mixture,
    text_of,
    with_dense,
)
from quire.models.families.deepseek import deepseek_v3_described, latent_attention
from quire.models.families.qwen_vl import vision_language_model
from quire.models.layers.attention_residuals import AttentionResiduals
from quire.models.layers.feed_forward import MLP
from quire.models.layers.kimi_delta import KimiDelta
from quire.models.layers.latent_attention import LatentAttention
from quire.models.settings import FULL, LINEAR, Settings
from quire.models.vision.paddle import PaddleMerging, PictureTower
from quire.models.vision.place_table import Table
from quire.models.vision.qwen import QwenVision
from quire.models.vision.vision_language import TextPositionsModel
from quire.models.weights.names import Names, Weights, renamed

PUBLISHED_KEYS = {
    "num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
    "moe_router_activation_func": "scoring_func",
}
"""Moonshot's names of DeepSeek V3's keys, also used by Ling 3.0."""


def kimi_linear(s: Settings) -> LanguageModel:
    s.only("hidden_act", "silu")
    s = _renamed(s).filled(routed_scaling_factor=2.446, n_shared_experts=1, num_experts_per_tok=8)
    latents = _latents(s)
    mixers: dict[str, Mixer] = {FULL: latents, LINEAR: _delta(s)}
    layers = by_type(_types(s), mixers, sigmoid_mixture(s))
    first = s.integer("first_k_dense_replace", default=1, minimum=0)
    names = Names(_EXPERTS, unused=("mtp.",), prepare=partial(delta_tensors, latents=latents))
    return decoder(s, with_dense(layers, mlp(s, bias=False), dense_by_type(s, first)), names)


_EXPERTS = EXPERT_PARTS | {
    "block_sparse_moe": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}


def _renamed(s: Settings) -> Settings:
    """Translate the published keys; refuse what Kimi Linear and K3 do not have."""
    s.only("mla_use_nope", True)
    s.only("moe_layer_freq", 1)
    s.only("use_grouped_topk", True)
    s = s.filled(**{ours: s.value(key) for key, ours in PUBLISHED_KEYS.items() if s.has(key)})
    return s.filled(rms_norm_eps=1e-5)


def _latents(s: Settings) -> LatentAttention:
    return replace(latent_attention(s.changed(rope_scaling=None, rope_parameters=None)), rope=None)


def kimi_k3(s: Settings) -> LanguageModel:
    """Build Kimi K3 for text; its encoder is left out."""
    s = _renamed(text_of(s)).filled(num_experts_per_tok=16)
    s.only("hidden_act", "situ")
    s = s.changed(hidden_act="silu")  # of which SiTU has softcaps
    softcaps = (
        s.number("activation_situ_beta", default=1.0),
        s.number("activation_situ_linear_beta", default=0.0),
    )
    latents = _latents(s)
    if s.flag("mla_use_output_gate", default=False):
        latents = replace(latents, gate_dim=latents.value_dim)
    own, eps = s.nested("linear_attn_config"), rms(s).eps
    delta = replace(
        _delta(s),
        narrow_gates="f" if own.flag("use_full_rank_gate", default=False) else "fg",
        most_forgotten=own.number("gate_lower_bound") if own.has("gate_lower_bound") else None,
    )
    reduced = s.has("routed_expert_hidden_size")
    experts = sigmoid_mixture(
        s,
        softcaps=softcaps,
        latent_dim=s.integer("routed_expert_hidden_size") if reduced else 0,
        latent_norm=eps if reduced and s.flag("latent_moe_use_norm", default=False) else None,
    )
    mixers: dict[str, Mixer] = {FULL: latents, LINEAR: delta}
    first = s.integer("first_k_dense_replace", default=0, minimum=0)
    layers = with_dense(
        by_type(_types(s), mixers, experts),
        mlp(s, bias=False, softcaps=softcaps),
        dense_by_type(s, first),
    )
    residuals: AttentionResiduals | None = None
    if s.has("attn_res_block_size"):
        length = s.integer("attn_res_block_size")
        residuals = AttentionResiduals(length, eps)
        places = NormPlacement.MIXING, NormPlacement.STARTING
        layers = tuple(
            replace(layer, placement=places[index % length == 0])
            for index, layer in enumerate(layers)
        )
    names = Names(
        renamed=_EXPERTS
        | {
            "qkv_conv1d": "conv1d",
            "routed_expert_down_proj": "fc1_latent_proj",
            "routed_expert_up_proj": "fc2_latent_proj",
            "routed_expert_norm": "latent_norm",
            "output_attn_res": "hc_head",
        },
        fused={"qkv_proj": tuple((f"{each}_proj", delta.width) for each in "qkv")},
        unused=("mtp.", "vision_tower.", "mm_projector."),
        prepare=partial(_k3_tensors, latents=latents, heads=delta.heads),
    )
    return decoder(s, layers, names, residuals=residuals)


_SCORES = re.compile(r"(.*(?:self_attention|mlp|output_attn)_res)[_.](norm|proj)[_.]weight")


def _k3_tensors(weights: Weights, latents: LatentAttention, heads: int) -> Weights:
    """Multiply the weights by which sums are scored: of a norm, and of a product behind it."""
    ready: Weights = {}
    for name, array in weights.items():
        if match := _SCORES.fullmatch(name):
            name = f"{match[1]}.weight"
            array = ready.get(name, 1.0) * array.astype(mx.float32).reshape(1, -1)
        elif name.endswith(".A_log"):
            array = array.flatten()[:heads]
        ready[name] = array
    return delta_tensors(ready, latents)


def _delta(s: Settings) -> KimiDelta:
    own = s.nested("linear_attn_config", needed=False)
    return KimiDelta(
        heads=own.integer("num_heads", default=s.integer("linear_num_heads", default=32)),
        head_dim=own.integer("head_dim", default=s.integer("linear_head_dim", default=128)),
        kernel=own.integer(
            "short_conv_kernel_size", default=s.integer("linear_conv_kernel_dim", default=4)
        ),
        eps=rms(s).eps,
    )


def _types(s: Settings) -> tuple[str, ...]:
    """Return the mixer type of each layer.

    Raises:
        ModelError: the lists of `linear_attn_config`, which count layers from one, do not name each
            layer once.
    """
    count, own = s.integer("num_hidden_layers"), s.nested("linear_attn_config", needed=False)
    usual = [FULL if index and index % 4 == 0 else LINEAR for index in range(count)]
    full, linear = own.integers("full_attn_layers"), own.integers("kda_layers")
    if full or linear:
        if sorted(full + linear) != list(range(1, count + 1)):
            raise own.error("kda_layers", f"which with full_attn_layers is not 1 to {count}")
        usual = [FULL if index + 1 in full else LINEAR for index in range(count)]
    return s.layer_types(usual, (FULL, LINEAR))


def delta_tensors(weights: Weights, latents: LatentAttention) -> Weights:
    """Join the three convolutions of a layer, channels last, and flatten rates and biases."""
    ready: Weights = {}
    for name, array in weights.items():
        path, _, part = name.partition(".self_attn.")
        part = part.removeprefix("forget_gate.")  # transformers'
        if part in ("A_log", "dt_bias"):
            array = array.flatten()
        elif part.endswith(("conv1d.weight", "_conv.conv.weight")):
            array = array if array.shape[-1] == 1 else array.swapaxes(-1, -2)
            part = part.replace("_conv.conv.", "_conv1d.")
        ready[f"{path}.self_attn.{part}" if part else name] = array
    for name in [name for name in ready if name.endswith(".self_attn.q_conv1d.weight")]:
        path = name.removesuffix("q_conv1d.weight")
        parts = [f"{path}{each}_conv1d.weight" for each in "qkv"]
        if all(part in ready for part in parts):
            ready[f"{path}conv1d.weight"] = mx.concatenate([ready.pop(part) for part in parts])
    return latents.absorbed(ready)


def kimi_k25(s: Settings) -> LanguageModel:
    """Build Kimi K2.5 or Kimi-VL for text and pictures; videos are not supported."""
    text = text_of(s)
    text.only("model_type", "deepseek_v3", "kimi_k2")
    description, names = deepseek_v3_described(text)
    names = replace(names, renamed={**names.renamed, "model.blocks": "model.layers"})
    norm = Norm(
        s.number("projection_layer_norm_eps", default=1e-5, minimum=0.0), centred=True, bias=True
    )
    return vision_language_model(
        s,
        description,
        partial(_vision, projection=norm),
        names=names,
        tower=PictureTower,
        parts=_PARTS,
        model=TextPositionsModel,
        prepare=_published,
    )


def _vision(v: Settings, width: int, projection: Norm) -> QwenVision:
    """Describe the encoder: rotation by row and column, a table of positions, and merged
    squares.
    """
    side = v.integer("pos_emb_height", default=64)
    v.only("pos_emb_width", side)
    v.only("merge_kernel_size", [2, 2])
    inner = v.integer("intermediate_size", default=4304)
    return QwenVision(
        depth=v.integer("num_hidden_layers", default=27),
        hidden_size=v.integer("hidden_size", default=1152),
        heads=v.integer("num_attention_heads", default=16),
        mlp=MLP(inner, activation(v, "gelu_pytorch_tanh"), gated=False, bias=True),
        norm=Norm(1e-5, centred=True, bias=True),
        output_size=width,
        patch=v.integer("patch_size", default=14),
        frames=1,
        merge=2,
        colours=EVEN_COLOURS,
        merging=PaddleMerging(projection),
        patch_bias=True,
        table=Table(side, cubic=True, ends=False),
    )


_LAYER = {
    "encoder.blocks": "blocks",
    "norm0": "norm1",
    "norm1": "norm2",
    "wqkv": "attn.qkv",
    "wo": "attn.proj",
    "fc0": "up_proj",
    "fc1": "down_proj",
}
_PARTS = {
    "encoder.patch_embed": "patch_embed",
    "patch_embed.pos_emb": "pos_embed",
    "encoder.final_layernorm": "merger.post_layernorm",
    "final_layernorm": "merger.post_layernorm",
    "merger.pre_norm": "merger.norm",
    "merger.linear_1": "merger.linear_fc1",
    "merger.linear_2": "merger.linear_fc2",
    "merger.proj.0": "merger.linear_fc1",
    "merger.proj.2": "merger.linear_fc2",
}
"""Parts of names for `Names.renamed`. Within a layer other parts apply, see `_LAYER`. Transformers
uses some names between the publisher's and its own.
"""


def _published(kind: QwenVision, weights: Weights) -> Weights:
    """Reorder rotated pairs: published ones alternate columns and rows; here all rows come
    first. Conversions of Kimi-VL have other names for layers.
    """
    if any(".norm0." in name for name in weights):
        weights = {
            name.replace("blocks.", "encoder.blocks.").replace(".attn.", ".")
            if name.startswith("blocks.")
            else name: array
            for name, array in weights.items()
        }
    quarter = kind.head_dim // 4
    pairs = np.arange(2 * quarter)
    taken = 2 * (pairs % quarter) + (pairs < quarter)  # index of the published pair
    order = mx.array(np.concatenate([2 * taken, 2 * taken + 1]))
    ready: Weights = {}
    for name, array in weights.items():
        if name.startswith("encoder.blocks."):
            if ".wqkv." in name:
                q, k, v = mx.split(array, 3)
                turned = (
                    mx.unflatten(part, 0, (kind.heads, -1))[:, order].flatten(0, 1)
                    for part in (q, k)
                )
                array = mx.concatenate([*turned, v])
            name = renamed(name, _LAYER)
        elif name.endswith("pos_emb.weight") and array.ndim == 3:
            array = array.flatten(0, 1)
        ready[name] = array
    return ready


def _context(s: Settings) -> int:
    return s.integer("model_max_length", "max_position_embeddings", default=1 << 20)


def _text_context(s: Settings) -> int:
    return _context(text_of(s))


FAMILIES = (
    Family("kimi_k25", "Kimi K2.5 and K2.6, text and images", kimi_k25),
    Family("kimi_k3", "Kimi K3, text", kimi_k3, context=_text_context),
    Family("kimi_linear", "Kimi Linear", kimi_linear, context=_context),
    Family("kimi_vl", "Kimi-VL, text and images", kimi_k25),
)
