"""Writes GGUF files from model folders with the `gguf` package: its names, its codes.

What llama.cpp's converter does beside renaming is done here, too: rows of queries and keys in
pairs, one added to Gemma's norms, experts stacked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt
import tokenizers
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from tests.support import gguf_state_spaces

Numbers = npt.NDArray[Any]
Kinds = Callable[[str], GGMLQuantizationType]
"""The type of a tensor, by its name in the GGUF file."""

_ARCHITECTURES = {
    "llama": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_5_text": "qwen35",
    "cohere": "command-r",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "hunyuan_v1_moe": "hunyuan-moe",
    "bailing_moe": "bailingmoe",
    "llama4_text": "llama4",
    "ministral3": "mistral3",
    "cohere2_moe": "cohere2moe",
    "exaone_moe": "exaone-moe",
    "falcon_mamba": "mamba",
    "kimi_linear": "kimi-linear",
    "mimo_v2_flash": "mimo2",
    "step3p5": "step35",
}
_NAMED_AS = {"cohere2moe": "exaone-moe"}
"""Architectures that the package does not know, and one with the same names of tensors."""
_PERMUTED = ("llama", "granite", "granitemoe", "smollm3", "arcee", "bailingmoe", "mistral3")
_PERMUTED += ("internlm2", "olmo", "granitehybrid", "nemotron_h", "nemotron_h_moe")
_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "clip_qkv": "attention.clamp_kqv",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "norm_topk_prob": "expert_weights_norm",
    "routed_scaling_factor": "expert_weights_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}


def all_f32(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType.F32


def architecture(config: Mapping[str, Any]) -> str:
    model_type = config["model_type"]
    if config.get("use_bidirectional_attention"):
        return "gemma-embedding"
    if model_type == "nemotron_h" and "moe" in config["layers_block_type"]:
        return "nemotron_h_moe"
    return _ARCHITECTURES.get(model_type, model_type)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    kinds: Kinds = all_f32,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Numbers] | None = None,
    tokenizer: tokenizers.Tokenizer | None = None,
    fused: bool = False,
) -> dict[str, Numbers]:
    """Writes a folder's model.

    Args:
        kinds: of matrices; vectors are F32, as the converter has them.
        more: keys of the architecture beside those that follow from `config.json`; None is absent.
        tensors: beside the folder's.
        tokenizer: byte-level or SentencePiece-like; a vocabulary of numbers if there is none.
        fused: whether experts' gates and up projections are one tensor, as the converter may do.

    Returns:
        What the file's tensors stand for, by their names there.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    kind = architecture(config)
    writer = gguf.GGUFWriter(str(path), kind)
    for key, value in metadata(config, more or {}).items():
        _add(writer, f"{kind}.{key}", value)
    if tokenizer is None:
        _write_numbers(writer, config["vocab_size"])
    else:
        write_tokenizer(writer, tokenizer, config["vocab_size"])
    stands_for = {}
    plain = {name: np.array(array.astype(mx.float32)) for name, array in weights.items()}
    for part in ("alpha_n", "alpha_p", "beta", "eps"):  # Apertus's activations
        names = [name for name in plain if name.endswith(f".act_fn.{part}")]
        if names:
            names.sort(key=lambda name: int(name.split(".")[2]))
            writer.add_array(f"xielu.{part}", [plain.pop(name).item() for name in names])
    converted = _as_converted(config, plain) | dict(tensors or {})
    for name, array in (_fused(converted) if fused else converted).items():
        wanted = kinds(name) if array.ndim > 1 else GGMLQuantizationType.F32
        coded = quantize(array, wanted)
        stands_for[name] = dequantize(coded, wanted).reshape(array.shape)
        writer.add_tensor(name, coded, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stands_for


def metadata(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the architecture."""
    keys = {key: config[name] for name, key in _KEYS.items() if config.get(name) is not None}
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    keys["rope.freq_base"] = float(rope.get("rope_theta", 1e4))
    if rope.get("rope_type") in ("linear", "yarn"):
        keys |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
    if "original_max_position_embeddings" in rope:
        trained = rope["original_max_position_embeddings"]
        keys["rope.scaling.original_context_length"] = trained
    if gguf_state_spaces.has_states(config):
        keys |= gguf_state_spaces.keys(config)
    keys |= more
    return {key: value for key, value in keys.items() if value is not None}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _as_converted(config: Mapping[str, Any], weights: Mapping[str, Numbers]) -> dict[str, Numbers]:
    kind = architecture(config)
    known = _NAMED_AS.get(kind, kind)
    number = next(k for k, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(number, config.get("num_hidden_layers", 8))
    ready = {}
    if gguf_state_spaces.has_states(config):
        weights = gguf_state_spaces.converted(config, weights)
    if kind == "kimi-linear":
        weights = gguf_state_spaces.delta_rules(weights)
    for name, array in _separated(config, weights).items():
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        ready[there] = _changed(kind, config, name, array)
    return ready


def _changed(kind: str, config: Mapping[str, Any], name: str, array: Numbers) -> Numbers:
    if kind in _PERMUTED and ("q_proj" in name or "k_proj" in name):
        heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        halves = array.reshape(heads, 2, -1, *array.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
    if kind == "gptneox" and "query_key_value" in name:
        heads = array.reshape(config["num_attention_heads"], 3, -1, *array.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(array.shape)
    if ".linear_attn." in name:
        return _tiled(config, name, array)
    if kind in ("gemma", "gemma2", "gemma3", "gemma-embedding") and name.endswith("norm.weight"):
        return array + 1
    return array


def _tiled(config: Mapping[str, Any], name: str, array: Numbers) -> Numbers:
    """Return Qwen3.5's delta nets: heads of values in turns of those of keys, decays as they
    are.
    """
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]

    def tiled(part: Numbers) -> Numbers:
        heads = part.reshape(keys, values // keys, -1, *part.shape[1:])
        return np.ascontiguousarray(heads.swapaxes(0, 1)).reshape(part.shape)

    if name.endswith(".A_log"):
        return -np.exp(tiled(array))
    if name.endswith(".conv1d.weight"):
        array = array.squeeze(-1)
    if ".linear_attn.norm." in name:
        return array
    if ".out_proj." in name:
        return np.ascontiguousarray(tiled(array.T).T)
    if ".in_proj_qkv." in name or ".conv1d." in name:
        first = 2 * keys * config["linear_key_head_dim"]
        return np.concatenate([array[:first], tiled(array[first:])])
    return tiled(array)


def _fused(tensors: Mapping[str, Numbers]) -> dict[str, Numbers]:
    ready = dict(tensors)
    for name in tensors:
        if ".ffn_gate_exps." in name:
            halves = [ready.pop(name), ready.pop(name.replace("gate", "up"))]
            ready[name.replace("gate", "gate_up")] = np.concatenate(halves, axis=1)
    return ready


_PLAIN = ("sinks", "attention_sink_bias", "layer_scalar")
"""Ends of names to which the converter adds `.weight`."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def _separated(config: Mapping[str, Any], weights: Mapping[str, Numbers]) -> dict[str, Numbers]:
    """Return experts stacked, gate and up apart, latent keys and values apart."""
    ready: dict[str, Numbers] = {}
    numbered: dict[str, dict[int, Numbers]] = {}
    in_rows = config["model_type"] == "mistral4"  # experts' matrices have their outputs first
    for name, array in weights.items():
        if match := _EXPERT.fullmatch(name):
            whole = f"{match[1]}.{match[3]}.weight"
            if "block_sparse_moe" in name:  # as the names' table has Mixtral's
                whole = whole.replace("model.layers", "layers").replace(
                    "block_sparse_moe", "feed_forward"
                )
            numbered.setdefault(whole, {})[int(match[2])] = array
        elif name.endswith((".experts.gate_up_proj", ".experts.gate_up_proj_bias")):
            array = array.swapaxes(-1, -2) if in_rows and array.ndim > 2 else array
            _gate_up(ready, name, array, interleaved=config["model_type"] == "gpt_oss")
        elif name.endswith(".experts.down_proj"):
            columns = array if in_rows else array.swapaxes(-1, -2)
            ready[f"{name}.weight"] = np.ascontiguousarray(columns)
        elif name.endswith(".kv_b_proj.weight"):
            _latent(ready, config, name, array)
        else:
            name = name.replace("down_proj_bias", "down_proj.bias")
            name = name.replace(".dt_bias", ".dt_proj.bias")
            name = f"{name}.bias" if name.endswith(".expert_bias") else name
            name = f"{name}.weight" if name.endswith(_PLAIN) else name
            ready[name.replace("e_score_correction_bias", "e_score_correction.bias")] = array
    for name, parts in numbered.items():
        ready[name] = np.stack([parts[index] for index in sorted(parts)])
    return ready


def _gate_up(ready: dict[str, Numbers], name: str, array: Numbers, *, interleaved: bool) -> None:
    path = name.partition(".gate_up_proj")[0]
    rows = array if name.endswith("_bias") else array.swapaxes(-1, -2)
    kind = "bias" if name.endswith("_bias") else "weight"
    halves = (rows[:, 0::2], rows[:, 1::2]) if interleaved else np.split(rows, 2, axis=1)
    for part, half in zip(("gate_proj", "up_proj"), halves, strict=True):
        ready[f"{path}.{part}.{kind}"] = np.ascontiguousarray(half)


def _latent(ready: dict[str, Numbers], config: Mapping[str, Any], name: str, both: Numbers) -> None:
    plain = config["qk_nope_head_dim"]
    heads = both.reshape(config["num_attention_heads"], plain + config["v_head_dim"], -1)
    keys, values = heads[:, :plain], heads[:, plain:]
    ready[name.replace("kv_b_proj", "k_b_proj")] = np.ascontiguousarray(keys.swapaxes(1, 2))
    ready[name.replace("kv_b_proj", "v_b_proj")] = np.ascontiguousarray(values)


def _write_numbers(writer: gguf.GGUFWriter, count: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"[{index}]" for index in range(3, count))])
    writer.add_token_types([1] * count)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)


def write_tokenizer(
    writer: gguf.GGUFWriter,
    backend: tokenizers.Tokenizer,
    count: int | None = None,
    *,
    merges: bool = False,
) -> None:
    """Write a tokenizer as the converter does: merges of byte-level BPE, else scores.

    Args:
        merges: of others, too, as it does for Gemma 4.
    """
    state = json.loads(backend.to_str())
    vocab = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = {token["content"]: token for token in state["added_tokens"]}
    byte_level = state["decoder"]["type"] == "ByteLevel"
    kinds = [_token_type(token, added, byte_level) for token in tokens]
    padding = range(len(tokens), count or len(tokens))
    writer.add_tokenizer_model("gpt2" if byte_level else "gemma4" if merges else "llama")
    writer.add_tokenizer_pre("gpt-2" if byte_level else "default")
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in padding])
    writer.add_token_types(kinds + [gguf.TokenType.UNUSED] * len(padding))
    if byte_level or merges:
        writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
        writer.add_add_bos_token(True)
    else:
        ranks = {"".join(merge): -float(i) for i, merge in enumerate(state["model"]["merges"])}
        scores = [ranks.get(token, -1e4) for token in tokens] + [-1e4] * len(padding)
        writer.add_token_scores(scores)
        writer.add_add_space_prefix("Prepend" in json.dumps(state["normalizer"]))
    writer.add_bos_token_id(vocab["<s>"])
    writer.add_eos_token_id(vocab["</s>"])
    writer.add_unk_token_id(vocab["<unk>"])


def _token_type(token: str, added: Mapping[str, Any], byte_level: bool) -> int:
    if token in added:
        special = added[token]["special"]
        return int(gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED)
    if not byte_level and re.fullmatch("<0x[0-9A-F]{2}>", token):
        return int(gguf.TokenType.BYTE)
    return int(gguf.TokenType.NORMAL)
