"""Adapters of experts: as PEFT and mlx-lm save them, merged and by request, in all layouts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.errors import ModelError
from quire.models.weights.loader import open_model
from tests.executor.test_adapters import PROMPTS, asked, engine_of, run
from tests.models.solo import solo_logits
from tests.support.families import CONFIGS
from tests.support.tiny_models import qwen3_moe_config, random_weights, write_model

Weights = dict[str, mx.array]
RANK, SCALE = 3, 2.0
PARTS = ("gate_proj", "up_proj", "down_proj")


def stacks(weights: Weights) -> dict[str, mx.array]:
    """Return the matrices of experts, `[experts, out, in]`, by their paths."""
    return {
        name.removesuffix(".weight"): array
        for name, array in weights.items()
        if ".experts." in name and array.ndim == 3
    }


def others(weights: Weights) -> Weights:
    own = stacks(weights)
    return {name: each for name, each in weights.items() if name.removesuffix(".weight") not in own}


def one_by_one(weights: Weights) -> Weights:
    """Return a tensor for each expert, as Hugging Face publishes them."""
    ready = others(weights)
    for path, array in stacks(weights).items():
        base, _, part = path.rpartition(".")
        ready |= {f"{base}.{number}.{part}.weight": each for number, each in enumerate(array)}
    return ready


def stacked(weights: Weights) -> Weights:
    """Return gate and up in one parameter, as transformers 5 saves them."""
    ready, own = others(weights), stacks(weights)
    for path, array in own.items():
        base, _, part = path.rpartition(".")
        if part == "down_proj":
            ready[path] = array
        elif part == "gate_proj":
            ready[f"{base}.gate_up_proj"] = mx.concatenate([array, own[f"{base}.up_proj"]], axis=1)
    return ready


def switched(weights: Weights) -> Weights:
    """Return the tensors as mlx-lm converts them."""
    return {name.replace(".experts.", ".switch_mlp."): each for name, each in weights.items()}


def packed(weights: Weights) -> Weights:
    """Return the model with experts in codes of 8 bits."""
    ready = switched(weights)
    for path in list(stacks(weights)):
        name = path.replace(".experts.", ".switch_mlp.")
        codes = mx.quantize(ready[f"{name}.weight"], group_size=32, bits=8)
        named = zip(("weight", "scales", "biases"), codes, strict=True)
        ready |= {f"{name}.{part}": array for part, array in named}
    return ready


def drawn(shape: tuple[int, ...]) -> mx.array:
    return mx.random.normal(shape) / shape[-1] ** 0.5


def of_peft(weights: Weights) -> tuple[Weights, dict[str, Any]]:
    """Return an adapter of stacked experts' parameters, the outer module's first, as PEFT does."""
    tensors: Weights = {}
    for name, array in stacked(weights).items():
        if array.ndim != 3:
            continue
        (experts, outputs, inputs), base = array.shape, name.rpartition(".")[0]
        module = base if name.endswith("gate_up_proj") else f"{base}.base_layer"
        tensors[f"base_model.model.{module}.lora_A.weight"] = drawn((experts * RANK, inputs))
        tensors[f"base_model.model.{module}.lora_B.weight"] = drawn((outputs, experts * RANK))
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    return tensors, {"target_parameters": targets, "target_modules": []}


def of_single_experts(weights: Weights) -> tuple[Weights, dict[str, Any]]:
    """Return an adapter of each expert's own matrices, except one."""
    tensors: Weights = {}
    for name, array in one_by_one(weights).items():
        if ".experts." in name and ".experts.1.up_proj" not in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = drawn((RANK, array.shape[1]))
            tensors[f"{module}.lora_B.weight"] = drawn((array.shape[0], RANK))
    return tensors, {"target_modules": list(PARTS)}


def of_mlx_lm(weights: Weights) -> tuple[Weights, dict[str, Any]]:
    tensors: Weights = {}
    for path, array in stacks(weights).items():
        experts, outputs, inputs = array.shape
        module = path.replace(".experts.", ".switch_mlp.")
        tensors[f"{module}.lora_a"] = drawn((experts, RANK, inputs))
        tensors[f"{module}.lora_b"] = drawn((experts, outputs, RANK))
    lora = {"rank": RANK, "scale": SCALE, "dropout": 0.0}
    return tensors, {"fine_tune_type": "lora", "lora_parameters": lora}


Layout = Callable[[Weights], Weights]
Saved = Callable[[Weights], tuple[Weights, dict[str, Any]]]


def saved(folder: Path, weights: Weights, kind: Saved, seed: int) -> str:
    mx.random.seed(seed)
    tensors, settings = kind(weights)
    if kind is not of_mlx_lm:
        settings |= {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    file = "adapters" if kind is of_mlx_lm else "adapter_model"
    mx.save_safetensors(str(folder / f"{file}.safetensors"), tensors)
    return str(folder)


def base_of(folder: Path, config: dict[str, Any], layout: Layout) -> tuple[str, Weights]:
    weights = random_weights(config)
    write_model(folder, config)
    mx.save_safetensors(str(folder / "model.safetensors"), layout(weights))
    return str(folder), weights


CASES = [
    (one_by_one, of_single_experts),
    (one_by_one, of_peft),
    (one_by_one, of_mlx_lm),
    (stacked, of_peft),
    (switched, of_mlx_lm),
    (packed, of_mlx_lm),
]


@pytest.mark.parametrize(
    ("layout", "kind"),
    [pytest.param(*each, id=f"{each[0].__name__}-{each[1].__name__}") for each in CASES],
)
def test_rows_of_a_batch_have_their_own_experts(
    layout: Layout, kind: Saved, tmp_path: Path
) -> None:
    base, weights = base_of(tmp_path / "base", qwen3_moe_config(), layout)
    paths = {name: saved(tmp_path / name, weights, kind, seed) for seed, name in enumerate("ab")}
    loaded = open_model(base)
    engine, seen = engine_of(loaded, base, **paths)
    run(engine, asked("none", 0), asked("one", 0, "a"), asked("two", 0, "b"), asked("far", 1, "b"))
    engine.close()
    for request, prompt, used in (
        ("none", 0, ""),
        ("one", 0, "a"),
        ("two", 0, "b"),
        ("far", 1, "b"),
    ):
        merged = loaded if not used else open_model(base, adapter=paths[used])
        theirs = np.array(solo_logits(merged.model, PROMPTS[prompt]))[-1]
        ours = seen[request][len(PROMPTS[prompt])]
        assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
    assert np.abs(seen["none"][20] - seen["one"][20]).max() > 0.01


def test_layouts_agree(tmp_path: Path) -> None:
    """The same adapter changes the same numbers, however the checkpoint holds its experts."""
    found = []
    for number, layout in enumerate((one_by_one, stacked)):
        base, weights = base_of(tmp_path / f"base{number}", qwen3_moe_config(), layout)
        path = saved(tmp_path / f"adapter{number}", weights, of_peft, seed=5)
        found.append(np.array(solo_logits(open_model(base, adapter=path).model, PROMPTS[0])))
    assert np.abs(found[0] - found[1]).max() < 1e-4 * np.abs(found[0]).max()


def test_experts_that_a_checkpoint_has_not_are_named(tmp_path: Path) -> None:
    base, weights = base_of(tmp_path / "base", qwen3_moe_config(), packed)
    path = saved(tmp_path / "peft", weights, of_peft, seed=1)
    with pytest.raises(ModelError, match="experts in codes"):
        open_model(base).read_adapter(path)
    dense, _ = base_of(tmp_path / "dense", CONFIGS["qwen3"], lambda each: each)
    with pytest.raises(ModelError, match="no experts"):
        open_model(dense).read_adapter(path)
