"""gpt-oss (arXiv:2508.10925)."""

from __future__ import annotations

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.families.common import (
    Family,
    attention,
    by_type,
    decoder,
    rms,
    softmax_mixture,
    windows,
)
from quire.models.layers.routers import SoftmaxRouter
from quire.models.settings import FULL, SLIDING, Settings
from quire.models.weights.names import Names, Weights


def gpt_oss(s: Settings) -> LanguageModel:
    s = s.filled(num_experts_per_tok=s.integer("experts_per_token", default=4), head_dim=64)
    if not s.has("rope_scaling"):
        s = s.filled(rope_parameters=_YARN)
    bias = s.flag("attention_bias", default=True)
    usual = attention(s, rope=s.rope(theta=1.5e5), qkv_bias=bias, out_bias=bias, sinks=True)
    experts = softmax_mixture(
        s,
        width=s.integer("intermediate_size"),
        router=SoftmaxRouter(s.integer("num_experts_per_tok"), normalise=True),
        bias=True,
        clamp=(s.number("swiglu_alpha", default=1.702), s.number("swiglu_limit", default=7.0)),
    )
    count = s.integer("num_hidden_layers")
    types = s.layer_types([FULL if index % 2 else SLIDING for index in range(count)])
    layers = by_type(types, windows(s, usual, 128), experts)
    names = Names(renamed={"router": "gate"}, prepare=_separated)
    return decoder(s, layers, names, norm=rms(s, 1e-5))


_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary settings of the published models, used if the configuration gives none."""


def _separated(weights: Weights) -> Weights:
    """Split gate and up of the experts, each matrix `[experts, out, in]`.

    Published files hold MXFP4 in blocks of 16 bytes with two codes each, which equal four of MLX's
    words of eight codes. Other files hold `[experts, in, out]`. Rows of gate and up are
    interleaved.
    """
    ready: Weights = {}
    for name, array in weights.items():
        path, _, kind = name.rpartition(".")
        if not path.endswith(".experts") or kind in ("weight", "bias", "scales", "biases"):
            ready[name] = array
            continue
        part, array = _part(kind, array)
        if part.startswith("gate_up_proj"):
            for at, single in enumerate(("gate_proj", "up_proj")):
                ready[f"{path}.{part.replace('gate_up_proj', single)}"] = array[:, at::2]
        else:
            ready[f"{path}.{part}"] = array
    return ready


def _part(kind: str, array: mx.array) -> tuple[str, mx.array]:
    """Return the name and contents of a stacked tensor in MLX's form, with rows on the
    second axis.
    """
    if kind.endswith("_blocks"):
        return kind.replace("_blocks", ".weight"), array.view(mx.uint32).flatten(-2)
    for ending in ("bias", "scales"):
        if kind.endswith(f"_{ending}"):
            return kind.replace(f"_{ending}", f".{ending}"), array
    return f"{kind}.weight", array.swapaxes(-1, -2)


FAMILIES = (Family("gpt_oss", "gpt-oss", gpt_oss),)
