"""`quire models` on folders and on a hub cache made for the test."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from gguf.constants import GGMLQuantizationType as Type
from rich.console import Console

from quire.cli import main
from quire.cli.models import Found, find_models, listing
from quire.demo import MODEL_DIR
from quire.models.base import named_parameters
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import random_weights

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    shutil.copy(MODEL_DIR / "tokenizer.json", folder)
    return folder


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty hub cache of the test's own."""
    import huggingface_hub.utils._cache_manager as manager

    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(manager, "HF_HUB_CACHE", str(cache))
    return cache


def test_the_embedded_model_comes_first() -> None:
    embedded = find_models([])[0]
    assert (embedded.name, embedded.where) == ("quire-demo", "embedded")
    assert embedded.family == "gemma4"
    assert embedded.problem is None
    assert embedded.context
    assert embedded.context >= 4096
    assert embedded.trained
    assert embedded.trained < embedded.context
    assert embedded.weight_bytes == sum(f.stat().st_size for f in MODEL_DIR.glob("*.safetensors"))


def test_packed_weights_count_as_what_they_stand_for(tmp_path: Path) -> None:
    layer = nn.QuantizedLinear(256, 128, bias=False, group_size=64, bits=4)
    weights = {f"model.q.{name}": array for name, array in named_parameters(layer).items()}
    weights["model.norm.weight"] = mx.ones((64,))
    config = LLAMA | {"quantization": {"bits": 4, "group_size": 64}}
    folder = write_folder(tmp_path / "packed", config, weights)
    found = find_models([folder])[-1]
    assert found.parameters == 256 * 128 + 64
    assert found.quantization == "4 bits, group 64"
    assert found.context == 512
    assert found.problem is None


def test_parameters_of_gptq_are_counted_unpacked(tmp_path: Path) -> None:
    path = "model.layers.0.mlp.up_proj"
    weights = {
        f"{path}.qweight": mx.zeros((8, 128), dtype=mx.int32),
        f"{path}.qzeros": mx.zeros((2, 16), dtype=mx.int32),
        f"{path}.scales": mx.ones((2, 128)),
        f"{path}.g_idx": mx.zeros((64,), dtype=mx.int32),
    }
    config = LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    found = find_models([write_folder(tmp_path / "packed", config, weights)])[-1]
    assert found.parameters == 64 * 128
    assert found.problem is None


def test_why_a_folder_cannot_be_served(tmp_path: Path) -> None:
    plain = {"model.norm.weight": mx.ones((64,))}
    root = tmp_path / "models"
    write_folder(root / "a-unknown", LLAMA | {"model_type": "mamba9"}, plain)
    hqq = LLAMA | {"quantization_config": {"quant_method": "hqq", "nbits": 4}}
    codes = {"model.layers.0.mlp.up_proj.qweight": mx.zeros((8, 64), dtype=mx.int32)}
    write_folder(root / "b-hqq", hqq, plain | codes)
    (write_folder(root / "c-bare", LLAMA, plain) / "tokenizer.json").unlink()
    (write_folder(root / "d-cut", LLAMA, plain) / "model.safetensors").write_bytes(b"\x40" * 20)
    (write_folder(root / "e-broken", LLAMA, plain) / "config.json").write_text("{")
    write_folder(root / "owner" / "f-good", LLAMA, plain)
    problems = {Path(m.name).name: m.problem or "" for m in find_models([root])[1:]}
    assert "mamba9" in problems["a-unknown"]
    assert "hqq" in problems["b-hqq"]
    assert "tokenizer.json" in problems["c-bare"]
    assert "cut short" in problems["d-cut"]
    assert "config.json" in problems["e-broken"]
    assert problems["f-good"] == ""


def test_the_hub_cache_is_listed_by_id(
    hub: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repository = hub / "models--owner--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    write_folder(repository / "snapshots" / commit, LLAMA, {"model.norm.weight": mx.ones((64,))})
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (repository / "blobs").mkdir()
    assert main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(m["name"], m["where"]) for m in listed[1:]] == [("owner/name", "hub cache")]
    assert listed[1]["problem"] is None


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--dir", "/no/such/folder"]) == 1
    assert "/no/such/folder" in capsys.readouterr().err


def test_the_table_says_what_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert "gemma4" in out
    assert "9.37M" in out
    assert "not served" not in out


def test_importing_the_command_does_not_load_mlx() -> None:
    code = "import sys, quire.cli.models; sys.exit('mlx.core' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_gguf_files_are_listed_with_their_parts_as_one(tmp_path: Path, hub: Path) -> None:
    published = write_folder(tmp_path / "published", LLAMA, random_weights(LLAMA))
    files = tmp_path / "files" / "owner"
    files.mkdir(parents=True)
    write_gguf(published, files / "model.gguf", kinds=lambda name: Type.Q8_0)
    (files / "mmproj.gguf").write_bytes(b"")
    (files / "other.gguf").write_bytes(b"GGUF\3")

    repository = hub / "models--owner--files"
    snapshot = repository / "snapshots" / ("2" * 40)
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("2" * 40)
    shutil.copytree(files, snapshot)
    (snapshot / "other.gguf").unlink()

    cached, model, other = find_models([tmp_path / "files"])[1:]

    assert (cached.name, cached.where) == ("owner/files:model.gguf", "hub cache")
    assert (cached.quantization, cached.problem) == ("GGUF Q8_0", None)

    assert (model.name, model.family, model.problem) == (str(files / "model.gguf"), "llama", None)
    assert (model.quantization, model.context) == ("GGUF Q8_0", 512)
    assert model.parameters == sum(array.size for array in random_weights(LLAMA).values())
    assert other.problem is not None
    assert "cut short" in other.problem


def test_the_table_is_readable_at_80_columns() -> None:
    name = "mlx-community/some-model-with-a-long-name-it-4bit"
    fits = Found(name, "hub cache", "/x", "gemma4_text", 4_500_000_000, 2_600_000_000)
    fits = replace(fits, quantization="4 bits, group 64", context=131_072)
    cannot = replace(fits, name="org/other", problem="no config.json")
    out = StringIO()
    Console(file=out, width=80).print(listing([fits, cannot]))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines[:6]][-1] == ["context", "131,072"]
    assert "org/other: not served: no config.json" in lines


@pytest.mark.parametrize("width", [60, 80, 120])
def test_names_stay_whole(width: int) -> None:
    name = "mlx-community/some-model-with-a-long-name-it-4bit"
    fits = Found(name, "hub cache", "/x", "gemma4_text", 4_500_000_000, 2_600_000_000)
    out = StringIO()
    Console(file=out, width=width).print(listing([fits]))
    lines = out.getvalue().splitlines()
    assert sum(name in line for line in lines) == 1
    assert max(map(len, lines)) <= width
    assert "gemma4_text" in out.getvalue()
