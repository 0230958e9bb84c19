"""Gemma 3n's sight: rows, logits and tokens against transformers and timm; names; shapes."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.errors import ModelError, RequestError
from quire.core.media import MediaItem
from quire.models.registry import build
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded, solo_logits
from tests.support.agreement import differ
from tests.support.gemma3n import gemma3n_config, gemma3n_seeing_config
from tests.support.parity import TOLERANCE, answered
from tests.support.seeing import prompt
from tests.support.tiny_models import random_weights

Weights = dict[str, mx.array]
ROWS, ANSWER = 16, 8
GOLDEN = Path(__file__).with_name("gemma3n_pictures.safetensors")
"""The file that `make_golden_pictures` wrote."""
GOLDEN_SIDES = (128, 256)


def shown(seed: int, side: int = 128) -> MediaItem:
    """Return a square picture of random colours around one of its own."""
    rng = np.random.default_rng(seed)
    colours = rng.integers(0, 200, 3) + rng.integers(0, 56, (side, side, 3))
    features = colours.astype(np.uint8).tobytes()
    return MediaItem.of("image", features, (side, side), ROWS, bidirectional=False)


def opened(folder: Path, weights: Weights, config: dict[str, Any] | None = None) -> LoadedModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config or gemma3n_seeing_config()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder), dtype="float32")


def published(weights: Weights, *, conversion: bool) -> Weights:
    """Return the tensors as Google publishes them, or as mlx-vlm converts them."""
    ready: Weights = {}
    for name, array in weights.items():
        if not name.startswith("vision_tower."):
            ready[name] = array
            continue
        if array.ndim == 2:
            array = array[:, None, None]
        if array.ndim == 4 and not conversion:
            array = array.moveaxis(-1, 1)
        ready[name.replace("vision_tower.", "vision_tower.timm_model.")] = array
    return ready


def pixels(*items: MediaItem) -> Any:
    """Return pixels as image processors give them."""
    torch = pytest.importorskip("torch")
    raw = [np.frombuffer(item.features, np.uint8).reshape(*item.shape, 3) for item in items]
    return torch.from_numpy(np.stack(raw).transpose(0, 3, 1, 2).astype(np.float32) / 255)


@pytest.fixture(scope="module")
def reference() -> Any:
    pytest.importorskip("timm", reason="the encoder is timm's")
    torch = pytest.importorskip("torch", reason="the oracle needs torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
    from tests.models.oracle import _draw

    config = transformers.AutoConfig.for_model(**deepcopy(gemma3n_seeing_config()))
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_draw(name, weight))
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def ours(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    state = {name: mx.array(w.numpy()) for name, w in reference.state_dict().items()}
    return opened(Path(tmp_path_factory.mktemp("seeing")) / "model", state)


CASES = {
    "two, and tokens of the encoder's own": prompt(3, shown(2), 246, shown(3), 8),
    "text alone": prompt(40),
    "between texts": prompt(20, shown(4), 20),
    "after long text": prompt(150, shown(5), 4),
    "in a second turn": prompt(9, shown(6), 30, shown(7), 7),
}


def rows_of_timm(reference: Any, *items: MediaItem) -> Any:
    """Return timm's rows `[items, ROWS, hidden]`."""
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return reference.model.get_image_features(pixels(*items)).pooler_output


@pytest.mark.oracle
@pytest.mark.parametrize("side", [128, 256, 384])
def test_rows_match(reference: Any, ours: LoadedModel, side: int) -> None:
    (wanted,) = rows_of_timm(reference, shown(1, side))
    (found,) = encoded(ours.model.encoders["image"], shown(1, side))
    assert differ(found, wanted) < 2e-4


@pytest.mark.oracle
@pytest.mark.parametrize("case", [pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_logits_and_tokens_match(reference: Any, ours: LoadedModel, case: str) -> None:
    pytest.importorskip("torch")
    from tests.models import oracle

    tokens, media = CASES[case]
    given = {"pixel_values": pixels(*(each.item for each in media))} if media else {}
    logits, greedy = oracle.reference_answer(reference, tokens, ANSWER, **given)
    assert differ(solo_logits(ours.model, tokens, media), logits) < TOLERANCE
    assert answered(ours, tokens, media, ANSWER).tokens == greedy


def test_rows_are_those_that_timm_gave(tmp_path: Path) -> None:
    """Rows of `random_weights` are timm's, with the names of both kinds of checkpoint."""
    golden, weights = mx.load(str(GOLDEN)), random_weights(gemma3n_seeing_config())
    for conversion in (False, True):
        named = published(weights, conversion=conversion)
        encoder = opened(tmp_path / str(conversion), named).model.encoders["image"]
        for side in GOLDEN_SIDES:
            (rows,) = encoded(encoder, shown(1, side))
            assert differ(rows, golden[f"rows.{side}"]) < 2e-4


def test_without_its_tensors_a_model_takes_sound_only(tmp_path: Path) -> None:
    weights = random_weights(gemma3n_config())
    assert set(opened(tmp_path / "model", weights).model.encoders) == {"audio"}


def test_shapes_that_are_not_taken_are_named() -> None:
    encoder = build(gemma3n_seeing_config()).encoders["image"]
    assert (encoder.rows((128, 192)), encoder.feature_bytes((128, 192))) == (ROWS, 128 * 192 * 3)
    for shape in ((100, 128), (0, 128), (128, 0), (2048, 2048)):
        with pytest.raises(RequestError, match="multiples of 64, and at most"):
            encoder.rows(shape)


def test_the_published_encoder_is_the_usual_one() -> None:
    config = gemma3n_seeing_config()
    config["vision_config"].pop("model_args")
    model: Any = build(config | {"vision_soft_tokens_per_image": 256})
    kind = model.vision_tower.kind
    assert [len(stage) for stage in kind.stages] == [3, 5, 37, 39]
    assert [stage[-1].channels for stage in kind.stages] == [128, 256, 640, 1280]
    encoder = model.encoders["image"]
    assert (encoder.rows((768, 768)), encoder.pieces((768, 768)).count) == (256, 84 + 8)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architecture": "mobilenetv5_base"}, "mobilenetv5_base"),
        ({"model_args": {"channel_multiplier": 0.5}}, "channel_multiplier"),
        ({"model_args": {"msfa_output_resolution": 5}}, "msfa_output_resolution"),
        ({"model_args": {"block_args": [[{"block_type": "ir"}]]}}, "'ir'"),
    ],
)
def test_settings_that_are_not_known_are_named(changes: dict[str, Any], word: str) -> None:
    config = gemma3n_seeing_config()
    with pytest.raises(ModelError, match=word):
        build(config | {"vision_config": config["vision_config"] | changes})
    with pytest.raises(ModelError, match="vision_soft_tokens_per_image = 15"):
        build(config | {"vision_soft_tokens_per_image": 15})
