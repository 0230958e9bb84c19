"""Greedy accuracy of a model folder on the held-out items, skill by skill, through transformers.

python -m training.evaluate --folder src/quire/demo/model [--skills arithmetic facts] [--show 3]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from quire.demo.skills import SkillItem, judge
from training.chat import MODEL_DIR, answer_of, parse
from training.data.item import Item
from training.packing import encode, kinds_of, patches_of, tokenizer
from training.testsets import MEDIA_SKILLS, TEXT_SKILLS, expected, held_out

TOKENS_PER_BATCH = 160_000


def batches(items: list[Item]) -> list[list[Item]]:
    """Items grouped so that a batch, padded, holds a bounded number of tokens."""
    longest = max(encode(item).answer_from for item in items)
    size = max(1, TOKENS_PER_BATCH // longest)
    return [items[start : start + size] for start in range(0, len(items), size)]


def inputs_of(items: list[Item], device: torch.device) -> dict[str, torch.Tensor]:
    """Left-padded prompts, and the pictures' patches if there are any."""
    encoded = [encode(item) for item in items]
    width = max(one.answer_from for one in encoded)
    ids = torch.zeros(len(items), width, dtype=torch.long)
    mask, kinds = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, one in enumerate(encoded):
        size = one.answer_from
        ids[row, width - size :] = torch.tensor(one.tokens[:size])
        mask[row, width - size :] = 1
        kinds[row, width - size :] = kinds_of(one)[:size]
    inputs = {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": kinds}
    images = [patches_of(image) for one in encoded for image in one.images]
    if images:
        inputs["pixel_values"] = torch.stack([torch.from_numpy(p) for p, _ in images]).float() / 255
        inputs["image_position_ids"] = torch.stack([torch.from_numpy(p) for _, p in images]).long()
    frames = [one_sound for one in encoded for one_sound in one.frames]
    if frames:
        longest = max(map(len, frames))
        padded = np.zeros((len(frames), longest, frames[0].shape[1]), np.float32)
        known = torch.zeros(len(frames), longest, dtype=torch.bool)
        for index, sound in enumerate(frames):
            padded[index, : len(sound)] = sound
            known[index, : len(sound)] = True
        inputs |= {"input_features": torch.from_numpy(padded), "input_features_mask": known}
    return {name: value.to(device) for name, value in inputs.items()}


@torch.no_grad()
def answers(model: Any, items: list[Item], device: torch.device) -> list[str]:
    """Greedy answers as raw text, end tokens included."""
    written: list[str] = []
    for batch in batches(items):
        inputs = inputs_of(batch, device)
        room = max(len(encode(item).tokens) - encode(item).answer_from for item in batch) + 16
        out = model.generate(**inputs, max_new_tokens=room, do_sample=False)
        for row in out[:, inputs["input_ids"].shape[1] :].tolist():
            ids = [token for token in row if token != 0]
            written.append(tokenizer().decode(ids, skip_special_tokens=False))
    return written


def evaluate(model: Any, skill: str, device: torch.device, show: int) -> float:
    """Accuracy of one skill; prints up to `show` of the wrong answers."""
    items = list(held_out(skill))
    right = 0
    for item, text in zip(items, answers(model, items, device), strict=True):
        if judge(SkillItem(skill, [], expected(item), item.match), parse(text)):
            right += 1
        elif show > 0:
            show -= 1
            asked = str(item.messages[-1]["content"])[-160:]
            print(f"  {skill}: {asked!r}\n    wanted {answer_of(item)!r}\n    got    {text!r}")
    return right / len(items)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=MODEL_DIR)
    parser.add_argument("--skills", nargs="*", default=[*TEXT_SKILLS, *MEDIA_SKILLS])
    parser.add_argument("--show", type=int, default=0)
    parser.add_argument("--out", type=Path, help="also write the table as JSON")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = AutoModelForImageTextToText.from_pretrained(options.folder, dtype=torch.float32)
    model = model.to(device).eval()
    table: dict[str, float] = {}
    for skill in options.skills:
        start = time.monotonic()
        table[skill] = evaluate(model, skill, device, options.show)
        print(f"{skill:16s} {table[skill]:7.1%}  {time.monotonic() - start:5.1f} s", flush=True)
    if options.out:
        options.out.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
