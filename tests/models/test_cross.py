"""Opening Llama 3.2 Vision: names of all kinds of checkpoint, packed or not, and its limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import RequestError
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.crossing import CONFIG, PATCH, PROMPTS
from tests.support.parity import Company, prompts
from tests.support.tiny_models import random_weights

Weights = dict[str, mx.array]
TOKENS, MEDIA = PROMPTS["in a second turn"]
KERNEL = "patch_embedding.weight"


def opened(folder: Path, weights: Weights) -> LoadedModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder))


def logits(loaded: LoadedModel) -> np.ndarray:
    """Return the logits of the first token of an answer about two pictures."""
    (request,) = prompts([1], tokens=1)
    asked = replace(request, prompt=tuple(TOKENS), media=tuple(MEDIA))
    company = Company(loaded, EngineConfig("", kv_memory=8 << 20))
    return np.array(company.run([asked])[request.id].logits[len(TOKENS)])


def theirs(weights: Weights, *, conversion: bool) -> Weights:
    """Return the tensors as they are published, or as mlx-vlm converts them."""
    ready: Weights = {}
    for key, array in weights.items():
        if not key.startswith("visual."):
            ready[f"language_model.{key}"] = array
            continue
        name = key.removeprefix("visual.").replace(".up_proj.", ".fc1.")
        name = name.replace(".down_proj.", ".fc2.")
        if key.endswith(KERNEL):
            array = array.reshape(-1, PATCH, PATCH, 3)
            array = array if conversion else array.moveaxis(-1, 1)
        ready[name.replace("vision_model.", "vision_tower.") if conversion else name] = array
    return ready


def test_names_of_all_kinds_of_checkpoint_are_read(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    kinds = (weights, theirs(weights, conversion=False), theirs(weights, conversion=True))
    found = [logits(opened(tmp_path / str(n), kind)) for n, kind in enumerate(kinds)]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_a_packed_decoder_beside_a_plain_encoder(tmp_path: Path) -> None:
    packed, plain = {}, {}
    for key, array in random_weights(CONFIG).items():
        base = key.removesuffix(".weight")
        if key.startswith("model.") and array.ndim == 2 and "embed" not in key:
            parts = mx.quantize(array, group_size=32, bits=4)
            packed |= dict(zip((key, f"{base}.scales", f"{base}.biases"), parts, strict=True))
            plain[key] = mx.dequantize(*parts, group_size=32, bits=4)
        else:
            packed[key] = plain[key] = array
    found, wanted = (
        logits(opened(tmp_path / name, kind))
        for name, kind in (("packed", packed), ("plain", plain))
    )
    assert np.abs(found - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_too_many_tiles_are_refused(tmp_path: Path) -> None:
    encoder = opened(tmp_path / "model", random_weights(CONFIG)).model.encoders["image"]
    assert encoder.rows((2, 2)) == 1
    with pytest.raises(RequestError, match="at most 4 tiles"):
        encoder.rows((2, 3))
