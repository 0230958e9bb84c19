"""Gemma 4's audio encoder, and texts with sounds, pictures and videos, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded, picture, solo_logits
from tests.support import tiny_models
from tests.support.agreement import differ
from tests.support.parity import TOLERANCE, answered
from tests.support.pieces import MARKS, Piece, spelled
from tests.support.tiny_models import gemma4_audio_config, sound

pytestmark = pytest.mark.oracle
pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import Gemma4Config  # noqa: E402

from tests.models import oracle  # noqa: E402

TOWERS: dict[str, dict[str, Any]] = {
    "clipped": {},
    "plain": {"use_clipped_linears": False},
    "other sizes": {
        "attention_chunk_size": 12,
        "attention_context_left": 13,
        "conv_kernel_size": 3,
        "subsampling_conv_channels": [32, 16],
        "residual_weight": 0.25,
        "attention_logit_cap": 2.0,
    },
}
TEXTS: dict[str, dict[str, Any]] = {
    "E2B": tiny_models.gemma4_ple_config(pad_token_id=3),
    "31B": tiny_models.gemma4_config(use_bidirectional_attention="vision"),
}
LENGTHS = (1, 3, 4, 5, 16, 17, 63, 200)

PICTURE = picture(6, 4, 48, 6)
FRAMES = [replace(picture(4, 4, 48, 4), kind="video"), replace(picture(4, 4, 48, 4), kind="video")]
SHOWN = [
    replace(picture(rows, columns, 48, rows * columns // 4), digest=bytes([rows, columns]))
    for rows, columns in ((6, 8), (10, 4))
]
CASES: dict[str, list[Piece]] = {
    "one clip": [5, sound(40), 20],
    "several clips": [5, sound(40), 7, sound(9, 1), sound(130, 2), 20],
    "beside pictures": [3, PICTURE, 2, sound(40), PICTURE, 20],
    "beside a video": [3, FRAMES[0], 2, FRAMES[1], 4, sound(40), 20],
    "after long text": [150, sound(40), 20],
    "in a second turn": [10, sound(40), 60, sound(24, 3), 20],
    "text alone": [40],
    "a picture": [3, SHOWN[0], 20],
    "two pictures of different sizes": [3, SHOWN[0], 2, SHOWN[1], 20],
    "a picture between texts": [20, SHOWN[1], 20],
    "a picture after long text": [150, SHOWN[0], 20],
    "pictures of two turns": [9, SHOWN[0], 60, SHOWN[1], 20],
}
SLOW = [name for name in CASES if "picture" in name and name != "beside pictures"]
ANSWER = 12


@pytest.mark.parametrize("name", TOWERS)
def test_tower_and_projector_match(name: str, tmp_path: Path) -> None:
    config = gemma4_audio_config(TEXTS["E2B"], **TOWERS[name])
    reference = oracle.save_random(Gemma4Config(**config), tmp_path)
    audio = open_model(str(tmp_path)).model.encoders["audio"]
    bins = config["audio_config"]["subsampling_conv_channels"][0]
    sounds = [sound(frames * bins // tiny_models.MEL_BINS, frames) for frames in LENGTHS]
    sounds = [
        replace(each, shape=(frames, bins)) for each, frames in zip(sounds, LENGTHS, strict=True)
    ]
    theirs = oracle.reference_rows(reference, sounds)
    for item, expected in zip(sounds, theirs, strict=True):
        assert audio.rows(item.shape) == len(expected)
        (ours,) = encoded(audio, item)
        assert differ(ours, expected) < 2e-4


Opened = Callable[[str], tuple[LoadedModel, Any]]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    known: dict[str, tuple[LoadedModel, Any]] = {}

    def find(name: str) -> tuple[LoadedModel, Any]:
        if name not in known:
            folder = tmp_path_factory.mktemp("ears")
            config = Gemma4Config(**gemma4_audio_config(TEXTS[name]))
            reference = oracle.save_random(config, folder)
            known[name] = open_model(str(folder)), reference
        return known[name]

    return find


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES]
)
@pytest.mark.parametrize("name", TEXTS)
def test_logits_match(opened: Opened, name: str, case: str) -> None:
    loaded, reference = opened(name)
    tokens, placed = spelled(CASES[case])
    theirs = (
        oracle.reference_image_logits(reference, tokens, placed)
        if placed
        else oracle.reference_logits(reference, tokens)
    )
    ours = solo_logits(loaded.model, tokens, placed)
    assert differ(ours, theirs) < TOLERANCE
    assert mx.array_equal(mx.argmax(ours, axis=-1), mx.argmax(theirs, axis=-1))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", TEXTS)
def test_greedy_tokens_match(opened: Opened, name: str, case: str) -> None:
    """Seven tokens a step: what is not seen whole is cut.

    Marks of media are kept out of answers: transformers reads one without media as padding.
    """
    loaded, reference = opened(name)
    tokens, placed = spelled(CASES[case])
    given = oracle.media_inputs(tokens, placed) if placed else {}
    marks = list(MARKS.values())
    greedy = oracle.reference_greedy(reference, tokens, ANSWER, suppress_tokens=marks, **given)
    assert answered(loaded, tokens, placed, ANSWER, never=marks).tokens == greedy
    assert len(set(greedy)) > 1, "a degenerate continuation proves nothing"
