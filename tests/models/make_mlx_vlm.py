"""Writes mlx_vlm.safetensors: what mlx-vlm 0.7.10 answers for families that transformers lacks.

Run it after a change of their small models, with a checkout of github.com/vikhyat/moondream, whose
own way to cut and join pictures counts: `python -m tests.models.make_mlx_vlm FOLDER` (needs mlx-vlm
and torch).
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from mlx_vlm.models import falcon_ocr, falcon_perception
from mlx_vlm.models import moondream2 as second
from mlx_vlm.models import moondream3 as third
from mlx_vlm.models.falcon_ocr.processing_falcon_ocr import preprocess_image
from mlx_vlm.models.falcon_perception import processing_falcon_perception

from quire.core.media import MediaItem, PlacedMedia
from tests.support import fused, moondream, moondream2, perception
from tests.support.photographs import SIZES, photograph
from tests.support.seeing import PATCH

ANSWERS = Path(__file__).with_name("mlx_vlm.safetensors")
LOGITS, ROWS = slice(None, None, 12), slice(None, None, 3)
"""Enough of each to see an error anywhere."""
PIXELS = slice(None, None, 499)
TOKENS = 12
Answers = dict[str, mx.array]


def greedy(logits: Callable[[list[int]], mx.array], tokens: list[int]) -> mx.array:
    """Return greedy tokens behind a prompt, everything computed anew for each."""
    answer: list[int] = []
    while len(answer) < TOKENS:
        answer.append(int(mx.argmax(logits(tokens + answer)[-1]).item()))
    return mx.array(answer)


def added(visible: np.ndarray) -> mx.array:
    """Return what is added to the logits of attention."""
    return mx.where(mx.array(visible), 0.0, -mx.inf)


def pixels(item: MediaItem, rows: int, columns: int) -> mx.array:
    """Return pixels `[squares, rows * patch, columns * patch, 3]`, from -1 to 1."""
    raw = np.frombuffer(item.features, np.uint8).reshape(-1, rows, columns, PATCH, PATCH, 3)
    whole = raw.swapaxes(2, 3).reshape(-1, rows * PATCH, columns * PATCH, 3)
    return mx.array((whole / 255 - 0.5) / 0.5, mx.float32)


def falcon(module: Any, family: Any, preprocess: Any) -> Answers:
    """Return positions, rows, logits and tokens of one of the Falcons, and pixels.

    Args:
        module: of mlx-vlm.
        family: of the small models.
    """
    config = module.ModelConfig.from_dict(dict(family.CONFIG))
    model = module.Model(config)
    weights = model.sanitize(family.published(family.weights()))
    model.load_weights(list(weights.items()))
    language = model.language_model
    # Falcon-OCR's counts positions for both.
    count = falcon_ocr.LanguageModel.get_rope_index
    around = list(range(fused.FIRST, fused.FIRST + fused.AROUND))

    def rows(item: MediaItem) -> mx.array:
        return model._patchify_and_project(pixels(item, *item.shape))

    def placed(ids: list[int], media: list[PlacedMedia]) -> Any:
        return count(language, mx.array(ids), [each.item.shape for each in media])

    def logits(ids: list[int], media: list[PlacedMedia]) -> mx.array:
        given = mx.array(ids)
        x = language.model.embed_tokens(given[None])
        more: dict[str, Any] = {"mask": added(np.tri(len(ids), dtype=bool))}
        if media:
            found = mx.concatenate([rows(each.item) for each in media])
            x = model._merge_image_features(config.img_id, found, x, given[None])
            moments, places, _, mask = placed(ids, media)
            more = {"position_ids": moments, "pos_hw": places, "mask": mask}
        return language.lm_head(language.model(given[None], inputs_embeds=x, **more))[0]

    answers: Answers = {}
    for case, (tokens, media) in family.PROMPTS.items():
        ids = list(tokens)
        for number, each in enumerate(media):
            ids[each.start : each.start + fused.AROUND] = around
            marks = language.model.embed_tokens(mx.array(around))
            answers[f"{case}.rows{number}"] = mx.concatenate([marks, rows(each.item)])[ROWS]
        if media:
            moments, places, *_ = placed(ids, media)
            parts = [moments[:, None].astype(mx.float32), places[0]]
            answers[f"{case}.positions"] = mx.concatenate(parts, axis=1)
        answers[f"{case}.logits"] = logits(ids, media)[LOGITS]
        answers[f"{case}.tokens"] = greedy(lambda ids, media=media: logits(ids, media), ids)
    for size, shape in SIZES.items():
        found, *grid = preprocess(photograph(shape))
        answers[f"{size}.grid"] = mx.array(grid)
        answers[f"{size}.pixels"] = mx.array(found.flatten()[PIXELS])
    return {f"{family.CONFIG['model_type']}.{key}": array for key, array in answers.items()}


def moon(module: Any, family: Any, publisher: dict[str, Any]) -> Answers:
    """Return rows, logits and tokens of one of the Moondreams.

    Args:
        module: of mlx-vlm.
        family: of the small models.
        publisher: names of its own module `image_crops`.
    """
    config = module.ModelConfig(
        text_config=dict(family.CONVERTED["text_config"]),
        vision_config=dict(family.CONVERTED["vision_config"]),
    )
    model = module.Model(config)
    weights = model.sanitize(family.published(family.weights()))
    model.load_weights(list(weights.items()))
    table = model.text.model.get("wte") or model.text.model.embed_tokens
    side, margin = moondream.SIDE, moondream.MARGIN

    def rows(item: MediaItem) -> mx.array:
        whole, *squares = model.vision.encoder(pixels(item, side, side))
        local = torch.from_numpy(np.stack(squares)).reshape(len(squares), side, side, -1)
        joined = publisher["reconstruct_from_crops"](local, item.shape, margin, patch_size=1)
        pooled = torch.nn.functional.adaptive_avg_pool2d(joined.permute(2, 0, 1), (side, side))
        parts = mx.array(pooled.flatten(1).T.numpy())
        made = model.vision.proj_mlp(mx.concatenate([whole, parts], axis=-1))
        first = table(mx.array([moondream.FIRST]))
        return mx.concatenate([first, made])

    def logits(ids: list[int], media: list[PlacedMedia]) -> mx.array:
        given = mx.array(ids)[None]
        (x,) = table(given)
        visible = np.tri(len(ids), dtype=bool)
        for each in media:
            x = mx.concatenate([x[: each.start], rows(each.item), x[each.end :]])
            visible[each.start : each.end, each.start : each.end] = True
        return model.text(given, inputs_embeds=x[None], mask=added(visible)).logits[0]

    answers: Answers = {}
    for case, (tokens, media) in family.PROMPTS.items():
        key = f"{family.CONFIG['model_type']}.{case}"
        for number, each in enumerate(media):
            answers[f"{key}.rows{number}"] = rows(each.item)[ROWS]
        answers[f"{key}.logits"] = logits(tokens, media)[LOGITS]
        answers[f"{key}.tokens"] = greedy(lambda ids, media=media: logits(ids, media), tokens)
    return answers


def cut_pictures(publisher: dict[str, Any]) -> Answers:
    """Return the pixels of pictures that Moondream's publisher cuts."""
    answers: Answers = {}
    for size, shape in SIZES.items():
        cut = publisher["overlap_crop_image"](np.array(photograph(shape)), 4, 12)
        answers[f"moondream3.{size}.grid"] = mx.array(cut["tiling"])
        scaled = (cut["crops"].flatten()[PIXELS] / 255 - 0.5) / 0.5
        answers[f"moondream3.{size}.pixels"] = mx.array(scaled, mx.float32)
    return answers


if __name__ == "__main__":
    module = Path(sys.argv[1]) / "moondream" / "torch" / "image_crops.py"
    seen = processing_falcon_perception.preprocess_image
    answers = falcon(falcon_ocr, fused, preprocess_image)
    answers |= falcon(falcon_perception, perception, seen)
    publisher = runpy.run_path(str(module))
    answers |= moon(second, moondream2, publisher) | moon(third, moondream, publisher)
    mx.save_safetensors(str(ANSWERS), answers | cut_pictures(publisher))
