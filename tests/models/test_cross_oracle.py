"""Llama 3.2 Vision against transformers: what is looked at, logits and greedy tokens."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.media import CLIP_COLOURS, MediaItem, PlacedMedia
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded
from tests.support.agreement import differ
from tests.support.crossing import CONFIG, PATCH, PROMPTS, SIDE, picture
from tests.support.parity import TOLERANCE, answered

pytestmark = pytest.mark.oracle
torch = pytest.importorskip("torch", reason="the oracle needs torch")
pytest.importorskip("transformers", reason="the oracle is transformers")

from transformers import AutoConfig  # noqa: E402

from tests.models import oracle  # noqa: E402

ANSWER = 12
TILES = 4
Both = tuple[Any, LoadedModel]


NARROW = [pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "float16")]


@pytest.fixture(scope="module", params=["float32", *NARROW])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Open a checkpoint of some type in both libraries, which compute in float32."""
    folder = Path(tmp_path_factory.mktemp("mllama"))
    config = AutoConfig.for_model(**deepcopy(CONFIG))
    reference = oracle.save_random(config, folder, dtype=getattr(torch, request.param))
    return reference, open_model(str(folder))


def given(items: list[MediaItem]) -> dict[str, Any]:
    """Return pictures as transformers' processor gives them."""
    shapes = CONFIG["vision_config"]["supported_aspect_ratios"]
    pixels = np.zeros((1, len(items), TILES, 3, PATCH * SIDE, PATCH * SIDE), np.float32)
    mask = np.zeros((1, len(items), TILES), np.int64)
    for number, item in enumerate(items):
        count = item.shape[0] * item.shape[1]
        raw = np.frombuffer(item.features, np.uint8)
        tiles = raw.reshape(count, SIDE, SIDE, PATCH, PATCH, 3).transpose(0, 5, 1, 3, 2, 4)
        scaled = tiles.reshape(count, 3, PATCH * SIDE, PATCH * SIDE).transpose(0, 2, 3, 1) / 255
        scaled = (scaled - np.array(CLIP_COLOURS.mean)) / np.array(CLIP_COLOURS.std)
        pixels[0, number, :count] = scaled.transpose(0, 3, 1, 2)
        mask[0, number, :count] = 1
    return {
        "pixel_values": torch.from_numpy(pixels),
        "aspect_ratio_ids": torch.tensor([[shapes.index(list(i.shape)) + 1 for i in items]]),
        "aspect_ratio_mask": torch.from_numpy(mask),
    }


def seen(tokens: list[int], media: list[PlacedMedia]) -> Any:
    """Return which tokens see which tiles, as transformers has it:
    `[1, tokens, pictures, tiles]`.
    """
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    (mark,) = {tokens[each.start] for each in media}
    mask = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(tokens, mark)],
        num_tiles=[[each.item.shape[0] * each.item.shape[1] for each in media]],
        max_num_tiles=TILES,
        length=len(tokens),
    )
    return torch.from_numpy(mask)


def blind_before(reference: Any, first: int) -> list[Any]:
    """Let tokens before the first picture look at none, as in Meta's own code (and vLLM's).

    In transformers they look at all of them, at those behind them too.
    """
    hooks = []
    for layer in reference.model.language_model.layers:
        if not hasattr(layer, "cross_attn"):
            continue

        def blind(module: Any, args: Any, result: Any) -> Any:
            out, weights = result
            if out.shape[1] > 1:
                out = out.clone()
                out[:, :first] = 0
            return out, weights

        hooks.append(layer.cross_attn.register_forward_hook(blind))
    return hooks


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (1, 3), (4, 1)])
def test_what_is_looked_at_matches(opened: Both, shape: tuple[int, int]) -> None:
    reference, loaded = opened
    item = picture(1, *shape)
    with torch.no_grad():
        states = reference.model.vision_model(**given([item])).last_hidden_state
        states = reference.model.multi_modal_projector(states)[0, 0, : shape[0] * shape[1]]
    (ours,) = encoded(loaded.model.encoders["image"], item)
    theirs = states.flatten(0, 1)
    assert ours.shape == theirs.shape == (loaded.model.encoders["image"].cross_keys(shape), 64)
    assert differ(ours, theirs) < 2e-4


@pytest.mark.parametrize("case", PROMPTS)
def test_logits_and_tokens_match(opened: Both, case: str) -> None:
    reference, loaded = opened
    tokens, media = PROMPTS[case]
    ids = torch.tensor([tokens])
    pictures = given([each.item for each in media]) if media else {}
    if media:
        pictures["cross_attention_mask"] = seen(tokens, media)
    hooks = blind_before(reference, media[0].start) if media else []
    try:
        with torch.no_grad():
            logits = reference(ids, **pictures).logits[0]
            greedy = oracle.reference_greedy(reference, tokens, ANSWER, **pictures)
    finally:
        for hook in hooks:
            hook.remove()
    # Seven tokens a step, and all at once.
    for step in (7, 2048):
        got = answered(loaded, tokens, media, ANSWER, step)
        assert got.tokens == greedy
        assert differ(got.logits[len(tokens)], logits[-1]) < TOLERANCE
    assert len(set(greedy)) > 2, "a degenerate continuation proves nothing"
