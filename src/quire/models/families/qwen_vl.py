"""Qwen2-VL (arXiv:2409.12191), 2.5-VL (arXiv:2502.13923), 3-VL, 3.5 and 3-Omni, with encoders.

Of Qwen3-Omni (arXiv:2509.17765), which also hears, the thinker is served: it answers in text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.core.media import CLIP_COLOURS, EVEN_COLOURS
from quire.core.values import require
from quire.models.audio.qwen import AudioTower, QwenAudio
from quire.models.base import LanguageModel
from quire.models.decoder import DecoderModel
from quire.models.description import Description, Norm
from quire.models.families.common import Family, activation, described, text_of
from quire.models.families.qwen import (
    QWEN3_5_NAMES,
    qwen2_layers,
    qwen3_5_ahead,
    qwen3_5_layers,
    qwen3_layers,
    qwen3_moe_layers,
    with_axes,
)
from quire.models.layers.feed_forward import MLP
from quire.models.settings import Settings
from quire.models.vision.place_table import Table
from quire.models.vision.qwen import QwenVision, VisionTower
from quire.models.vision.vision_language import (
    VISUAL,
    AudioVisionLanguageModel,
    VisionLanguageModel,
)
from quire.models.weights.names import Names, Weights, renamed

Vision = Callable[[Settings, int], QwenVision]
"""Describes the encoder, from `vision_config` and the decoder's width."""

_LAYER_NORM = Norm(1e-6, centred=True, bias=True)


def qwen2_vl(s: Settings) -> LanguageModel:
    text = _three_axes(s, (16, 24, 24), interleaved=False, theta=1e6).filled(rms_norm_eps=1e-5)
    return vision_language_model(s, described(text, qwen2_layers(text)), _vision_2)


def qwen2_5_vl(s: Settings) -> LanguageModel:
    text = _three_axes(s, (16, 24, 24), interleaved=False, theta=1e6).filled(rms_norm_eps=1e-5)
    return vision_language_model(s, described(text, qwen2_layers(text)), vision_2_5)


def qwen3_vl(s: Settings) -> LanguageModel:
    text = _three_axes(s, (24, 20, 20), interleaved=True, theta=5e5)
    return vision_language_model(s, described(text, qwen3_layers(text)), _vision_3)


def qwen3_vl_moe(s: Settings) -> LanguageModel:
    text = _three_axes(s, (24, 20, 20), interleaved=True, theta=5e5).filled(norm_topk_prob=True)
    names = Names(prepare=partial(_experts_by_rows, text.integer("hidden_size")))
    return vision_language_model(s, described(text, qwen3_moe_layers(text)), _vision_3, names=names)


def qwen3_5(s: Settings) -> LanguageModel:
    text = text_of(s)
    return vision_language_model(
        s,
        described(text, qwen3_5_layers(text), ahead=qwen3_5_ahead(text)),
        _vision_3,
        names=QWEN3_5_NAMES,
    )


def qwen3_omni_moe(s: Settings) -> LanguageModel:
    thinker = s.within("thinker_config")
    text = _three_axes(thinker, (24, 20, 20), interleaved=True, theta=1e6)
    text = text.filled(norm_topk_prob=True)
    description = described(text, qwen3_moe_layers(text))
    width, times = description.hidden_size, thinker.integer("position_id_per_seconds", default=25)
    kind = _described(_vision_3, thinker.within("vision_config"), width)
    kind = replace(kind, times=times, between=True)
    audio = _audio(thinker.within("audio_config"), width)
    names = partial(_visual_names, kind, parts=_PARTS)
    return AudioVisionLanguageModel(
        description, Names(), VisionTower(kind), visual_names=names, audio_tower=AudioTower(audio)
    )


def _omni_context(s: Settings) -> int:
    return text_of(s.within("thinker_config")).integer("max_position_embeddings")


def _audio(a: Settings, width: int) -> QwenAudio:
    chunk = 2 * a.integer("n_window", default=50)
    return QwenAudio(
        bins=a.integer("num_mel_bins", default=128),
        depth=a.integer("encoder_layers", "num_hidden_layers"),
        hidden_size=a.integer("d_model"),
        heads=a.integer("encoder_attention_heads"),
        width=a.integer("encoder_ffn_dim"),
        channels=a.integer("downsample_hidden_size", default=480),
        chunk=chunk,
        window=a.integer("n_window_infer", default=800) // chunk,
        activation=activation(a.filled(hidden_act=a.word("activation_function", default="gelu"))),
        output_size=width,
    )


def vision_language_model(
    s: Settings,
    description: Description,
    vision: Vision,
    names: Names | None = None,
    tower: Callable[[QwenVision], VisionTower] = VisionTower,
    parts: Mapping[str, str] | None = None,
    model: type[VisionLanguageModel] = VisionLanguageModel,
    prepare: Callable[[QwenVision, Weights], Weights] | None = None,
) -> LanguageModel:
    """Build the described decoder with the configuration's vision encoder, if it has one.

    Args:
        parts: translations of parts of the encoder's tensor names; see `Names.renamed`.
        model: the model's class, which defines a prompt's positions.
        prepare: conversion of the encoder's tensors before `parts` is applied.
    """
    names = names or Names()
    if not s.has("vision_config"):
        return DecoderModel(description, replace(names, unused=(*names.unused, *VISUAL)))
    kind = _described(vision, s.within("vision_config"), description.hidden_size)

    def brought(weights: Weights) -> Weights:
        ready = weights if prepare is None else prepare(kind, weights)
        return _visual_names(kind, ready, parts or _PARTS)

    return model(description, names, tower(kind), visual_names=brought)


def _described(vision: Vision, v: Settings, width: int) -> QwenVision:
    """Describe the encoder, with the configuration's rotation."""
    require(
        "vision_config.rope_type", v.rope_type(), ("default", "axial")
    )  # two names of the same type
    given = v.filled(**v.scaling().values)
    return replace(vision(v, width), theta=given.positive("rope_theta", default=1e4))


def _three_axes(
    s: Settings, section: tuple[int, int, int], *, interleaved: bool, theta: float
) -> Settings:
    text = text_of(s).filled(rope_theta=theta)
    return with_axes(text, section, interleaved=interleaved)


def _usual(v: Settings, width: int) -> QwenVision:
    """Return the settings that the encoders have in common."""
    return QwenVision(
        depth=v.integer("depth"),
        hidden_size=v.integer("hidden_size"),
        heads=v.integer("num_heads"),
        mlp=MLP(v.integer("intermediate_size"), activation(v), gated=False, bias=True),
        norm=_LAYER_NORM,
        output_size=width,
        patch=v.integer("patch_size"),
        frames=v.integer("temporal_patch_size", default=2),
        merge=v.integer("spatial_merge_size", default=2),
        colours=CLIP_COLOURS,
    )


def _vision_2(v: Settings, width: int) -> QwenVision:
    hidden = v.integer("embed_dim", default=1280)
    ratio = v.number("mlp_ratio", default=4)
    inner = int(hidden * ratio)
    return _usual(
        v.filled(hidden_act="quick_gelu").changed(hidden_size=hidden, intermediate_size=inner),
        width,
    )


def vision_2_5(v: Settings, width: int) -> QwenVision:
    """Describe Qwen2.5-VL's encoder."""
    v = v.filled(fullatt_block_indexes=[7, 15, 23, 31])
    usual = _usual(v, width)
    return replace(
        usual,
        mlp=replace(usual.mlp, gated=True),
        norm=Norm(1e-6),
        window=v.integer("window_size", default=112) // usual.patch // usual.merge,
        whole=v.integers("fullatt_block_indexes"),
        times=v.integer("tokens_per_second", default=4),
    )


def _vision_3(v: Settings, width: int) -> QwenVision:
    return replace(
        _usual(v.filled(hidden_act="gelu_pytorch_tanh"), width),
        colours=EVEN_COLOURS,
        patch_bias=True,
        table=Table(int(v.integer("num_position_embeddings", default=2304) ** 0.5)),
        levels=v.integers("deepstack_visual_indexes"),
    )


_PARTS = {
    "ln_q": "norm",
    "mlp.0": "linear_fc1",
    "mlp.2": "linear_fc2",
    "merger_list": "deepstack_merger_list",
    **{f"mlp.{prefix}fc1": "mlp.up_proj" for prefix in ("", "linear_")},
    **{f"mlp.{prefix}fc2": "mlp.down_proj" for prefix in ("", "linear_")},
    # GLM's
    "embeddings.position_embedding": "pos_embed",
    "post_conv_layernorm": "patch_embed.norm",
    "post_layernorm": "merger.norm",
    "downsample": "merger.downsample",
    "merger.downsample": "merger.downsample",
}
_UNREAD = ("head.", "embeddings.packing_position_embedding.", "embeddings.position_ids")
"""Prefixes of tensors of SigLIP's and PaddleOCR-VL's encoders that are used only in training."""
_KERNELS = ("patch_embed.proj.weight", "merger.downsample.weight")
_BY_CHANNEL = ".attn.kernel"


def _visual_names(kind: QwenVision, weights: Weights, parts: Mapping[str, str]) -> Weights:
    """Rename and convert the encoder's tensors. Some matrices are published as convolutions.

    Their input axis, colours or channels, is the second; in conversions it is the last.
    """
    channels = {3, kind.hidden_size}
    named = {renamed(name, parts): array for name, array in weights.items()}
    ready = joined({name: each for name, each in named.items() if not name.startswith(_UNREAD)})
    for name in _KERNELS:
        kernel = ready.get(name)
        if kernel is not None and kernel.ndim > 2:
            last = kernel.shape[-1] in channels
            ready[name] = (kernel if last else kernel.moveaxis(1, -1)).flatten(1)
    return {
        name: _by_channel(array) if name.endswith(_BY_CHANNEL) else array
        for name, array in ready.items()
    }


def _by_channel(kernel: mx.array) -> mx.array:
    """Return a depthwise convolution's kernel as `[rows, columns, channels]`.

    Published kernels have one more axis of size one, the second or the last.
    """
    if kernel.ndim == 3:
        return kernel
    side = round((kernel.size // len(kernel)) ** 0.5)
    return kernel.reshape(len(kernel), side, side).moveaxis(0, -1)


def joined(weights: Weights) -> Weights:
    """Join separate projections of queries, keys and values."""
    ready = {}
    for name, array in weights.items():
        base, _, kind = name.rpartition(".")
        if base.endswith(".q_proj"):
            three = [weights[f"{base[:-6]}{part}_proj.{kind}"] for part in "qkv"]
            ready[f"{base[:-6]}qkv.{kind}"] = mx.concatenate(three)
        elif not base.endswith((".k_proj", ".v_proj")):
            ready[name] = array
    return ready


def _experts_by_rows(hidden: int, weights: Weights) -> Weights:
    """Transpose experts' matrices, which Qwen3-VL-MoE publishes as `[in, out]`, unless already
    done.

    The layout is determined from both matrices' shapes, as one of them may be square.
    """

    def transposed(name: str) -> bool:
        experts, _, part = name.rpartition(".")
        if not experts.endswith(".experts") or part not in ("gate_up_proj", "down_proj"):
            return False
        rows = weights[f"{experts}.gate_up_proj"].shape[-2]
        return rows == weights[f"{experts}.down_proj"].shape[-1] == hidden

    return {
        name: array.swapaxes(-1, -2) if transposed(name) else array
        for name, array in weights.items()
    }


_OMNI = "Qwen3-Omni, thinker: text, images, video and sound"

FAMILIES = (
    Family("qwen2_vl", "Qwen2-VL, text, images and video", qwen2_vl),
    Family("qwen2_5_vl", "Qwen2.5-VL, text, images and video", qwen2_5_vl),
    Family("qwen3_vl", "Qwen3-VL, text, images and video", qwen3_vl),
    Family("qwen3_vl_moe", "Qwen3-VL-MoE, text, images and video", qwen3_vl_moe),
    Family("qwen3_5", "Qwen3.5, text, images and video", qwen3_5),
    Family("qwen3_5_moe", "Qwen3.5-MoE, text, images and video", qwen3_5),
    Family("qwen3_omni_moe", _OMNI, qwen3_omni_moe, context=_omni_context),
    Family("qwen3_omni_moe_thinker", _OMNI, qwen3_omni_moe),
)
