"""Writes mlx_vlm.safetensors: what mlx-vlm 0.7.10 answers for families that transformers lacks.

Run it after a change of their small models: `python -m tests.models.make_mlx_vlm` (needs mlx-vlm).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_vlm.models import falcon_ocr
from mlx_vlm.models.falcon_ocr.processing_falcon_ocr import preprocess_image

from quire.core.media import MediaItem, PlacedMedia
from tests.support import fused
from tests.support.seeing import PATCH

ANSWERS = Path(__file__).with_name("mlx_vlm.safetensors")
ROWS = slice(None, None, 6)
"""Of the logits; enough to see an error anywhere."""
TOKENS = 12
PIXELS = slice(None, None, 499)
Answers = dict[str, mx.array]


def greedy(logits: Callable[[list[int]], mx.array], tokens: list[int]) -> mx.array:
    """Greedy tokens behind a prompt, everything computed anew for each."""
    answer: list[int] = []
    while len(answer) < TOKENS:
        answer.append(int(mx.argmax(logits(tokens + answer)[-1]).item()))
    return mx.array(answer)


def causal(length: int) -> mx.array:
    """Added to the logits of attention."""
    return mx.where(mx.tri(length, dtype=mx.bool_), 0.0, -mx.inf)


def falcon() -> Answers:
    """Positions, rows, logits and tokens of Falcon-OCR, and pixels."""
    config = falcon_ocr.ModelConfig.from_dict(dict(fused.CONFIG))
    model = falcon_ocr.Model(config)
    weights = model.sanitize(fused.published(fused.weights()))
    model.load_weights(list(weights.items()))
    language = model.language_model

    def rows(each: MediaItem) -> mx.array:
        lines, columns = each.shape
        raw = np.frombuffer(each.features, np.uint8).reshape(lines, columns, PATCH, PATCH, 3)
        whole = raw.swapaxes(1, 2).reshape(lines * PATCH, columns * PATCH, 3)
        return model._patchify_and_project(mx.array((whole / 255 - 0.5) / 0.5, mx.float32))

    answers: Answers = {}
    for case, (tokens, media) in fused.PROMPTS.items():
        marked = list(tokens)
        for each in media:
            marked[each.start : each.start + fused.AROUND] = range(
                fused.FIRST, fused.FIRST + fused.AROUND
            )

        def logits(ids: list[int], media: list[PlacedMedia] = media) -> mx.array:
            given = mx.array(ids)
            x = language.model.embed_tokens(given[None])
            more = {"mask": causal(len(ids))}
            if media:
                found = mx.concatenate([rows(each.item) for each in media])
                x = model._merge_image_features(config.img_id, found, x, given[None])
                shapes = [each.item.shape for each in media]
                moments, places, _, mask = language.get_rope_index(given, shapes)
                more = {
                    "position_ids": moments[None],
                    "pos_hw": places,
                    "attention_mask_4d": mask,
                }
            return language(given[None], inputs_embeds=x, **more).logits[0]

        if media:
            shapes = [each.item.shape for each in media]
            moments, places, *_ = language.get_rope_index(mx.array(marked), shapes)
            answers[f"falcon_ocr.{case}.positions"] = mx.concatenate(
                [moments[:, None].astype(mx.float32), places[0]], axis=1
            )
        answers[f"falcon_ocr.{case}.logits"] = logits(marked)[ROWS]
        answers[f"falcon_ocr.{case}.tokens"] = greedy(logits, marked)
    for name, size in fused.SIZES.items():
        pixels, *grid = preprocess_image(fused.photograph(size))
        answers[f"falcon_ocr.{name}.grid"] = mx.array(grid)
        answers[f"falcon_ocr.{name}.pixels"] = mx.array(pixels.flatten()[PIXELS])
    return answers


if __name__ == "__main__":
    mx.save_safetensors(str(ANSWERS), falcon())
