"""StableLM 2 and StableLM 3B (arXiv:2402.17834)."""

from __future__ import annotations

import re

import mlx.core as mx

from quire.models.base import LanguageModel
from quire.models.description import Norm, NormPlacement
from quire.models.families.common import Family, attention, decoder, mlp, uniform_layers
from quire.models.layers.attention import Over, QKNorm
from quire.models.settings import Settings
from quire.models.weights.names import Names, Weights

_HEAD = re.compile(r"(.*\.)([qk])_layernorm\.norms\.(\d+)\.weight")


def stablelm(s: Settings) -> LanguageModel:
    norm = Norm(s.number("layer_norm_eps", default=1e-5, minimum=0.0), centred=True, bias=True)
    heads = QKNorm(Norm(norm.eps, centred=True), Over.EACH_HEAD)
    usual = attention(
        s,
        rope=s.rope(partial=0.25),
        qkv_bias=s.flag("use_qkv_bias", default=False),
        out_bias=False,
        qk_norm=heads if s.flag("qk_layernorm", default=False) else None,
    )
    parallel = s.flag("use_parallel_residual", default=False)
    return decoder(
        s,
        uniform_layers(s, usual, mlp(s, bias=False)),
        Names(prepare=_stacked_norms),
        norm=norm,
        placement=NormPlacement.PARALLEL if parallel else NormPlacement.PRE,
    )


def _stacked_norms(weights: Weights) -> Weights:
    """Stack the norms of heads, which are separate tensors in checkpoints, to one matrix."""
    ready: Weights = {}
    heads: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        if match := _HEAD.fullmatch(name):
            path, which, head = match.groups()
            heads.setdefault(f"{path}{which}_norm.weight", {})[int(head)] = array
        else:
            ready[name] = array
    for name, parts in heads.items():
        ready[name] = mx.stack([parts[head] for head in sorted(parts)])
    return ready


FAMILIES = (Family("stablelm", "StableLM 3B, StableLM 2", stablelm),)
