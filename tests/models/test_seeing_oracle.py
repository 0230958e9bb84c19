"""Described families that see, against transformers: rows, positions, logits and tokens."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.media import MediaItem, PlacedMedia
from quire.models.base import MediaRows
from quire.models.loader import LoadedModel, open_model
from tests.models.solo import SoloStep, encoded, marked_rows, solo_logits
from tests.support.parity import TOLERANCE, Company, prompts
from tests.support.seeing import CONFIGS, PATCH, PROMPTS, picture

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

ANSWER = 12
GRIDS = ((2, 2), (6, 10), (4, 14), (8, 8), (2, 18))
Both = tuple[Any, LoadedModel]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    known: dict[str, Both] = {}

    def find(name: str) -> Both:
        if name not in known:
            folder = Path(tmp_path_factory.mktemp(name))
            config = AutoConfig.for_model(**deepcopy(CONFIGS[name]))
            known[name] = oracle.save_random(config, folder), open_model(str(folder))
        return known[name]

    return find


def inputs(loaded: LoadedModel, media: list[PlacedMedia], tokens: list[int]) -> dict[str, Any]:
    """Pictures as image processors give them, and which tokens stand for them."""
    kinds = torch.zeros(1, len(tokens), dtype=torch.long)
    for each in media:
        kinds[0, each.start : each.end] = 1
    if not media:
        return {"mm_token_type_ids": kinds}
    return {"mm_token_type_ids": kinds} | pixels(loaded, [each.item for each in media])


def pixels(loaded: LoadedModel, items: list[MediaItem]) -> dict[str, Any]:
    colours = loaded.model.encoders["image"].visual.kind.colours
    parts = []
    for item in items:
        raw = np.frombuffer(item.features, np.uint8).reshape(-1, PATCH, PATCH, 3) / 255
        scaled = (raw - np.array(colours.mean)) / np.array(colours.std)
        frames = np.repeat(scaled.transpose(0, 3, 1, 2)[:, :, None], 2, axis=2)
        parts.append(frames.reshape(len(raw), -1).astype(np.float32))
    grids = [(1, *item.shape) for item in items]
    return {
        "pixel_values": torch.from_numpy(np.concatenate(parts)),
        "image_grid_thw": torch.tensor(grids),
    }


def differ(ours: mx.array, theirs: Any) -> float:
    found = np.array(ours)
    wanted = theirs.float().numpy()
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def levels(reference: Any, loaded: LoadedModel, items: list[MediaItem]) -> list[Any]:
    """What their encoder makes of pictures, `[rows, hidden]` a level."""
    with torch.no_grad():
        found = reference.model.get_image_features(**pixels(loaded, items))
    parts = [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]
    return [torch.cat(list(part)) for part in parts]


def logits_of_their_rows(
    reference: Any, loaded: LoadedModel, tokens: list[int], media: list[PlacedMedia]
) -> mx.array:
    first, *deeper = (
        mx.array(level.numpy())
        for level in levels(reference, loaded, [each.item for each in media])
    )
    rows = MediaRows(marked_rows(media), first, tuple(deeper))
    model = loaded.model
    step = SoloStep(model.layout, tokens, rows, media, model.positions(tokens, media))
    return model.logits(model(step))


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_pictures_match(opened: Callable[[str], Both], name: str) -> None:
    reference, loaded = opened(name)
    for number, grid in enumerate(GRIDS):
        item = picture(number, *grid)
        ours = encoded(loaded.model.encoders["image"], item)
        for mine, other in zip(ours, levels(reference, loaded, [item]), strict=True):
            assert differ(mine, other) < 2e-4


@pytest.mark.parametrize("case", PROMPTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_positions_logits_and_tokens_match(
    opened: Callable[[str], Both], name: str, case: str
) -> None:
    reference, loaded = opened(name)
    tokens, media = PROMPTS[case]
    given = inputs(loaded, media, tokens)
    ids = torch.tensor([tokens])
    positions = loaded.model.positions(tokens, media)
    if media:
        theirs, _ = reference.model.get_rope_index(
            ids, given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"]
        )
        assert np.array_equal(positions, theirs[:, 0].numpy())
    else:
        assert positions is None

    with torch.no_grad():
        logits = reference(ids, **given).logits[0]
        greedy = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=ANSWER,
            min_new_tokens=ANSWER,
            eos_token_id=None,
            pad_token_id=0,
            **given,
        )[0, len(tokens) :].tolist()

    if media:  # random layers make much of the encoder's rounding, so theirs are placed, too
        assert differ(logits_of_their_rows(reference, loaded, tokens, media), logits) < TOLERANCE
    bound = 5 * TOLERANCE if media else TOLERANCE
    assert differ(solo_logits(loaded.model, tokens, media), logits) < bound
    (request,) = prompts([1], tokens=ANSWER)
    asked = replace(request, prompt=tuple(tokens), media=tuple(media))
    # Seven tokens a step: pictures are cut.
    config = EngineConfig("", kv_memory=16 << 20, prefix_cache=False, max_step_tokens=7)
    assert Company(loaded, config).run([asked])[request.id].tokens == greedy
    assert len(set(greedy)) > 2, "a degenerate continuation proves nothing"
