"""Undoes the changes that llama.cpp's converter makes to tensors, besides their names.

A change gets a tensor's translated name, one of its arrays (codes, scales or biases, whose rows are
the matrix's), and the configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx

from quire.core.errors import ModelError
from quire.models.weights.gguf.file import GGUF
from quire.models.weights.gguf.keys import layers
from quire.models.weights.gguf.metadata import NUMBERS, check

_XIELU = ("alpha_n", "alpha_p", "beta", "eps")
Change = Callable[[str, mx.array, dict[str, Any]], mx.array]


def no_parameters(gguf: GGUF) -> dict[str, mx.array]:
    return {}


def activations(gguf: GGUF) -> dict[str, mx.array]:
    """Return the parameters of Apertus's activations, which the metadata stores per layer.

    Raises:
        ModelError: a list is missing or has another length.
    """
    found: dict[str, mx.array] = {}
    for name in _XIELU:
        key, count = f"xielu.{name}", layers(gguf)
        given = gguf.metadata.get(key)
        listed = given if isinstance(given, list) else [given] * count
        check(gguf.files[0], key, listed, kind=NUMBERS)
        if len(listed) != count:
            raise ModelError(f"{gguf.files[0]}: {key} has {len(listed)} numbers, not {count}")
        for index, number in enumerate(listed):
            found[f"model.layers.{index}.mlp.act_fn.{name}"] = mx.array([float(number)])
    return found


def unchanged(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    return array


def neighbours_to_halves(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Reorder the rows of queries' and keys' heads from neighbouring pairs to two halves."""
    for module, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if f".self_attn.{module}." in name:
            pairs = array.reshape(config[key], -1, 2, *array.shape[1:])
            return pairs.swapaxes(1, 2).reshape(array.shape)
    return array


def less_one(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Subtract one from norms, as the family's files store them."""
    return array.astype(mx.float32) - 1.0 if name.endswith("norm.weight") else array


def channels_last(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Convert convolutions to MLX's layout `[channels, kernel, 1]`."""
    return array[..., None] if name.endswith((".conv.weight", ".conv1d.weight")) else array


def delta_net(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Convert gated delta nets and state spaces: decays to logarithms, convolutions to MLX's
    layout.
    """
    if name.endswith(".A_log"):
        return mx.log(-array.astype(mx.float32))
    return channels_last(name, array, config)


def channel_delta(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Convert Kimi's delta nets: convolutions `[1, channels, 1, kernel]`, and rates on several
    axes.
    """
    if ".self_attn." in name and name.endswith("_conv1d.weight"):
        return array.reshape(-1, array.shape[-1], 1)
    return delta_net(name, array.flatten() if name.endswith(".A_log") else array, config)


def state_space(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Convert Mamba 2: one number per head, and norms of groups in one row."""
    if name.endswith((".mamba.A_log", ".mamba.D", ".mamba.norm.weight")):
        array = array.flatten()
    return delta_net(name, array, config)


def state_space_and_pairs(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Convert state spaces, and attention whose rotated pairs are neighbours."""
    return state_space(name, neighbours_to_halves(name, array, config), config)


def delta_net_by_key_head(name: str, array: mx.array, config: dict[str, Any]) -> mx.array:
    """Convert gated delta nets, and regroup value heads by their key head."""
    array = delta_net(name, array, config)
    if ".linear_attn." not in name or ".linear_attn.norm." in name:
        return array
    if ".out_proj." in name:
        return _by_key_head(array.swapaxes(0, -1), config).swapaxes(0, -1)
    if not name.rpartition(".linear_attn.")[2].startswith(("in_proj_qkv.", "conv1d.")):
        return _by_key_head(array, config)
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return mx.concatenate([array[:keys], _by_key_head(array[keys:], config)])


def _by_key_head(array: mx.array, config: dict[str, Any]) -> mx.array:
    keys = config["linear_num_key_heads"]
    values = config["linear_num_value_heads"] // keys
    heads = array.reshape(values, keys, -1, *array.shape[1:])
    return heads.swapaxes(0, 1).reshape(array.shape)
