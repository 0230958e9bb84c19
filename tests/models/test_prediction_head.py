"""Heads of published checkpoints, against transformers' layers joined as their papers say."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.models.weights.loader import open_model
from tests.models.solo import SoloStep
from tests.support import families, tiny_models

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

TOKENS = [(7 * i * i + 3 * i) % 251 for i in range(24)]
FULL, LINEAR, SLIDING = tiny_models.FULL, tiny_models.LINEAR, tiny_models.SLIDING

QWEN = {
    "fc": "mtp.fc",
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "norm": "mtp.norm",
    "layer": "mtp.layers.0",
}


def extra_layer(count: int) -> Mapping[str, str]:
    """Return the names of a head behind `count` layers, as DeepSeek V3 and GLM publish it."""
    layer = f"model.layers.{count}"
    return {
        "fc": f"{layer}.eh_proj",
        "enorm": f"{layer}.enorm",
        "hnorm": f"{layer}.hnorm",
        "norm": f"{layer}.shared_head.norm",
        "layer": layer,
    }


def family(name: str, **changes: Any) -> Any:
    return AutoConfig.for_model(**deepcopy(families.CONFIGS[name]) | changes)


MIMO = {
    "fc": "model.mtp.layers.0.eh_proj",
    "enorm": "model.mtp.layers.0.enorm",
    "hnorm": "model.mtp.layers.0.hnorm",
    "norm": "model.mtp.layers.0.final_layernorm",
    "layer": "model.mtp.layers.0",
}

HYBRID = {"num_hidden_layers": 4, "layer_types": [LINEAR, FULL, LINEAR, FULL]}
"""The last layer is the head."""
CASES: dict[str, tuple[Any, Mapping[str, str]]] = {
    "qwen3_5": (lambda: Qwen3_5TextConfig(**tiny_models.qwen3_5_config(**HYBRID)), QWEN),
    "qwen3_5_moe": (lambda: Qwen3_5MoeTextConfig(**tiny_models.qwen3_5_moe_config(**HYBRID)), QWEN),
    "qwen3_next": (lambda: family("qwen3_next", **HYBRID), QWEN),
    "deepseek_v3": (lambda: family("deepseek_v3"), extra_layer(2)),
    "glm4_moe": (lambda: family("glm4_moe"), extra_layer(2)),
    "mimo_v2_flash": (
        lambda: family(
            "mimo_v2_flash",
            num_hidden_layers=3,
            layer_types=[FULL, SLIDING, SLIDING],
            mlp_layer_types=["dense", "sparse", "dense"],
        ),
        MIMO,
    ),
    "glm4_moe_lite": (lambda: family("glm4_moe_lite"), extra_layer(2)),
}


def published(config: Any, names: Mapping[str, str], folder: Path) -> mx.array:
    """Writes a checkpoint whose last layer is its head; returns what the head gives.

    Returns:
        Logits `[len(TOKENS) - 1, vocab]` of the tokens after the following ones.
    """
    count = config.num_hidden_layers - 1
    reference = oracle.save_random(config, folder)
    body = reference.model
    hidden = config.hidden_size
    own = {
        "enorm": deepcopy(body.norm),
        "hnorm": deepcopy(body.norm),
        "norm": deepcopy(body.norm),
        "fc": torch.nn.Linear(2 * hidden, hidden, bias=False),
    }
    with torch.no_grad():
        for module in own.values():
            oracle.draw_anew(module)
        last = body.layers[count]
        inner, head = deepcopy(body), deepcopy(body)
        inner.layers, head.layers = body.layers[:count], torch.nn.ModuleList([last])
        for each in (inner, head):
            each.config = deepcopy(config)
        inner.config.num_hidden_layers, head.config.num_hidden_layers = count, 1
        if hasattr(config, "layer_types"):
            head.config.layer_types = config.layer_types[count:]
            inner.config.layer_types = config.layer_types[:count]
        head.norm = own["norm"]
        tokens = torch.tensor([TOKENS])
        states = inner(tokens, use_cache=False).last_hidden_state[:, :-1]
        following = body.embed_tokens(tokens[:, 1:])
        joined = torch.cat([own["enorm"](following), own["hnorm"](states)], dim=-1)
        ahead = head(inputs_embeds=own["fc"](joined), use_cache=False).last_hidden_state
        logits = reference.lm_head(ahead)[0]
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    prefix = f"model.layers.{count}."
    for name in [name for name in weights if name.startswith(prefix)]:
        inner = name.removeprefix(prefix)
        if names is MIMO:
            inner = inner.replace("post_attention_layernorm", "pre_mlp_layernorm")
        weights[f"{names['layer']}.{inner}"] = weights.pop(name)
    for name, module in own.items():
        weights[f"{names[name]}.weight"] = mx.array(module.weight.detach().numpy())
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    shortened = deepcopy(config)
    if getattr(config, "mlp_layer_types", None):
        shortened.mlp_layer_types = config.mlp_layer_types[:count]
    shortened.num_hidden_layers = count
    if hasattr(config, "layer_types"):
        shortened.layer_types = config.layer_types[:count]
    shortened.save_pretrained(folder)
    return mx.array(logits.numpy())


@pytest.mark.parametrize("name", CASES)
def test_heads_predict_what_the_published_formula_gives(name: str, tmp_path: Path) -> None:
    make, names = CASES[name]
    expected = published(make(), names, tmp_path)
    model = open_model(str(tmp_path), with_head=True).model
    assert len(model.layout) == len(model.own_layout) + 1
    step = SoloStep(model.layout, TOKENS)
    states = model(step)
    following = mx.array([*TOKENS[1:], 0])
    logits = model.logits(model.look_ahead(states, following, step))[:-1]
    error = mx.max(mx.abs(logits - expected)) / mx.max(mx.abs(expected))
    assert error.item() < 1e-4
    assert len(set(mx.argmax(expected, axis=-1).tolist())) > 5
    plain = open_model(str(tmp_path))
    assert plain.model.layout == plain.model.own_layout
    assert plain.fingerprint != open_model(str(tmp_path), with_head=True).fingerprint
