"""DeepSeek-OCR 1 and 2 against transformers, and by other names: rows, logits, tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.errors import ModelError
from quire.core.media import MediaItem
from quire.core.original_configs import by_usual_keys
from quire.models.base import named_parameters
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded, solo_logits
from tests.support.agreement import differ
from tests.support.everyday import everyday
from tests.support.ocr import CONFIGS, PATCH, SIDES, cases, picture
from tests.support.parity import TOLERANCE, answered
from tests.support.tiny_models import random_weights

ANSWER = 12
DAILY = "two of different sizes"
Both = tuple[Any, LoadedModel]
Weights = dict[str, mx.array]


def theirs(name: str) -> dict[str, Any]:
    """Return transformers' configuration. Unlimited-OCR is DeepSeek-OCR with a window, here one of
    all tokens.
    """
    config = by_usual_keys(CONFIGS[name])
    text, vision = config["text_config"], config["vision_config"]
    sam, second = dict(vision["sam_config"]), dict(vision["encoder_config"])
    count, first = text["num_hidden_layers"], text["first_k_dense_replace"]
    dense = ["dense"] * first + ["sparse"] * (count - first)
    kept = {key: value for key, value in text.items() if "rank" not in key and "dim" not in key}
    queries = name.endswith("queries")
    del second["model_type"]
    return {
        "model_type": "deepseek_ocr2" if queries else "unlimited_ocr",
        "text_config": kept
        | {"mlp_layer_types": dense, "pad_token_id": 0}
        | ({} if queries else {"sliding_window": 1 << 20}),
        "vision_config": {
            "sam_config": sam | {"mlp_dim": 4 * sam["hidden_size"], "hidden_act": "gelu"},
            "encoder_config": second,
        },
        "image_token_id": config["image_token_id"],
        "tie_word_embeddings": False,
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    """Return a reference of transformers, which saves published names, and the same opened by the
    published configuration.
    """
    pytest.importorskip("torch", reason="the oracle needs torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
    from tests.models import oracle

    known: dict[str, Both] = {}

    def find(name: str) -> Both:
        if name not in known:
            folder = Path(tmp_path_factory.mktemp(name))
            config = transformers.AutoConfig.for_model(**theirs(name))
            reference = oracle.save_random(config, folder)
            (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
            known[name] = reference, open_model(str(folder))
        return known[name]

    return find


def given(name: str, items: list[MediaItem]) -> dict[str, Any]:
    """Return pictures as transformers' processor gives them."""
    import torch

    if not items:
        return {}
    whole, tile = SIDES[name]

    def scaled(raw: np.ndarray, side: int) -> Any:
        grid = raw.reshape(-1, side, side, PATCH, PATCH, 3).swapaxes(2, 3)
        values = grid.reshape(-1, side * PATCH, side * PATCH, 3) / 127.5 - 1.0
        return torch.from_numpy(values.transpose(0, 3, 1, 2).astype(np.float32))

    raws = [np.frombuffer(item.features, np.uint8) for item in items]
    starts = [item.shape[0] * item.shape[1] * (tile * PATCH) ** 2 * 3 for item in items]
    cut = [scaled(raw[:start], tile) for raw, start in zip(raws, starts, strict=True)]
    seen = [scaled(raw[start:], whole) for raw, start in zip(raws, starts, strict=True)]
    found = {"pixel_values": torch.cat(seen), "num_local_patches": [len(each) for each in cut]}
    if any(starts):
        found["pixel_values_local"] = torch.cat(cut)
    if not name.endswith("queries"):
        found["patches_grid"] = [item.shape[::-1] for item in items]
    return found


def is_small(name: str) -> bool:
    """Whether pictures have few patches; those of DeepSeek-OCR 2 have 4,096, in seconds each."""
    return not name.endswith("queries")


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "tiles"),
    everyday(
        product(CONFIGS, ((0, 0), (1, 2), (3, 1))),
        lambda name, tiles: is_small(name) or tiles == (1, 2),
    ),
)
def test_rows_match(both: Callable[[str], Both], name: str, tiles: tuple[int, int]) -> None:
    import torch

    reference, loaded = both(name)
    encoder = loaded.model.encoders["image"]
    item = picture(name, sum(tiles), *tiles)
    with torch.no_grad():
        wanted = reference.model.get_image_features(**given(name, [item])).pooler_output
    (ours,) = encoded(encoder, item)
    assert len(ours) == encoder.rows(item.shape) == item.tokens
    assert differ(ours, wanted[0]) < 2e-4


CASES = everyday(
    ((name, case) for name in CONFIGS for case in cases(name)),
    lambda name, case: case == (DAILY if is_small(name) else "text alone"),
)


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "case"), CASES)
def test_logits_and_tokens_match(both: Callable[[str], Both], name: str, case: str) -> None:
    import torch

    from tests.models import oracle

    reference, loaded = both(name)
    tokens, media = cases(name)[case]
    pictures = given(name, [each.item for each in media])
    with torch.no_grad():
        logits = reference(torch.tensor([tokens]), **pictures).logits[0]
    greedy = oracle.reference_greedy(reference, tokens, ANSWER, **pictures)
    assert differ(solo_logits(loaded.model, tokens, media), logits) < TOLERANCE
    assert answered(loaded, tokens, media, ANSWER).tokens == greedy
    assert len(set(greedy)) > 1, "a degenerate continuation proves nothing"


def opened(folder: Path, config: dict[str, Any], weights: Weights) -> LoadedModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder))


def converted(published: Weights) -> Weights:
    """Return published tensors as mlx-vlm names and lays them out."""
    ready: Weights = {}
    for name, array in published.items():
        plain = name.removeprefix("model.")
        if plain.startswith(("lm_head.", "embed_tokens.", "layers.", "norm.")):
            ready[f"language_model.{name}"] = array
            continue
        if array.ndim == 4 and not name.endswith("pos_embed"):
            array = array.moveaxis(1, -1)
        plain = plain.replace("view_seperator", "view_separator")
        plain = plain.replace("qwen2_model.model.model.", "vision_model.qwen2_encoder.")
        if plain.startswith("qwen2_model.query_"):
            plain = "vision_model.qwen2_encoder." + plain.split(".")[1]
        ready[plain] = array
    return ready


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "case"),
    everyday(
        product(CONFIGS, (DAILY, "text alone")),
        lambda name, case: (case == DAILY) == is_small(name),
    ),
)
def test_other_names_are_read(
    both: Callable[[str], Both], name: str, case: str, tmp_path: Path
) -> None:
    """Conversions by mlx-vlm, and of DeepSeek-OCR 2, transformers'."""
    reference, loaded = both(name)
    published = mx.load(str(next(loaded.path.glob("*.safetensors"))))
    second = name.endswith("queries")
    called = {"model_type": "deepseekocr_2" if second else "deepseekocr"}
    models = [opened(tmp_path / "mlx", CONFIGS[name] | called, converted(published)).model]
    if second:
        own = {key: mx.array(each.numpy()) for key, each in reference.state_dict().items()}
        models.append(opened(tmp_path / "own", reference.config.to_dict(), own).model)
    tokens, media = cases(name)[case]
    wanted = solo_logits(loaded.model, tokens, media)
    weights = named_parameters(loaded.model)
    for model in models:
        read = named_parameters(model)
        assert read.keys() == weights.keys()
        assert all(mx.array_equal(read[key], weights[key]) for key in weights)
        assert mx.array_equal(solo_logits(model, tokens, media), wanted)


def test_a_file_without_the_encoder_is_served_as_text(tmp_path: Path) -> None:
    config = CONFIGS["deepseek_vl_v2"]
    weights = random_weights(config)
    text = {key: array for key, array in weights.items() if not key.startswith("visual.")}
    whole = opened(tmp_path / "whole", config, weights).model
    part = opened(tmp_path / "part", config, text).model
    assert not part.encoders
    assert mx.array_equal(solo_logits(part, [3, 4]), solo_logits(whole, [3, 4]))


def test_deepseek_vl_2_is_refused() -> None:
    """It has the same `model_type`."""
    vision = {"model_name": "siglip_so400m_patch14_384", "model_type": "vision", "width": 1152}
    with pytest.raises(ModelError, match="siglip_so400m_patch14_384', which is not an encoder"):
        by_usual_keys(CONFIGS["deepseek_vl_v2"] | {"vision_config": vision})
