"""Packed copies of models: which matrices are packed, and what the copies compute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.cli.progress import silent
from quire.core.errors import ModelError
from quire.demo import MODEL_DIR
from quire.device.weights import Packing
from quire.models.draft_head import open_draft_head
from quire.models.weights.convert import Converted, convert
from quire.models.weights.loader import open_model
from quire.models.weights.packing_plan import Choice
from tests.models.solo import solo_logits
from tests.support.families import CONFIGS as FAMILIES
from tests.support.tiny_models import CONFIGS, random_weights, write_model

PROMPT = [(11 * i + 5) % 256 for i in range(24)]
AFFINE_4, AFFINE_8, MXFP4 = (
    Packing(32, 4, "affine"),
    Packing(32, 8, "affine"),
    Packing(32, 4, "mxfp4"),
)
CHOICES = (
    Choice("routers", None),
    Choice("embeddings", AFFINE_8),
    Choice("head", MXFP4),
    Choice("*.layers.1.*q_proj", None),
)


def packed(
    folder: Path, default: Packing = AFFINE_4, choices: Sequence[Choice] = CHOICES
) -> Converted:
    return convert(str(folder), folder.with_name("out"), default, choices, silent)


def read(folder: Path) -> dict[str, mx.array]:
    weights = mx.load(str(folder / "model.safetensors"))
    assert isinstance(weights, dict)
    return weights


def numbered(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return experts as Hugging Face's Qwen3-MoE has them: a matrix each."""
    named: dict[str, mx.array] = {}
    for name, array in weights.items():
        base, _, part = name.partition(".experts.")
        each = {f"{base}.experts.{n}.{part}": array[n] for n in range(len(array))}
        named |= each if part else {name: array}
    return named


def stacked(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return experts as transformers 5 has them: gate and up in one array of all."""
    named = {}
    for name, array in weights.items():
        base, found, part = name.partition(".experts.")
        if not found:
            named[name] = array
        elif part == "up_proj.weight":
            gate = weights[f"{base}.experts.gate_proj.weight"]
            named[f"{base}.experts.gate_up_proj"] = mx.concatenate([gate, array], axis=1)
        elif part == "down_proj.weight":
            named[f"{base}.experts.down_proj"] = array
    return named


def rounded(weights: dict[str, mx.array], made: Path) -> dict[str, mx.array]:
    """Return the weights with the values that the packed copy has for them."""
    config = json.loads((made / "config.json").read_text())["quantization"]
    default = {name: config[name] for name in ("group_size", "bits", "mode")}
    copy = read(made)
    values = dict(weights)
    for name in weights:
        base = name.removesuffix(".weight")
        if f"{base}.scales" in copy:
            parts = (copy[name], copy[f"{base}.scales"], copy.get(f"{base}.biases"))
            values[name] = mx.dequantize(*parts, **config.get(base, default)).astype(mx.float32)
    return values


@pytest.mark.parametrize("layout", [numbered, stacked], ids=["numbered", "stacked"])
def test_experts_are_packed_whatever_their_layout(layout: Any, tmp_path: Path) -> None:
    config = CONFIGS["qwen3_moe"](moe_intermediate_size=32)
    plain = random_weights(config)
    folder = write_model(tmp_path / "plain", config, weights=layout(plain))
    made = packed(folder)
    out = tmp_path / "out"
    names = read(out).keys()
    assert not any(".gate.scales" in name for name in names), "routers are left as they are"
    assert "model.layers.0.mlp.switch_mlp.down_proj.scales" in names
    assert not made.left
    values = {name.replace(".experts.", ".switch_mlp."): a for name, a in plain.items()}
    twin = write_model(tmp_path / "twin", config, weights=rounded(values, out))
    got = solo_logits(open_model(str(out)).model, PROMPT)
    expected = solo_logits(open_model(str(twin)).model, PROMPT)
    assert mx.allclose(mx.array(got), mx.array(expected), atol=1e-4).item()


def test_choices_hold_for_their_layers_and_stand_in_the_configuration(tmp_path: Path) -> None:
    config = CONFIGS["llama"]()
    folder = write_model(tmp_path / "plain", config)
    packed(folder)
    out = tmp_path / "out"
    told = json.loads((out / "config.json").read_text())["quantization"]
    assert told == asdict(AFFINE_4) | {
        "model.embed_tokens": asdict(AFFINE_8),
        "lm_head": asdict(MXFP4),
    }
    weights = read(out)
    assert weights["model.layers.0.self_attn.q_proj.weight"].dtype == mx.uint32
    assert weights["model.layers.1.self_attn.q_proj.weight"].dtype == mx.float32
    assert "lm_head.biases" not in weights
    twin = write_model(tmp_path / "twin", config, weights=rounded(random_weights(config), out))
    got = solo_logits(open_model(str(out)).model, PROMPT)
    expected = solo_logits(open_model(str(twin)).model, PROMPT)
    assert mx.allclose(mx.array(got), mx.array(expected), atol=1e-4).item()


def test_layers_that_are_one_matrix_in_the_checkpoint_get_their_rows(tmp_path: Path) -> None:
    config = FAMILIES["phi3"]
    whole = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    whole |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
    weights: dict[str, dict[str, mx.array]] = {}
    for name, array in random_weights(config).items():
        *path, module, kind = name.split(".")
        weights.setdefault(".".join([*path, whole.get(module, module), kind]), {})[module] = array
    order = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    fused = {
        name: mx.concatenate([parts[part] for part in order if part in parts])
        if len(parts) > 1
        else next(iter(parts.values()))
        for name, parts in weights.items()
    }
    packed(write_model(tmp_path / "plain", config, weights=fused), choices=())
    out = tmp_path / "out"
    assert "model.layers.0.self_attn.qkv_proj.scales" in read(out)
    twin = write_model(tmp_path / "twin", config, weights=rounded(fused, out))
    got = solo_logits(open_model(str(out)).model, PROMPT)
    expected = solo_logits(open_model(str(twin)).model, PROMPT)
    assert mx.allclose(mx.array(got), mx.array(expected), atol=1e-4).item()


def test_rows_of_no_whole_groups_are_named_and_left(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", CONFIGS["llama"](intermediate_size=48))
    made = packed(folder, choices=())
    assert sorted(made.left) == [f"model.layers.{n}.mlp.down_proj.weight" for n in range(3)]
    assert (
        "rows of 48 are not whole groups of 32" in made.left["model.layers.0.mlp.down_proj.weight"]
    )
    open_model(str(tmp_path / "out"))


def test_the_embedded_model_keeps_its_files_and_its_encoders(tmp_path: Path) -> None:
    made = convert(str(MODEL_DIR), tmp_path / "out", Packing(64, 4, "affine"), (), silent)
    assert made.packed == 61
    assert made.bits == 4.5
    scales = [name for name in read(tmp_path / "out") if name.endswith(".scales")]
    assert all(name.startswith("model.language_model.") for name in scales)
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert told["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    loaded = open_model(str(tmp_path / "out"))
    assert open_draft_head(loaded.path, loaded.model) is not None


def test_refusals_leave_nothing_behind(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", CONFIGS["llama"]())
    with pytest.raises(ModelError, match="no matrix of the model is covered by 'nothing'"):
        packed(folder, choices=[Choice("nothing", None)])
    assert [path.name for path in tmp_path.iterdir()] == ["plain"]
    packed(folder)
    with pytest.raises(ModelError, match="exists and is not an empty folder"):
        packed(folder)
    with pytest.raises(ModelError, match="is quantised already"):
        convert(str(tmp_path / "out"), tmp_path / "again", AFFINE_4, (), silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "plain"]


def test_large_models_are_written_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.models.weights.convert._SHARD_BYTES", 20_000)
    folder = write_model(tmp_path / "plain", CONFIGS["qwen3"]())
    packed(folder, choices=())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 1
    assert files == {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    open_model(str(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"glm4"}))  # its names are not ours
def test_copies_of_every_family_open(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "plain", FAMILIES[name])
    made = packed(folder, choices=CHOICES[:1])
    assert made.packed >= 4
    open_model(str(tmp_path / "out"))


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_mlx_lm_opens_the_copy_and_computes_the_same(name: str, tmp_path: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils", reason="the oracle needs mlx_lm")
    config = CONFIGS[name](intermediate_size=128, rope_theta=10000.0)
    config.pop("rope_parameters", None)
    weights = random_weights(config)
    folder = write_model(tmp_path / "plain", config, weights=numbered(weights))
    packed(folder)
    theirs, _ = utils.load_model(tmp_path / "out")
    expected = theirs(mx.array([PROMPT]))[0]
    got = solo_logits(open_model(str(tmp_path / "out")).model, PROMPT)
    assert mx.allclose(mx.array(got), expected.astype(mx.float32), atol=1e-3).item()
