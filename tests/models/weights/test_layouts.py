"""Matrices that multiply the same rows are stored as one on GPUs."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from quire.device.device import CUDA, Metal, current_device
from quire.device.weights import PackedWeight, joined_by
from quire.models.base import Module, named_parameters
from quire.models.layers.linear import joined_matrices, matrix_of, use_device_products
from quire.models.registry import build
from quire.models.weights.layouts import store_for_device, widen_codes, widened
from quire.models.weights.quantization import pack_like
from tests.support.grown import grown
from tests.support.launches import as_metal


def _stored(config: dict[str, Any], packs: bool = False) -> Any:
    """Return a model of random weights, laid out for Apple silicon."""
    mx.random.seed(0)
    model = build(config)
    weights = dict(named_parameters(model))
    for name in [each for each in weights if packs and each.endswith("_proj.weight")]:
        names = (name, name.replace("weight", "scales"), name.replace("weight", "biases"))
        weights.update(zip(names, mx.quantize(weights[name], 64, 4), strict=True))
    pack_like(model, weights)
    use_device_products(model)
    with as_metal():
        store_for_device(model, weights)
    model.load_weights(list(weights.items()))
    return model


def _codes(weight: mx.array | PackedWeight) -> mx.array:
    return weight if isinstance(weight, mx.array) else weight.codes


@pytest.mark.parametrize(
    ("name", "packs"),
    [("llama", False), ("llama", True), ("deepseek_v3", False), ("gemma4", False)],
)
def test_each_layer_keeps_its_rows_of_a_joined_matrix(name: str, packs: bool) -> None:
    model = _stored(grown(name), packs)
    sets = [
        [matrix_of(module[each]) for each in names if each in module]
        for _, module in model.named_modules()
        if isinstance(module, Module)
        for names in module.same_rows
    ]
    sets = [each for each in sets if len(each) > 1]
    assert len(sets) >= grown(name)["num_hidden_layers"]
    for matrices in sets:
        whole = joined_by(matrices)
        assert whole is not None
        rows = mx.concatenate([_codes(each.weight) for each in matrices])
        assert mx.array_equal(rows, _codes(whole.weight)).item()


def test_joined_matrices_are_in_memory_once() -> None:
    before = mx.get_active_memory()
    model = _stored(grown("llama"))
    weights = named_parameters(model)
    mx.eval(weights)
    held = mx.get_active_memory() - before
    assert held <= 1.05 * sum(each.nbytes for each in weights.values())


@pytest.mark.parametrize("packs", [False, True])
def test_cuda_devices_join_plain_matrices_alone(
    packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA graphs multiply by several matrices in codes at once, wherever they lie."""
    monkeypatch.setattr(Metal, "joins_codes", CUDA.joins_codes)
    model, config = _stored(grown("llama"), packs), grown("llama")
    joined = joined_matrices(model)
    assert len(joined) == (0 if packs else 2 * config["num_hidden_layers"])
    weights = named_parameters(model)
    for paths, whole in joined.items():
        assert mx.array_equal(mx.concatenate([weights[path] for path in paths]), whole.weight)


def test_layers_that_differ_are_not_joined() -> None:
    model = build(grown("llama"))
    use_device_products(model)
    weights = dict(named_parameters(model))
    odd = "model.layers.0.self_attn.k_proj.weight"
    weights[odd] = weights[odd].astype(mx.bfloat16)
    with as_metal():
        store_for_device(model, weights)
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    assert matrix_of(first.q_proj).joined is None
    assert matrix_of(second.q_proj).joined is not None


@pytest.mark.parametrize(("bits", "to"), [(2, 4), (3, 4), (5, 8), (6, 8)])
def test_wider_codes_stand_for_the_same_numbers(bits: int, to: int) -> None:
    mx.random.seed(bits)
    codes, scales, biases = mx.quantize(mx.random.normal((3, 16, 192)), 64, bits)
    wide = widened(codes, bits, to)
    assert wide.shape == (3, 16, 192 * to // 32)
    numbers = mx.dequantize(wide, scales, biases, 64, to)
    assert mx.array_equal(numbers, mx.dequantize(codes, scales, biases, 64, bits)).item()


@pytest.mark.parametrize("room", [1.0, 0.0])
def test_codes_are_widened_where_kernels_read_no_others_and_they_fit(
    monkeypatch: pytest.MonkeyPatch, room: float
) -> None:
    device = current_device()
    monkeypatch.setattr(device, "weight_code_bits", {3: 4})
    monkeypatch.setattr(device, "weight_memory", lambda: room * (1 << 40))
    model = build(grown("llama"))
    weights = dict(named_parameters(model))
    for name, bits in (("q_proj", 3), ("k_proj", 5)):
        path = f"model.layers.0.self_attn.{name}"
        names = [f"{path}.{part}" for part in ("weight", "scales", "biases")]
        weights.update(zip(names, mx.quantize(weights[names[0]], 64, bits), strict=True))
    widen_codes(model, weights)
    pack_like(model, weights)
    attention = model.model.layers[0].self_attn
    assert (attention.q_proj.bits, attention.k_proj.bits) == (4 if room else 3, 5)
