"""DeepSeek-VL with two encoders against transformers and in company: rows, logits, tokens."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.media import CLIP_COLOURS, EVEN_COLOURS, Colours, MediaItem
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded, solo_logits
from tests.support.agreement import differ
from tests.support.hybrid import CONFIG, LARGE, PATCH, PROMPTS, SMALL, picture
from tests.support.parity import (
    SCENARIOS,
    TOLERANCE,
    alone,
    answered,
    assert_same,
    prompts,
)
from tests.support.tiny_models import random_weights, write_model

ANSWER = 12
DAILY = "two"
Both = tuple[Any, LoadedModel]


def _cases(names: Any, daily: str) -> list[Any]:
    return [pytest.param(n, marks=() if n == daily else pytest.mark.slow) for n in names]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Both:
    pytest.importorskip("torch", reason="the oracle needs torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers")
    from tests.models import oracle

    folder = Path(tmp_path_factory.mktemp("hybrid"))
    config = transformers.AutoConfig.for_model(**deepcopy(CONFIG))
    return oracle.save_random(config, folder), open_model(str(folder))


def given(items: list[MediaItem]) -> dict[str, Any]:
    """Return pictures as transformers' processor gives them."""
    import torch

    def scaled(raw: np.ndarray, size: int, colours: Colours) -> Any:
        side = size // PATCH
        grid = raw.reshape(len(items), side, side, PATCH, PATCH, 3).swapaxes(2, 3)
        values = grid.reshape(-1, size, size, 3) / 255 - np.array(colours.mean)
        values = values / np.array(colours.std)
        return torch.from_numpy(values.transpose(0, 3, 1, 2).astype(np.float32))

    raw = np.stack([np.frombuffer(item.features, np.uint8) for item in items])
    large = 3 * LARGE**2
    return {
        "pixel_values": scaled(raw[:, large:], SMALL, EVEN_COLOURS),
        "high_res_pixel_values": scaled(raw[:, :large], LARGE, CLIP_COLOURS),
    }


@pytest.mark.oracle
def test_rows_match(both: Both) -> None:
    import torch

    reference, loaded = both
    for seed in range(3):
        item = picture(seed)
        with torch.no_grad():
            theirs = reference.model.get_image_features(**given([item])).pooler_output
        (ours,) = encoded(loaded.model.encoders["image"], item)
        assert differ(ours, theirs[0]) < 2e-4


@pytest.mark.oracle
@pytest.mark.parametrize("case", _cases(PROMPTS, DAILY))
def test_logits_and_tokens_match(both: Both, case: str) -> None:
    import torch

    from tests.models import oracle

    reference, loaded = both
    tokens, media = PROMPTS[case]
    ids, pictures = torch.tensor([tokens]), given([each.item for each in media]) if media else {}
    with torch.no_grad():
        logits = reference(ids, **pictures).logits[0]
        greedy = oracle.reference_greedy(reference, tokens, ANSWER, **pictures)
    assert differ(solo_logits(loaded.model, tokens, media), logits) < TOLERANCE
    assert answered(loaded, tokens, media, ANSWER).tokens == greedy
    assert len(set(greedy)) > 1, "a degenerate continuation proves nothing"


PLAIN, PAGE = KVFormat(), KVFormat("page", 4, 4)
# Of page blocks the scenario's budget holds one sequence's tail, so that no two ever run.
IN_COMPANY = [
    pytest.param(name, format, marks=() if name == "in chunks of 33" else pytest.mark.slow)
    for name in SCENARIOS
    for format in (PLAIN, PAGE)
    if format is PLAIN or name != "pre-empted and resumed"
]


@pytest.mark.parametrize(("scenario", "format"), IN_COMPANY)
def test_as_if_alone(tmp_path: Path, scenario: str, format: KVFormat) -> None:
    loaded = open_model(str(write_model(tmp_path / "model", CONFIG)))
    config = EngineConfig("", kv_memory=16 << 20, kv_format=format, kv_skip_layers=())
    config = replace(config, prefix_cache=False)
    texts = prompts([1] * len(PROMPTS), tokens=130 if "pre-empted" in scenario else 20)
    wanted = [
        replace(text, prompt=tuple(tokens), media=tuple(media))
        for text, (tokens, media) in zip(texts, PROMPTS.values(), strict=True)
    ]
    got = SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, alone(loaded, config, wanted), [request.id for request in wanted])


def test_a_packed_decoder_beside_plain_encoders_and_none_at_all(tmp_path: Path) -> None:
    tokens, media = PROMPTS[DAILY]
    packed, plain = {}, {}
    for key, array in random_weights(CONFIG).items():
        base = key.removesuffix(".weight")
        if key.startswith("model.") and array.ndim == 2:
            parts = mx.quantize(array, group_size=32, bits=4)
            packed |= dict(zip((key, f"{base}.scales", f"{base}.biases"), parts, strict=True))
            plain[key] = mx.dequantize(*parts, group_size=32, bits=4)
        else:
            packed[key] = plain[key] = array
    text = {key: array for key, array in packed.items() if not key.startswith("visual.")}
    models = []
    for name, weights in (("packed", packed), ("plain", plain), ("text", text)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        models.append(open_model(str(folder)).model)
    found, wanted = (solo_logits(model, tokens, media) for model in models[:2])
    assert mx.max(mx.abs(found - wanted)).item() < 1e-3 * mx.max(mx.abs(wanted)).item()
    assert not models[2].encoders
    alike = [solo_logits(model, tokens[:3]) for model in (models[0], models[2])]
    assert mx.array_equal(*alike)
