"""GGUF files of models that embed texts, against the folders that they were written from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type

from quire.core.config import EngineConfig
from quire.core.request import Embed
from quire.core.sentence_modules import read_modules
from quire.models.weights.loader import open_model
from tests.support.encoders import CONFIGS, write_modules
from tests.support.family_shapes import SLIDING
from tests.support.gguf_files import write_gguf
from tests.support.parity import Company, prompts
from tests.support.tiny_models import random_weights

CONFIG = CONFIGS["gemma3_text-bidirectional"] | {"query_pre_attn_scalar": 16}
MORE: dict[str, Any] = {
    "attention.sliding_window_pattern": [kind == SLIDING for kind in CONFIG["layer_types"]],
    "rope.freq_base": 1e6,
    "rope.freq_base_swa": 1e4,
    "pooling_type": 1,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def _folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), random_weights(CONFIG))
    return folder


def _dense(folder: Path, name: str, weight: Any) -> None:
    (folder / name).mkdir()
    outputs, inputs = weight.shape
    sizes = {"in_features": inputs, "out_features": outputs, "bias": False}
    (folder / name / "config.json").write_text(json.dumps(sizes))
    mx.save_safetensors(str(folder / name / "model.safetensors"), {"linear.weight": weight})


def _vectors(path: Path) -> list[tuple[float, ...]]:
    task = Embed("mean", normalized=True)
    wanted = [
        replace(each, task=task, prompt=tuple(token % 190 for token in each.prompt))
        for each in prompts((1, 20, 45))
    ]
    company = Company(open_model(str(path), dtype="float32"), EngineConfig("", kv_memory=1 << 20))
    company.run(wanted)
    ends = [company.answers[each.id].ends[0] for each in wanted]
    assert [end.error for end in ends] == [None] * len(ends)
    return [end.vector or () for end in ends]


@pytest.mark.parametrize("kind", [Type.F32, Type.Q8_0], ids=lambda kind: kind.name)
def test_embeddinggemma_brings_its_pooling_and_linear_layers(kind: Type, tmp_path: Path) -> None:
    folder, file = _folder(tmp_path / "published"), tmp_path / "model.gguf"
    random = np.random.default_rng(3)
    wide, narrow = (random.normal(size=each).astype(np.float32) for each in ((96, 64), (32, 96)))
    stands_for = write_gguf(
        folder,
        file,
        more=MORE,
        tensors={"dense_2.weight": wide, "dense_3.weight": narrow},
        kinds=lambda name: kind if name.startswith("dense") else Type.F32,
    )
    write_modules(folder, "mean", ("2_Dense", "3_Dense"))
    for number in (2, 3):
        _dense(folder, f"{number}_Dense", mx.array(stands_for[f"dense_{number}.weight"]))

    ours, theirs = _vectors(file), _vectors(folder)

    assert len(ours[0]) == 32
    assert np.abs(np.array(ours) - np.array(theirs)).max() < 1e-5


def test_a_file_without_pooling_has_no_stages(tmp_path: Path) -> None:
    folder, file = _folder(tmp_path / "published"), tmp_path / "model.gguf"
    write_gguf(folder, file, more=MORE | {"pooling_type": 0})

    assert read_modules(open_model(str(file)).path) is None
