"""Gemma 4 12B against transformers: rows of media, logits and greedy tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.media import MediaItem, PlacedMedia
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded, picture, solo_logits
from tests.support.agreement import differ
from tests.support.everyday import everyday
from tests.support.parity import TOLERANCE, answered
from tests.support.pieces import MARKS, Piece, spelled
from tests.support.tiny_models import WINDOW
from tests.support.unified import unified_config, wave

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import Gemma4UnifiedConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

CONFIGS: dict[str, dict[str, Any]] = {
    "seen whole": unified_config(),
    "read like text": unified_config(use_bidirectional_attention=None),
}
ANSWER = 12
Both = tuple[Any, LoadedModel]


def shown(rows: int, columns: int, seed: int, kind: str = "image") -> MediaItem:
    item = picture(rows, columns, 48, rows * columns // 4)
    return replace(item, kind=kind, digest=bytes([rows, columns, seed]))


CASES: dict[str, list[Piece]] = {
    "text alone": [40],
    "a picture": [3, shown(6, 8, 0), 20],
    "a picture larger than the window": [5, shown(12, 16, 0), 20],
    "two pictures after long text": [150, shown(6, 8, 0), 2, shown(12, 16, 1), 20],
    "a video": [3, shown(4, 4, 0, "video"), 2, shown(4, 4, 1, "video"), 20],
    "a sound": [5, wave(40), 20],
    "all of them": [4, wave(9), 3, shown(6, 8, 0), 9, shown(4, 4, 0, "video"), 2, wave(50, 1), 20],
}


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    known: dict[str, Both] = {}

    def find(name: str) -> Both:
        if name not in known:
            folder = Path(tmp_path_factory.mktemp("unified"))
            reference = oracle.save_random(Gemma4UnifiedConfig(**deepcopy(CONFIGS[name])), folder)
            known[name] = reference, open_model(str(folder))
        return known[name]

    return find


def inputs(items: Sequence[MediaItem]) -> dict[str, Any]:
    """Return media as their processors give them."""
    pictures, frames, sounds = ([each for each in items if each.kind == kind] for kind in MARKS)
    given: dict[str, Any] = {}
    if pictures:
        given["pixel_values"], given["image_position_ids"] = squares(pictures)
    if frames:
        given["pixel_values_videos"], given["video_position_ids"] = squares(frames)
        given["num_frames_per_video"] = torch.tensor([len(frames)])
    if sounds:
        padded = oracle.media_inputs([], [PlacedMedia(0, each) for each in sounds])
        given |= {name: padded[name] for name in ("input_features", "input_features_mask")}
    return given


def squares(items: Sequence[MediaItem]) -> tuple[Any, Any]:
    """Return squares of 8 by 8 pixels, colours 0 to 1, and (x, y) of each, -1 for padding."""
    most = max(item.tokens for item in items)
    pixels, places = torch.zeros(len(items), most, 192), torch.full((len(items), most, 2), -1)
    for number, item in enumerate(items):
        rows, columns = item.shape
        patches = np.frombuffer(item.features, np.uint8).reshape(rows, columns, 4, 4, 3)
        image = np.concatenate(np.concatenate(patches, axis=1), axis=1)  # [y, x, colour]
        for index in range(item.tokens):
            y, x = divmod(index, columns // 2)
            square = image[8 * y : 8 * y + 8, 8 * x : 8 * x + 8].flatten() / 255
            pixels[number, index] = torch.from_numpy(square.astype(np.float32))
            places[number, index] = torch.tensor([x, y])
    return pixels, places


@pytest.mark.parametrize(
    "item",
    [shown(2, 2, 0), shown(24, 2, 0), shown(6, 16, 0), shown(8, 4, 0, "video"), wave(1), wave(60)],
    ids=lambda item: f"{item.kind} {item.shape}",
)
def test_rows_match(opened: Callable[[str], Both], item: MediaItem) -> None:
    reference, loaded = opened("seen whole")
    with torch.no_grad():
        theirs = getattr(reference.model, f"get_{item.kind}_features")(**inputs([item]))
    (ours,) = encoded(loaded.model.encoders[item.kind], item)
    assert differ(ours, theirs.pooler_output[0]) < 1e-4


@pytest.mark.parametrize(
    ("name", "case"),
    everyday(
        product(CONFIGS, CASES),
        lambda name, case: name == "seen whole" or case in ("a picture", "all of them"),
    ),
)
def test_logits_and_greedy_tokens_match(
    opened: Callable[[str], Both], name: str, case: str
) -> None:
    """The reference uses the mask that transformers has for static caches; see
    `models.gemma4_unified`.
    """
    reference, loaded = opened(name)
    tokens, placed = spelled(CASES[case])
    if case == "a picture larger than the window":
        assert placed[0].item.tokens > WINDOW
    kinds = torch.zeros(1, len(tokens), dtype=torch.long)
    for each in placed:
        kinds[0, each.start : each.end] = 1 + list(MARKS).index(each.item.kind)
    given = inputs([each.item for each in placed])
    mask = reference.create_masks_for_generate(
        config=reference.config,
        inputs_embeds=torch.zeros(1, len(tokens), 0),
        attention_mask=None,
        past_key_values=None,
        position_ids=torch.arange(len(tokens))[None],
        mm_token_type_ids=kinds,
    )
    with torch.no_grad():
        logits = reference(torch.tensor([tokens]), attention_mask=mask, **given).logits[0]
    assert differ(solo_logits(loaded.model, tokens, placed), logits) < TOLERANCE

    marks = list(MARKS.values())  # transformers reads one without media as padding
    greedy = oracle.reference_greedy(
        reference,
        tokens,
        ANSWER,
        suppress_tokens=marks,
        cache_implementation="static",
        mm_token_type_ids=kinds,
        **given,
    )
    # Seven tokens a step: what is not seen whole is cut.
    assert answered(loaded, tokens, placed, ANSWER, never=marks).tokens == greedy
    assert len(set(greedy)) > 1, "a degenerate continuation proves nothing"
