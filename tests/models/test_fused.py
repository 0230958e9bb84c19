"""Decoders that read patches themselves: as mlx-vlm answers, in company, by other names.

`make_mlx_vlm.py` wrote the answers.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.media import EVEN_COLOURS
from quire.core.request import Request
from quire.media.processors import open_processors
from quire.models.fused_vision import places
from quire.models.loader import LoadedModel, open_model
from tests.models.solo import solo_logits
from tests.support.fused import CONFIG, PROMPTS, SIZES, converted, photograph, published, weights
from tests.support.parity import (
    SCENARIOS,
    TOLERANCE,
    Company,
    alone,
    answered,
    assert_same,
    prompts,
)

THEIRS = mx.load(str(Path(__file__).with_name("mlx_vlm.safetensors")))
DAILY = "two of different sizes"
ROWS, PIXELS = slice(None, None, 6), slice(None, None, 499)
CASES = [pytest.param(case, marks=() if case == DAILY else pytest.mark.slow) for case in PROMPTS]


def opened(folder: Path, tensors: dict[str, mx.array], config: Any = CONFIG) -> LoadedModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), tensors)
    return open_model(str(folder))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """As its publisher lays it out."""
    return opened(tmp_path_factory.mktemp("fused") / "model", published(weights()))


def differ(ours: mx.array, theirs: mx.array) -> float:
    assert ours.shape == theirs.shape
    return float(mx.abs(ours - theirs).max().item() / mx.abs(theirs).max().item())


@pytest.mark.parametrize("case", CASES)
def test_positions_logits_and_tokens_match(loaded: LoadedModel, case: str) -> None:
    tokens, media = PROMPTS[case]
    theirs = {key: THEIRS.get(f"falcon_ocr.{case}.{key}") for key in ("positions", "logits")}
    found = loaded.model.positions(tokens, media)
    if found is None:
        assert theirs["positions"] is None
    else:
        ours = mx.stack([mx.array(found[0]), *places(mx.array(found))], axis=1)
        assert mx.abs(ours - theirs["positions"]).max() < 1e-6
    assert differ(solo_logits(loaded.model, tokens, media)[ROWS], theirs["logits"]) < TOLERANCE
    greedy = THEIRS[f"falcon_ocr.{case}.tokens"].tolist()
    assert answered(loaded, tokens, media, len(greedy)).tokens == greedy
    assert len(set(greedy)) > 2, "a degenerate continuation proves nothing"


def requests() -> list[Request]:
    """The prompts, as requests."""
    texts = prompts([1] * len(PROMPTS), tokens=20)
    return [
        replace(text, prompt=tuple(tokens), media=tuple(media))
        for text, (tokens, media) in zip(texts, PROMPTS.values(), strict=True)
    ]


PLAIN = KVFormat()
PACKED = (KVFormat("page", 4, 4), KVFormat("uniform", 8, 8, 32), KVFormat("turbo", 3.5, 3.5))
EVERY_DAY = {(name, PLAIN) for name in ("batch of unequal lengths", "in chunks of 9")}
IN_COMPANY = [
    pytest.param(name, format, marks=() if (name, format) in EVERY_DAY else pytest.mark.slow)
    for name in SCENARIOS
    for format in (PLAIN, *PACKED)
    if format is PLAIN or name != "pre-empted and resumed"
]


@pytest.fixture(scope="module")
def expected(loaded: LoadedModel) -> Any:
    """What each request gets alone, computed once a format."""
    known: dict[str, Any] = {}

    def find(config: EngineConfig) -> Any:
        name = config.kv_format.name
        if name not in known:
            known[name] = alone(loaded, config, requests())
        return known[name]

    return find


@pytest.mark.parametrize(("scenario", "format"), IN_COMPANY)
def test_as_if_alone(loaded: LoadedModel, expected: Any, scenario: str, format: KVFormat) -> None:
    config = EngineConfig("", kv_memory=16 << 20, kv_format=format, kv_skip_layers=())
    config = replace(config, prefix_cache=False)
    wanted = requests()
    got = SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, expected(config), [request.id for request in wanted])


@pytest.mark.slow
@pytest.mark.parametrize("format", [PLAIN, *PACKED], ids=lambda format: format.name)
def test_a_picture_is_reused_and_another_is_not(loaded: LoadedModel, format: KVFormat) -> None:
    config = EngineConfig("", kv_memory=16 << 20, kv_format=format, kv_skip_layers=())
    first = requests()[4]
    media = first.media[0]
    other = replace(media, item=replace(media.item, **_turned(media.item)))
    question = replace(first, id="question", prompt=(*first.prompt[:-3], 5, 6, 7))
    picture = replace(first, id="picture", media=(other,))
    company = Company(loaded, config)
    for request in (first, question, picture):
        company.run([request])
    names = [first.id, "question", "picture"]
    assert_same(company.answers, alone(loaded, config, [first, question, picture]), names)
    assert company.answers["question"].ends[0].cached_tokens >= 128
    assert company.answers["picture"].ends[0].cached_tokens <= media.start


def _turned(item: Any) -> dict[str, Any]:
    features = item.features[::-1]
    made = type(item).of("image", features, item.shape, item.tokens)
    return {"features": features, "digest": made.digest}


def test_other_names_are_read(tmp_path: Path, loaded: LoadedModel) -> None:
    tokens, media = PROMPTS[DAILY]
    theirs = opened(tmp_path / "theirs", converted(published(weights())))
    wanted = solo_logits(loaded.model, tokens, media)
    assert mx.array_equal(solo_logits(theirs.model, tokens, media), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("conversion", [False, True])
def test_packed_checkpoints_are_read(tmp_path: Path, conversion: bool) -> None:
    """Codes and what they stand for give the same."""
    tensors = published(weights())
    tensors = converted(tensors) if conversion else tensors
    packed, plain = dict(tensors), dict(tensors)
    for name, array in tensors.items():
        if not name.endswith(".weight") or array.ndim != 2 or array.shape[1] % 32:
            continue
        codes, scales, biases = mx.quantize(array, 32, 8)
        base = name.removesuffix("weight")
        packed |= {name: codes, f"{base}scales": scales, f"{base}biases": biases}
        plain[name] = mx.dequantize(codes, scales, biases, 32, 8)
    config = CONFIG | {"quantization": {"group_size": 32, "bits": 8}}
    tokens, media = PROMPTS[DAILY]
    ours = solo_logits(opened(tmp_path / "packed", packed, config).model, tokens, media)
    wanted = solo_logits(opened(tmp_path / "plain", plain).model, tokens, media)
    assert differ(ours, wanted) < TOLERANCE


@pytest.mark.parametrize("name", SIZES)
def test_pixels_match(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "falcon_ocr"}))
    processor = open_processors(tmp_path, ["image"])["image"]
    file = io.BytesIO()
    photograph(SIZES[name]).save(file, "PNG")
    ((item,),) = [[part.item for part in processor.read(file.getvalue(), param="image")]]
    lines, columns = item.shape
    assert [lines, columns] == THEIRS[f"falcon_ocr.{name}.grid"].tolist()
    assert item.tokens == lines * columns + 5
    raw = np.frombuffer(item.features, np.uint8).reshape(lines, columns, 16, 16, 3)
    scaled = (raw / 255 - EVEN_COLOURS.mean) / EVEN_COLOURS.std
    ours = scaled.swapaxes(1, 2).flatten()[PIXELS]
    assert np.abs(ours - np.array(THEIRS[f"falcon_ocr.{name}.pixels"])).max() < 1e-3
