"""Models of random weights whose matrices are packed, as graphs record them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from quire.device.weights import Packing
from quire.models.base import LanguageModel, named_layers, named_parameters
from quire.models.layers.linear import use_device_products
from quire.models.layers.moe import ExpertLinear
from quire.models.registry import build
from quire.models.weights.layouts import store_joined
from quire.models.weights.quantization import has_float_codes, pack_like, packed_twin
from tests.support.packings import MXFP4, packed
from tests.support.tiny_models import with_small_scores

FOUR_BITS = Packing(64, 4, "affine")


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
    """Mutates: draw the matrices of experts, which are zeros where a model is built, and pack them
    alone, as gpt-oss is published.
    """
    for module in named_layers(model).values():
        if isinstance(module, ExpertLinear):
            drawn = mx.random.normal(module.weight.shape) * module.weight.shape[-1] ** -0.5
            module.weight = drawn / 4  # so that little changes where rounding chooses an expert
    in_codes(model, MXFP4, "experts")


def packed_model(
    config: dict[str, Any], pack: Callable[[nn.Module], None] = in_codes
) -> LanguageModel:
    twin, model = build(config), build(config)
    pack(twin)
    weights = dict(named_parameters(twin))
    kept = [path for path in named_layers(twin) if has_float_codes(weights, path)]
    weights |= {
        name: _narrow(each)
        for name, each in weights.items()
        if name.removesuffix(".scales") not in kept
    }
    if str(config["model_type"]).startswith("gemma4"):
        weights = with_small_scores(weights)
    pack_like(model, weights)
    use_device_products(model)
    model.load_weights(list(weights.items()))
    mx.eval(list(weights.values()))
    return model


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
