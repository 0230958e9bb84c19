"""Changes that llama.cpp's converter makes to state spaces and to Granite's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
Config = Mapping[str, Any]

_SIZES = {
    "ssm.conv_kernel": ("mamba_d_conv", "conv_kernel"),
    "ssm.state_size": ("mamba_d_state", "ssm_state_size", "state_size"),
    "ssm.group_count": ("mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": (
        *("mamba_dt_rank", "mamba_n_heads", "mamba_num_heads", "num_heads", "time_step_rank"),
    ),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon"),
}


def has_states(config: Config) -> bool:
    return any(name in config for name in ("mamba_d_state", "ssm_state_size", "state_size"))


def keys(config: Config) -> dict[str, Any]:
    """Return the metadata keys of the architecture."""
    found = {
        key: next((config[name] for name in names if config.get(name) is not None), None)
        for key, names in _SIZES.items()
    }
    heads = found["ssm.time_step_rank"]
    own = config.get("mamba_d_head", config.get("mamba_head_dim", config.get("head_dim")))
    if config["model_type"] == "jamba":
        inner = config["mamba_expand"] * config["hidden_size"]
    else:
        inner = config["intermediate_size"] if _is_first(config) else heads * own
    kinds = _kinds(config)
    found |= {"ssm.inner_size": inner, "block_count": len(kinds)}
    if config["model_type"] == "mamba2" or _is_first(config):
        found |= {"attention.head_count": 0, "attention.head_count_kv": None, "context_length": 1}
    elif config["model_type"] != "falcon_h1":
        attends = [kind in ("attention", "full_attention") for kind in kinds]
        heads = config["num_key_value_heads"]
        found["attention.head_count_kv"] = [heads if each else 0 for each in attends]
    if config["model_type"] == "granitemoehybrid":
        rotates = config["position_embedding_type"] == "rope"
        found["rope.scaling.finetuned"] = rotates
    return found


def _is_first(config: Config) -> bool:
    """Return whether the state spaces are Mamba's first, without attention."""
    return config["model_type"] in ("mamba", "falcon_mamba")


def _kinds(config: Config) -> list[str]:
    """Return what each layer is."""
    listed = config.get("layers_block_type") or config.get("layer_types")
    if listed is not None:
        return list(listed)
    every, first = config.get("attn_layer_period"), config.get("attn_layer_offset")
    return [
        "attention" if every and index % every == first else "mamba"
        for index in range(config["num_hidden_layers"])
    ]


def converted(config: Config, weights: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return the tensors under names that the package knows."""
    ready: dict[str, Numbers] = {}
    for name, array in weights.items():
        ready |= dict(_split(config, name, _multiplied(config, name, array)))
    return {name: _shaped(config, name, array) for name, array in ready.items()}


def _split(config: Config, name: str, array: Numbers) -> Iterator[tuple[str, Numbers]]:
    name = name.replace(".feed_forward.experts.", ".mlp.experts.")
    if ".mixer.experts." in name:
        name = name.replace("backbone", "model").replace(".mixer.", ".mlp.")
    dense = not config.get("num_local_experts")
    shared = "mlp" if dense else "mlp.shared_expert"
    if name.endswith(".input_linear.weight"):
        path = name.partition(".shared_mlp")[0].partition(".block_sparse_moe")[0]
        inner = shared if ".shared_mlp." in name else "mlp.experts"
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            yield f"{path}.{inner}.{part}_proj.weight", np.ascontiguousarray(half)
    elif name.endswith(".shared_mlp.output_linear.weight"):
        yield name.replace("shared_mlp.output_linear", f"{shared}.down_proj"), array
    else:
        yield name, array


def _multiplied(config: Config, name: str, array: Numbers) -> Numbers:
    """Return Falcon-H1's multipliers, within the matrices."""
    if config["model_type"] != "falcon_h1" or not name.endswith(".weight"):
        return array
    gate, down = config["mlp_multipliers"]
    into = config["attention_in_multiplier"]
    factors = {
        "down_proj": down,
        "gate_proj": gate,
        "k_proj": config["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    module = name.split(".")[-2]
    if module != "in_proj":
        return array * np.float32(factors.get(module, 1.0))
    width, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    parts = (width, width, groups, groups, config["mamba_n_heads"])
    rows = np.repeat(np.array(config["ssm_multipliers"], np.float32), parts)
    return array * rows[:, None] * np.float32(config["ssm_in_multiplier"])


def _shaped(config: Config, name: str, array: Numbers) -> Numbers:
    if name.endswith(".A_log"):
        array = -np.exp(array)
    if name.endswith(".conv1d.weight"):
        return array.squeeze(1)
    if config["model_type"] == "jamba" or _is_first(config):
        return array
    if name.endswith((".A_log", ".D")):
        return array.reshape(-1, 1)
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return array.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    return array


def delta_rules(weights: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Convert Kimi Linear's rules: a convolution for each of queries, keys and values."""
    ready: dict[str, Numbers] = {}
    for name, array in weights.items():
        name = name.replace(".forget_gate.", ".")
        if name.endswith(".self_attn.conv1d.weight"):
            for part, each in zip("qkv", np.split(array, 3), strict=True):
                shaped = each.reshape(1, len(each), 1, -1)
                ready[name.replace("conv1d", f"{part}_conv1d")] = np.ascontiguousarray(shaped)
        else:
            ready[name] = -np.exp(array) if name.endswith(".A_log") else array
    return ready
