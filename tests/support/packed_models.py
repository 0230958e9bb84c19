"""Models of random weights whose matrices are packed, as graphs record them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from quire.device.weights import Packing
from quire.models.base import LanguageModel, named_layers, named_parameters
from quire.models.decoder import DecoderModel
from quire.models.layers.linear import use_device_products
from quire.models.registry import build
from quire.models.weights.layouts import store_joined
from quire.models.weights.quantization import has_float_codes, pack_like, packed_twin
from tests.support.packings import MXFP4, packed
from tests.support.tiny_models import with_small_scores

FOUR_BITS = Packing(64, 4, "affine")
_SPREAD = 0.2
"""Standard deviation of drawn vectors from what a built model holds."""
_WIDE = ("e_score_correction_bias", "A_log", ".D", "dt_bias", "indexer.k_norm.weight")
"""Ends of names of tensors that checkpoints in bfloat16 have in float32."""


def in_codes(model: nn.Module, packing: Packing = FOUR_BITS, within: str = "") -> None:
    """Mutates: pack all matrices, or those with a word in their names."""
    twins: list[tuple[str, nn.Module]] = []
    for path, module in named_layers(model).items():
        if within in path and _is_packed(module, max(64, packing.group_size)):
            weight, twin = packed(module.weight, packing), packed_twin(module, packing)
            parts = {"weight": weight.codes, "scales": weight.scales, "biases": weight.biases}
            twin.update({name: each for name, each in parts.items() if each is not None})
            twins.append((path, twin))
    model.update_modules(tree_unflatten(twins))


def experts_in_mxfp4(model: nn.Module) -> None:
    """Mutates: pack the matrices of experts alone, as gpt-oss is published."""
    in_codes(model, MXFP4, "experts")


def packed_model(
    config: dict[str, Any], pack: Callable[[nn.Module], None] = in_codes, heads: int = 0
) -> LanguageModel:
    """Return a packed model of random weights.

    Args:
        heads: how many heads of the family's checkpoints it has.
    """
    twin, model = build(config), build(config)
    for each in (twin, model) if heads else ():
        assert isinstance(each, DecoderModel)
        names = each.names.heads[:heads]
        assert each.add_heads([f"model.{name.layer}" for name in names]) == heads
    draw_constants(twin)
    pack(twin)
    weights = dict(named_parameters(twin))
    kept = [path for path in named_layers(twin) if has_float_codes(weights, path)]
    weights |= {
        name: _narrow(each)
        for name, each in weights.items()
        if name.removesuffix(".scales") not in kept and not name.endswith(_WIDE)
    }
    if str(config["model_type"]).startswith("gemma4"):
        weights = with_small_scores(weights)
    pack_like(model, weights)
    use_device_products(model)
    model.load_weights(list(weights.items()))
    mx.eval(list(weights.values()))
    return model


def draw_constants(model: nn.Module) -> None:
    """Mutates: draw what a built model holds as equal numbers until a checkpoint fills it, such as
    experts and convolutions; norms, biases, sinks and scales stay near what they are.
    """
    drawn = {name: _drawn(name, each) for name, each in named_parameters(model).items()}
    model.load_weights(list(drawn.items()), strict=False)


def _drawn(name: str, each: mx.array) -> mx.array:
    noise = mx.random.normal(each.shape)
    if name.endswith("A_log"):
        return noise - 2  # states last for some tokens
    if each.ndim < 2:
        return each + _SPREAD * noise
    if mx.any(each != each.flatten()[0]):
        return each
    if "conv" in name:
        return noise * each[0].size ** -0.5
    return noise * (3 * each.shape[-1]) ** -0.5  # as large as those of `nn.Linear`


def join_matrices(model: LanguageModel) -> None:
    """Mutates: store plain matrices that multiply the same rows as one, as for a CUDA device."""
    weights = named_parameters(model)
    store_joined(model, weights)
    model.load_weights(list(weights.items()))
    mx.eval(list(weights.values()))


def _is_packed(module: nn.Module, group: int) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % group == 0


def _narrow(each: mx.array) -> mx.array:
    return each.astype(mx.bfloat16) if each.dtype == mx.float32 else each
