"""Every tiny model against what transformers answered for it; no torch needed.

`make_golden.py` wrote the answers.
"""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from quire.models.weights.loader import open_model
from tests.models.solo import greedy_choices, image_features, picture, solo_logits
from tests.support import tiny_models
from tests.support.tiny_models import CONFIGS, WINDOW, tiny_model

GOLDEN = mx.load(str(Path(__file__).with_name("golden.safetensors")))
PROMPT = [(7 * i * i + 3 * i) % 251 for i in range(45)]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = open_model(str(tiny_model(tmp_path, name))).model
    tokens = GOLDEN[f"{name}.tokens"].tolist()

    logits = solo_logits(model, PROMPT)[::3]

    assert mx.max(mx.abs(logits - GOLDEN[f"{name}.logits"])).item() < 1e-4
    assert len(tokens) == 100
    assert len(PROMPT) + len(tokens) > 2 * WINDOW
    assert greedy_choices(model, PROMPT, tokens) == tokens


def test_a_text_with_an_image_is_read_as_by_transformers(tmp_path: Path) -> None:
    config = tiny_models.gemma4_vision_config()
    weights = tiny_models.with_small_scores(tiny_models.random_weights(config))
    folder = tiny_models.write_model(tmp_path, config, weights=weights)
    model = open_model(str(folder)).model
    vision = model.encoders["image"]
    image = picture(12, 16, 48, vision.rows((12, 16)))

    features = GOLDEN["gemma4_vision.features"]
    assert mx.max(mx.abs(image_features(vision, image) - features)).item() < 1e-4
    tokens, images = tiny_models.prompt_with(image, count=1)
    logits = solo_logits(model, tokens, images)[::3]
    assert mx.max(mx.abs(logits - GOLDEN["gemma4_vision.logits"])).item() < 1e-4
