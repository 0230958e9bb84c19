"""Gemma 4's vision encoder, and texts with images in them, against Hugging Face transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.media import MediaItem
from quire.models.weights.loader import open_model
from tests.models.solo import image_features, picture, solo_logits
from tests.support import tiny_models
from tests.support.agreement import differ
from tests.support.parity import TOLERANCE
from tests.support.tiny_models import WINDOW

pytestmark = pytest.mark.oracle
pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

import torch  # noqa: E402
from transformers import AutoModelForImageTextToText, Gemma4Config  # noqa: E402
from transformers.models.gemma4.image_processing_pil_gemma4 import (  # noqa: E402
    convert_image_to_patches,
)

from tests.models import oracle  # noqa: E402

DEMO = Path(__file__).parents[2] / "src" / "quire" / "demo" / "model"
TOWERS: dict[str, dict[str, Any]] = {
    "plain": {"standardize": False, "use_clipped_linears": False},
    "standardized": {"use_clipped_linears": False},
    "clipped": {"standardize": False},
    "pooled by three": {"pooling_kernel_size": 3},
    "fewer keys": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12},
}
GRIDS = {2: ((2, 2), (6, 4), (2, 16), (24, 2)), 3: ((3, 3), (6, 9), (15, 3))}
TEXTS: dict[str, dict[str, Any]] = {
    "31B": tiny_models.gemma4_config(use_bidirectional_attention="vision"),
    "E2B": tiny_models.gemma4_ple_config(pad_token_id=3),
    "shared KV": tiny_models.gemma4_ple_config(use_bidirectional_attention="vision"),
}


@pytest.mark.parametrize("name", TOWERS)
def test_tower_and_projector_match(name: str, tmp_path: Path) -> None:
    config = tiny_models.gemma4_vision_config(**TOWERS[name])
    reference = oracle.save_random(Gemma4Config(**config), tmp_path)
    vision = open_model(str(tmp_path)).model.encoders["image"]

    for rows, columns in GRIDS[config["vision_config"]["pooling_kernel_size"]]:
        tokens = vision.rows((rows, columns))
        image = picture(rows, columns, vision.feature_bytes((1, 1)), tokens)
        ours = image_features(vision, image)
        assert ours.dtype == mx.float32
        assert len(ours) == tokens
        (theirs,) = oracle.reference_rows(reference, [image])
        assert differ(ours, theirs) < 1e-4


@pytest.mark.parametrize("name", TEXTS)
def test_logits_of_a_text_with_images_match(name: str, tmp_path: Path) -> None:
    config = tiny_models.gemma4_vision_config(TEXTS[name], **TOWERS["plain"])
    reference = oracle.save_random(Gemma4Config(**config), tmp_path)
    model = open_model(str(tmp_path)).model
    vision = model.encoders["image"]
    image = picture(12, 16, 48, vision.rows((12, 16)))
    assert image.tokens > WINDOW

    for count in (1, 2):
        tokens, images = tiny_models.prompt_with(image, count)
        theirs = oracle.reference_image_logits(reference, tokens, images)
        assert differ(solo_logits(model, tokens, images), theirs) < TOLERANCE


def test_the_demo_model_sees_what_transformers_sees() -> None:
    model = open_model(str(DEMO)).model
    reference = AutoModelForImageTextToText.from_pretrained(
        DEMO, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    vision = model.encoders["image"]
    canvas = np.full((3, 80, 112), 230, np.uint8)  # [colour, y, x]
    canvas[0, 10:40, 20:70] = 15
    canvas[1:, 50:75, 60:100] = [[[90]], [[160]]]
    patches = convert_image_to_patches(canvas, 8)
    tokens = vision.rows((10, 14))
    image = MediaItem("image", patches.tobytes(), (10, 14), tokens, b"")

    (theirs,) = oracle.reference_rows(reference, [image])
    assert differ(image_features(vision, image), theirs) < 2e-6
