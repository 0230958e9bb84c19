"""Holds the training model and the shipped folder against transformers: the same logits."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from training.chat import MODEL_DIR
from training.configuration import FRAMES
from training.data import pictures, sounds, text, tools
from training.data.item import Item, draw
from training.masks import dense_masks
from training.model import Gemma4
from training.packing import Packer, collate, encode, kinds_of

TOLERANCE = 2e-3


def ours(folder: Path, config: dict[str, object]) -> Gemma4:
    """The training model with the folder's weights, in float32."""
    model = Gemma4(config)
    weights = load_file(str(folder / "model.safetensors"))
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.eval()


def samples() -> list[Item]:
    """Conversations of every sort: short, with tools, over the window, with pictures."""
    rng = random.Random(7)
    generators = (
        text.arithmetic,
        text.memory,
        tools.several_calls,
        pictures.where,
        pictures.compare,
        sounds.pitch,
        sounds.beeps,
    )
    return [draw(one, rng, "test") for one in generators] + [text.retrieval(rng, 40)]


@torch.no_grad()
def difference(item: Item, mine: Gemma4, theirs: Any) -> float:
    """Largest difference of any logit of the conversation."""
    encoded = encode(item)
    packer = Packer()
    packer.add(encoded)
    size = len(encoded.tokens)
    batch = collate([packer.row])
    for name in ("tokens", "positions", "documents", "pictures", "soft_tokens"):
        setattr(batch, name, getattr(batch, name)[:, :size])
    window = mine.config["text_config"]["sliding_window"]
    logits = mine.logits(mine.hidden(batch, dense_masks(batch, window), torch.float32))
    inputs: dict[str, torch.Tensor] = {
        "input_ids": batch.tokens,
        "mm_token_type_ids": kinds_of(encoded)[None],
    }
    if item.images:
        inputs["pixel_values"] = batch.patches[: len(item.images)].float() / 255
        inputs["image_position_ids"] = batch.patch_positions[: len(item.images)]
    if item.sounds:
        heard = slice(0, len(item.sounds))
        counts = batch.frame_counts[heard]
        inputs["input_features"] = batch.frames[heard].float()
        inputs["input_features_mask"] = torch.arange(FRAMES) < counts[:, None]
    return float((theirs(**inputs).logits - logits).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=MODEL_DIR)
    folder: Path = parser.parse_args().folder
    torch.set_num_threads(1)
    config = json.loads((folder / "config.json").read_text())
    mine = ours(folder, config)
    theirs: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    theirs.eval()
    worst = 0.0
    for item in samples():
        gap = difference(item, mine, theirs)
        worst = max(worst, gap)
        print(f"{item.skill:16s} largest difference of a logit {gap:.2e}")
    if not worst < TOLERANCE:
        raise SystemExit(f"not the same function: {worst}")


if __name__ == "__main__":
    main()
