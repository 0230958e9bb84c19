"""Families that transformers lacks: as mlx-vlm answers, in company, by other names.

`make_mlx_vlm.py` wrote the answers.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.kv_format import KVFormat
from quire.core.media import EVEN_COLOURS, MediaItem
from quire.core.request import Request
from quire.media.kinds import open_processors
from quire.media.source import Detail
from quire.models.vision.fused import places
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import SoloStep, encoded, solo_logits
from tests.support import fused, moondream, moondream2, perception
from tests.support.agreement import differ
from tests.support.parity import (
    SCENARIOS,
    TOLERANCE,
    Company,
    alone,
    answered,
    assert_same,
    prompts,
)
from tests.support.photographs import SIZES, photograph

THEIRS = mx.load(str(Path(__file__).with_name("mlx_vlm.safetensors")))
FAMILIES: dict[str, Any] = {
    "falcon_ocr": fused,
    "falcon_perception": perception,
    "moondream1": moondream2,
    "moondream3": moondream,
}
DAILY = {
    "falcon_ocr": "two of different sizes",
    "falcon_perception": "a picture",
    "moondream1": "a picture of two rows",
    "moondream3": "a picture of two rows",
}
LOGITS, ROWS, PIXELS = (slice(None, None, step) for step in (12, 3, 499))


CASES = [
    pytest.param(name, case, marks=() if case == DAILY[name] else pytest.mark.slow)
    for name, family in FAMILIES.items()
    for case in family.PROMPTS
]


def save(folder: Path, tensors: dict[str, mx.array], config: Any) -> LoadedModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return open_model(str(folder))


Opened = Callable[[str], LoadedModel]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Return a family's model as its publisher lays it out."""
    known: dict[str, LoadedModel] = {}

    def find(name: str) -> LoadedModel:
        if name not in known:
            family, folder = FAMILIES[name], tmp_path_factory.mktemp(name) / "model"
            known[name] = save(folder, family.published(family.weights()), family.CONFIG)
        return known[name]

    return find


@pytest.mark.parametrize(("name", "case"), CASES)
def test_positions_rows_logits_and_tokens_match(opened: Opened, name: str, case: str) -> None:
    loaded = opened(name)
    tokens, media = FAMILIES[name].PROMPTS[case]
    theirs = {
        key.removeprefix(f"{name}.{case}."): array
        for key, array in THEIRS.items()
        if key.startswith(f"{name}.{case}.")
    }
    found = loaded.model.positions(tokens, media)
    assert (found is None) == ("positions" not in theirs)
    if found is not None:
        ours = mx.stack([mx.array(found[0]), *places(mx.array(found))], axis=1)
        assert mx.abs(ours - theirs["positions"]).max() < 1e-6
    for number, placed in enumerate(media):
        (rows,) = encoded(loaded.model.encoders["image"], placed.item)
        assert len(rows) == placed.item.tokens
        assert differ(rows[ROWS], theirs[f"rows{number}"]) < 2e-4
    assert differ(solo_logits(loaded.model, tokens, media)[LOGITS], theirs["logits"]) < TOLERANCE
    greedy = theirs["tokens"].tolist()
    assert answered(loaded, tokens, media, len(greedy)).tokens == greedy
    assert len(set(greedy)) > 2, "a degenerate continuation proves nothing"


def requests(name: str) -> list[Request]:
    """Return the prompts, as requests."""
    known = FAMILIES[name].PROMPTS
    texts = prompts([1] * len(known), tokens=20)
    return [
        replace(text, prompt=tuple(tokens), media=tuple(media))
        for text, (tokens, media) in zip(texts, known.values(), strict=True)
    ]


def settings(format: KVFormat) -> EngineConfig:
    return EngineConfig("", kv_memory=16 << 20, kv_format=format, kv_skip_layers=())


PLAIN = KVFormat()
PACKED = (KVFormat("page", 4, 4), KVFormat("uniform", 8, 8, 32), KVFormat("turbo", 3.5, 3.5))
IN_COMPANY = [
    (scenario, format)
    for scenario, format in product(SCENARIOS, (PLAIN, *PACKED))
    if format is PLAIN or scenario != "pre-empted and resumed"
]


@pytest.fixture(scope="module")
def expected(opened: Opened) -> Any:
    """Return what each request gets alone, computed once a family and format."""
    known: dict[tuple[str, str], Any] = {}

    def find(name: str, format: KVFormat) -> Any:
        key = name, format.name
        if key not in known:
            known[key] = alone(opened(name), settings(format), requests(name))
        return known[key]

    return find


@pytest.mark.parametrize("name", ["falcon_ocr", "moondream3"])
def test_two_as_if_alone(opened: Opened, name: str) -> None:
    loaded, wanted = opened(name), requests(name)[:2]
    config = replace(settings(PLAIN), prefix_cache=False)
    got = SCENARIOS["in chunks of 9"](loaded, config, wanted)
    assert_same(got, alone(loaded, config, wanted), [request.id for request in wanted])


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "format"), IN_COMPANY)
@pytest.mark.parametrize("name", FAMILIES)
def test_as_if_alone(
    opened: Opened, expected: Any, name: str, scenario: str, format: KVFormat
) -> None:
    wanted = requests(name)
    config = replace(settings(format), prefix_cache=False)
    got = SCENARIOS[scenario](opened(name), config, wanted)
    assert_same(got, expected(name, format), [request.id for request in wanted])


def turned(item: MediaItem) -> MediaItem:
    """Return another picture of the same shape."""
    return MediaItem.of("image", item.features[::-1], item.shape, item.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("format", [PLAIN, *PACKED], ids=lambda format: format.name)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_picture_is_reused_and_another_is_not(
    opened: Opened, name: str, format: KVFormat
) -> None:
    loaded, config = opened(name), settings(format)
    first = requests(name)[4]
    media = first.media[0]
    other = replace(media, item=turned(media.item))
    question = replace(first, id="question", prompt=(*first.prompt[:-3], 5, 6, 7))
    picture = replace(first, id="picture", media=(other,))
    company = Company(loaded, config)
    for request in (first, question, picture):
        company.run([request])
    names = [first.id, "question", "picture"]
    assert_same(company.answers, alone(loaded, config, [first, question, picture]), names)
    assert company.answers["question"].ends[0].cached_tokens >= 128
    assert company.answers["picture"].ends[0].cached_tokens <= media.start


@pytest.mark.parametrize("name", FAMILIES)
def test_other_names_are_read(tmp_path: Path, opened: Opened, name: str) -> None:
    family = FAMILIES[name]
    tokens, media = family.PROMPTS[DAILY[name]]
    tensors = family.converted(family.published(family.weights()))
    theirs = save(tmp_path / "theirs", tensors, family.CONVERTED)
    wanted = solo_logits(opened(name).model, tokens, media)
    assert mx.array_equal(solo_logits(theirs.model, tokens, media), wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_made_beside_a_checkpoint_is_of_its_type(tmp_path: Path, name: str) -> None:
    """Tables made at opening have the checkpoint's type; float32 would widen all that follows."""
    family = FAMILIES[name]
    folder = tmp_path / "model"
    save(folder, family.published(family.weights()), family.CONFIG)
    model = open_model(str(folder), dtype="bfloat16").model
    assert model(SoloStep(model.layout, [7, 3, 1, 5])).dtype == mx.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("conversion", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_checkpoints_are_read(tmp_path: Path, name: str, conversion: bool) -> None:
    """Codes and what they stand for give the same."""
    family = FAMILIES[name]
    tensors = family.published(family.weights())
    tensors = family.converted(tensors) if conversion else tensors
    packed, plain = dict(tensors), dict(tensors)
    for key, array in tensors.items():
        if not key.endswith(".weight") or array.ndim < 2 or array.shape[-1] % 32:
            continue
        codes, scales, biases = mx.quantize(array, 32, 8)
        base = key.removesuffix("weight")
        packed |= {key: codes, f"{base}scales": scales, f"{base}biases": biases}
        plain[key] = mx.dequantize(codes, scales, biases, 32, 8)
    assert len(packed) > len(plain) + 10
    config = family.CONVERTED if conversion else family.CONFIG
    more = {"quantization": {"group_size": 32, "bits": 8}}
    tokens, media = family.PROMPTS[DAILY[name]]
    ours = solo_logits(save(tmp_path / "packed", packed, config | more).model, tokens, media)
    wanted = solo_logits(save(tmp_path / "plain", plain, config).model, tokens, media)
    assert differ(ours, wanted) < TOLERANCE


def shown(
    folder: Path, model_type: str, size: str, *, detail: Detail = "auto", **config: Any
) -> MediaItem:
    """Return what the processor of a family makes of a picture."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | config))
    processor = open_processors(folder, ["image"])["image"]
    file = io.BytesIO()
    photograph(SIZES[size]).save(file, "PNG")
    (part,) = processor.read(file.getvalue(), param="image", detail=detail)
    return part.item


def colours(item: MediaItem, patch: int, rows: int, columns: int) -> np.ndarray:
    """Return some of the pixels, square by square and row by row, as the model takes them."""
    raw = np.frombuffer(item.features, np.uint8).reshape(-1, rows, columns, patch, patch, 3)
    scaled = (raw / 255 - EVEN_COLOURS.mean) / EVEN_COLOURS.std
    return scaled.swapaxes(2, 3).flatten()[PIXELS]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    "name", ["falcon_ocr", pytest.param("falcon_perception", marks=pytest.mark.slow)]
)
def test_pixels_of_whole_pictures_match(tmp_path: Path, name: str, size: str) -> None:
    item = shown(tmp_path, name, size)
    lines, columns = item.shape
    assert [lines, columns] == THEIRS[f"{name}.{size}.grid"].tolist()
    assert item.tokens == lines * columns + 5
    theirs = np.array(THEIRS[f"{name}.{size}.pixels"])
    assert np.abs(colours(item, 16, lines, columns) - theirs).max() < 1e-3


def test_a_picture_takes_no_more_tokens_than_it_may(tmp_path: Path) -> None:
    assert shown(tmp_path, "falcon_ocr", "usual").tokens > 200
    assert 150 < shown(tmp_path, "falcon_ocr", "usual", detail=200).tokens <= 200


def test_moondream_2_needs_the_tokenizer_of_moondream_3(tmp_path: Path) -> None:
    """The one beside it is another model's."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "moondream1", "config": {}}))
    with pytest.raises(ModelError, match="moondream/starmie-v1"):
        open_processors(tmp_path, ["image"])
    added = [{"id": 1, "content": "<|md_reserved_0|>", "special": True}]
    tokens = {"added_tokens": added, "model": {"type": "BPE", "vocab": {}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    assert open_processors(tmp_path, ["image"])["image"].placeholders.token == 0


@pytest.mark.parametrize("size", SIZES)
def test_pixels_of_overlapping_squares_match(tmp_path: Path, size: str) -> None:
    item = shown(tmp_path, "moondream3", size, config={})
    assert list(item.shape) == THEIRS[f"moondream3.{size}.grid"].tolist()
    assert item.tokens == 730
    theirs = np.array(THEIRS[f"moondream3.{size}.pixels"])
    assert np.abs(colours(item, 14, 27, 27) - theirs).max() < 1e-3
