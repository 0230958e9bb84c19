"""LoRA adapters in mlx-lm's files, against mlx-lm's own layers beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from quire.core.errors import ModelError
from quire.models.weights.loader import open_model
from tests.models.solo import solo_logits
from tests.support.tiny_models import llama_config, random_weights, write_model

PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(45)]
KEYS = ["self_attn.q_proj", "mlp.down_proj"]
LORA: dict[str, Any] = {"rank": 4, "scale": 3.0, "dropout": 0.0}


def _write(folder: Path, tensors: dict[str, mx.array], **changes: Any) -> str:
    folder.mkdir()
    usual = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": LORA, "iters": 100}
    (folder / "adapter_config.json").write_text(json.dumps(usual | changes))
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    return str(folder)


@pytest.fixture
def base(tmp_path: Path) -> str:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    config = llama_config(**rope, rope_theta=1e4)
    write_model(tmp_path / "base", config)
    mx.save_safetensors(str(tmp_path / "base" / "model.safetensors"), random_weights(config))
    return str(tmp_path / "base")


@pytest.mark.oracle
def test_merged_weights_compute_what_mlx_lm_computes(base: str, tmp_path: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    tuner = pytest.importorskip("mlx_lm.tuner.utils")
    theirs, _ = utils.load_model(Path(base))
    tuner.linear_to_lora_layers(theirs, 2, LORA | {"keys": KEYS})
    mx.random.seed(1)
    factors = {
        name: 0.3 * mx.random.normal(array.shape)
        for name, array in tree_flatten(theirs.parameters())
        if ".lora_" in name
    }
    assert len(factors) == 8
    theirs.load_weights(list(factors.items()), strict=False)
    adapter = _write(tmp_path / "adapter", factors)

    ours = open_model(base, adapter=adapter)

    expected = theirs(mx.array([PROMPT]))[0].astype(mx.float32)
    difference = mx.abs(solo_logits(ours.model, PROMPT) - expected).max()
    assert difference.item() < 1e-4 * mx.abs(expected).max().item()
    assert ours.fingerprint != open_model(base).fingerprint


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"fine_tune_type": "dora"}, "fine_tune_type = 'dora'"),
        ({"fine_tune_type": "full"}, "fine_tune_type = 'full'"),
        ({"lora_parameters": {"rank": "x"}}, "lora_parameters.rank = 'x'"),
        ({"lora_parameters": LORA | {"other": 2}}, "lora_parameters.other = 2"),
        ({"lora_parameters": None}, "lacks 'lora_parameters'"),
    ],
)
def test_settings_that_are_not_computed_are_refused(
    changes: dict[str, Any], named: str, base: str, tmp_path: Path
) -> None:
    adapter = _write(tmp_path / "adapter", {}, **changes)
    with pytest.raises(ModelError, match=named):
        open_model(base, adapter=adapter)


@pytest.mark.parametrize(
    ("name", "shape"), [("lora_a", (2, 4, 64, 2)), ("m", (64,)), ("weight", (64, 64))]
)
def test_tensors_that_are_no_factors_are_refused(
    name: str, shape: tuple[int, ...], base: str, tmp_path: Path
) -> None:
    tensors = {f"model.layers.0.self_attn.q_proj.{name}": mx.zeros(shape)}
    adapter = _write(tmp_path / "adapter", tensors)
    with pytest.raises(ModelError, match=rf"q_proj.{name}' of shape .* is not supported"):
        open_model(base, adapter=adapter)
