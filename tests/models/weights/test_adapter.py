"""LoRA adapters merged at load, against PEFT, which applies them beside the weights."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.errors import ModelError
from quire.models.base import named_parameters
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import solo_logits
from tests.support.families import CONFIGS
from tests.support.tiny_models import llama_config, random_weights, write_model

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(45)]
QUERY = "model.layers.1.self_attn.q_proj"
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
ATTENTION = ["q_proj", "v_proj"]
LLAMA = SHAPE | {"model_type": "llama"}
QWEN_MOE = SHAPE | {
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "usual": (LLAMA, {"target_modules": ATTENTION}),
    "rank-stabilised": (LLAMA, {"target_modules": "all-linear", "use_rslora": True}),
    "patterns": (
        LLAMA,
        {
            "target_modules": ATTENTION,
            "rank_pattern": {"layers.1.self_attn.q_proj": 2},
            "alpha_pattern": {"v_proj": 3},
        },
    ),
    "table-and-head": (
        LLAMA,
        {"target_modules": ["embed_tokens", "o_proj"], "modules_to_save": ["lm_head"]},
    ),
    "fused": (SHAPE | {"model_type": "phi3"}, {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "experts": (QWEN_MOE, {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts, transposed": (
        CONFIGS["gpt_oss"],
        {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
    ),
    "latents": (
        CONFIGS["glm_moe_dsa"],
        {"target_modules": ["q_a_proj", "kv_b_proj", "o_proj", "wq_b"]},
    ),
}


@pytest.mark.oracle
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ("latents", "fused") else ())
        for name in VARIANTS
    ],
)
def test_merged_weights_compute_what_peft_computes(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    from tests.models import oracle

    shape, settings = VARIANTS[name]
    config = transformers.AutoConfig.for_model(**deepcopy(shape))
    reference = oracle.save_random(config, tmp_path / "base")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=6, **settings)
    adapted = peft.get_peft_model(reference, lora).eval()
    with torch.no_grad():
        for key, weight in adapted.named_parameters():
            if "lora_" in key or "modules_to_save" in key:
                weight.copy_(0.3 * torch.randn_like(weight))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)

    ours = open_model(str(tmp_path / "base"), adapter=str(tmp_path / "adapter"))
    plain = open_model(str(tmp_path / "base"))

    theirs = oracle.reference_logits(adapted, PROMPT)
    logits = solo_logits(ours.model, PROMPT)
    assert mx.max(mx.abs(logits - theirs)).item() < 1e-4 * mx.max(mx.abs(theirs)).item()
    assert mx.max(mx.abs(solo_logits(plain.model, PROMPT) - theirs)).item() > 0.1
    assert ours.fingerprint != plain.fingerprint
    if "target_parameters" in settings:
        check_factors(ours, plain, tmp_path / "adapter")


def check_factors(merged: LoadedModel, plain: LoadedModel, adapter: Path) -> None:
    """The factors that requests get are those of what was merged."""
    found, before = named_parameters(merged.model), named_parameters(plain.model)
    factors = plain.read_adapter(str(adapter)).factors
    assert sum(".experts." in path for path in factors) == 3 * len(plain.model.model.layers)
    for path, (inner, outer) in factors.items():
        product = (inner @ outer).swapaxes(-1, -2)
        added = found[f"{path}.weight"] - before[f"{path}.weight"]
        assert mx.max(mx.abs(product - added)).item() < 1e-4


def make_adapter(folder: Path, tensors: dict[str, mx.array] | None = None, **changes: Any) -> str:
    """Return an adapter of rank 2 for one matrix of 64 x 64."""
    folder.mkdir()
    usual = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(usual | changes))
    if tensors is None:
        tensors = {
            f"{QUERY}.lora_A.weight": 0.3 * mx.random.normal((2, 64), key=mx.random.key(1)),
            f"{QUERY}.lora_B.weight": 0.3 * mx.random.normal((64, 2), key=mx.random.key(2)),
        }
    named = {f"base_model.model.{name}": array for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "adapter_model.safetensors"), named)
    return str(folder)


def test_packed_matrices_that_it_touches_are_unpacked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = llama_config()
    adapter = make_adapter(tmp_path / "adapter")
    factors = mx.load(f"{adapter}/adapter_model.safetensors")
    assert isinstance(factors, dict)
    first, second = (factors[f"base_model.model.{QUERY}.lora_{x}.weight"] for x in "AB")
    packed = random_weights(config)
    plain = dict(packed)
    for path in (QUERY, QUERY.replace("q_proj", "o_proj")):
        parts = mx.quantize(packed[f"{path}.weight"], group_size=32, bits=4)
        packed |= {f"{path}.{part}": array for part, array in zip(_PARTS, parts, strict=True)}
        plain[f"{path}.weight"] = mx.dequantize(*parts, group_size=32, bits=4)
    plain[f"{QUERY}.weight"] += 2.0 * second @ first
    for name, weights in (("packed", packed), ("plain", plain)):
        write_model(tmp_path / name, config)
        mx.save_safetensors(str(tmp_path / name / "model.safetensors"), weights)

    ours = open_model(str(tmp_path / "packed"), adapter=adapter)
    theirs = open_model(str(tmp_path / "plain"))

    difference = solo_logits(ours.model, PROMPT) - solo_logits(theirs.model, PROMPT)
    assert mx.max(mx.abs(difference)).item() < 1e-4
    assert "1 packed matrices are unpacked" in caplog.text
    assert ours.parameter_bytes < theirs.parameter_bytes  # what it leaves alone stays packed


_PARTS = ("weight", "scales", "biases")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "IA3"),
        ({"task_type": "SEQ_CLS"}, "SEQ_CLS"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"target_parameters": ["experts.down_proj"]}, "target_parameters"),
        ({"a_setting_of_tomorrow": 3}, "a_setting_of_tomorrow"),
        ({"r": 0}, "r = 0"),
        ({"r": 3}, "rank 3"),
        ({"target_modules": ["q_proj", "k_proj"]}, "k_proj"),
        ({"modules_to_save": ["lm_head"]}, "lm_head"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.'q_proj'. = 0"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern.'q_proj'. = 'x'"),
        ({"rank_pattern": {"[": 2}}, "no regular expression"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", llama_config())
    with pytest.raises(ModelError, match=named):
        open_model(str(folder), adapter=make_adapter(tmp_path / "adapter", **changes))


@pytest.mark.parametrize(
    ("module", "shape", "tied", "named"),
    [
        ("model.layers.9.self_attn.q_proj", (64, 64), False, "layers.9"),
        (QUERY, (96, 64), False, "96 x 64"),
        ("lm_head", (256, 64), True, "tied"),
    ],
)
def test_tensors_that_have_no_place_are_refused(
    module: str, shape: tuple[int, int], tied: bool, named: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", llama_config())
    settings = llama_config(tie_word_embeddings=tied)
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {
        f"{module}.lora_A.weight": mx.zeros((2, shape[1])),
        f"{module}.lora_B.weight": mx.zeros((shape[0], 2)),
    }
    adapter = make_adapter(tmp_path / "adapter", tensors, target_modules=[module.split(".")[-1]])
    with pytest.raises(ModelError, match=named):
        open_model(str(folder), adapter=adapter)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_factor_that_is_no_matrix_is_refused(lost: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", llama_config())
    factors = [mx.zeros((2, 64)), mx.zeros((64, 2))]
    factors[lost] = mx.array(1.0)
    tensors = {f"{QUERY}.lora_{end}.weight": each for end, each in zip("AB", factors, strict=True)}
    adapter = make_adapter(tmp_path / "adapter", tensors, target_modules=["q_proj"])
    with pytest.raises(ModelError, match="does not have two factors of rank 2"):
        open_model(str(folder), adapter=adapter)
