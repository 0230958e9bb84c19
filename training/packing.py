"""Items to tokens, tokens to packed rows, rows to batches: what the worker processes do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from PIL.Image import Image
from tokenizers import Tokenizer

from training.chat import MODEL_DIR, answer_of, prompt_of
from training.configuration import PATCH, POOLING, SOFT_TOKENS
from training.data.item import Item
from training.model import Batch

PATCHES = SOFT_TOKENS * POOLING**2
ROW = 4608
"""Tokens of a row: a retrieval over 4,096 tokens and its question fit."""
PICTURES_PER_ROW = 12
ANSWERS_PER_ROW = 1536


@cache
def tokenizer() -> Tokenizer:
    """The shipped tokenizer."""
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@cache
def _control_tokens() -> dict[str, int]:
    return tokenizer().get_vocab()


@dataclass
class Encoded:
    """A conversation in tokens: the prompt, then the answer that is learnt."""

    tokens: list[int]
    answer_from: int
    pictures: list[int]
    """Per token the picture that it stands for, or -1."""
    images: list[Image]


def soft_token_count(image: Image) -> int:
    """Soft tokens of a picture that needs no resizing."""
    side = PATCH * POOLING
    return (image.width // side) * (image.height // side)


def encode(item: Item) -> Encoded:
    """Tokens of an item, each picture's placeholder spread to as many as it has soft tokens."""
    tok = tokenizer()
    prompt = tok.encode(prompt_of(item), add_special_tokens=False).ids
    answer = tok.encode(answer_of(item), add_special_tokens=False).ids
    if not item.images:
        return Encoded(prompt + answer, len(prompt), [-1] * (len(prompt) + len(answer)), [])
    vocabulary = _control_tokens()
    begin, mark, end = (vocabulary[t] for t in ("<|image>", "<|image|>", "<image|>"))
    tokens: list[int] = []
    pictures: list[int] = []
    seen = 0
    for token in prompt:
        if token != mark:
            tokens.append(token)
            pictures.append(-1)
            continue
        count = soft_token_count(item.images[seen])
        tokens += [begin, *[mark] * count, end]
        pictures += [-1, *[seen] * count, -1]
        seen += 1
    return Encoded(tokens + answer, len(tokens), pictures + [-1] * len(answer), item.images)


def patches_of(image: Image) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and positions of a picture's patches, padded: `[P, pixels]` bytes and `[P, 2]`."""
    pixels = np.asarray(image, dtype=np.uint8)
    rows, columns = image.height // PATCH, image.width // PATCH
    grid = pixels.reshape(rows, PATCH, columns, PATCH, 3).transpose(0, 2, 1, 3, 4)
    patches = np.zeros((PATCHES, 3 * PATCH**2), dtype=np.uint8)
    patches[: rows * columns] = grid.reshape(rows * columns, -1)
    positions = np.full((PATCHES, 2), -1, dtype=np.int32)
    x, y = np.meshgrid(np.arange(columns), np.arange(rows), indexing="xy")
    positions[: rows * columns] = np.stack([x, y], axis=-1).reshape(-1, 2)
    return patches, positions


@dataclass
class Row:
    """One packed row as arrays, ready to be stacked."""

    tokens: np.ndarray
    positions: np.ndarray
    documents: np.ndarray
    pictures: np.ndarray
    soft_tokens: np.ndarray
    patches: np.ndarray
    patch_positions: np.ndarray
    answer_at: np.ndarray
    answer: np.ndarray


def empty_row(length: int = ROW) -> Row:
    """A row of padding. Its pictures have one real patch each, so that no attention is empty."""
    patch_positions = np.full((PICTURES_PER_ROW, PATCHES, 2), -1, dtype=np.int32)
    patch_positions[:, 0] = 0
    return Row(
        tokens=np.zeros(length, dtype=np.int32),
        positions=np.zeros(length, dtype=np.int32),
        documents=np.full(length, -1, dtype=np.int32),
        pictures=np.full(length, -1, dtype=np.int32),
        soft_tokens=np.full(length, -1, dtype=np.int32),
        patches=np.zeros((PICTURES_PER_ROW, PATCHES, 3 * PATCH**2), dtype=np.uint8),
        patch_positions=patch_positions,
        answer_at=np.zeros(ANSWERS_PER_ROW, dtype=np.int32),
        answer=np.full(ANSWERS_PER_ROW, -100, dtype=np.int32),
    )


class Packer:
    """Fills a row with conversations until the next one does not fit."""

    def __init__(self) -> None:
        self.row = empty_row()
        self.used = self.count = self.images = self.answers = 0

    def fits(self, item: Encoded) -> bool:
        answers = len(item.tokens) - item.answer_from
        return (
            self.used + len(item.tokens) <= ROW
            and self.images + len(item.images) <= PICTURES_PER_ROW
            and self.answers + answers <= ANSWERS_PER_ROW
        )

    def add(self, item: Encoded) -> None:
        row, size = self.row, len(item.tokens)
        span = slice(self.used, self.used + size)
        row.tokens[span] = item.tokens
        row.positions[span] = np.arange(size)
        row.documents[span] = self.count
        pictures = np.asarray(item.pictures, dtype=np.int32)
        row.pictures[span] = np.where(pictures >= 0, pictures + self.images, -1)
        for index, image in enumerate(item.images):
            slot = self.images + index
            row.patches[slot], row.patch_positions[slot] = patches_of(image)
            at = self.used + np.flatnonzero(pictures == index)
            row.soft_tokens[at] = slot * SOFT_TOKENS + np.arange(len(at))
        answers = size - item.answer_from
        learnt = slice(self.answers, self.answers + answers)
        row.answer_at[learnt] = self.used + np.arange(item.answer_from, size) - 1
        row.answer[learnt] = item.tokens[item.answer_from :]
        self.used += size
        self.count += 1
        self.images += len(item.images)
        self.answers += answers


def rows(items: Iterator[Item], rng: random.Random) -> Iterator[Row]:
    """Packed rows. What does not fit waits for the next row; what fits no row is dropped."""
    packer = Packer()
    waiting: list[Encoded] = []
    for item in items:
        encoded = encode(item)
        if len(encoded.tokens) > ROW:
            continue
        if packer.fits(encoded):
            packer.add(encoded)
            continue
        waiting.append(encoded)
        if len(waiting) < 4 and packer.used < ROW - 200:
            continue
        yield packer.row
        packer = Packer()
        rng.shuffle(waiting)
        kept: list[Encoded] = []
        for one in waiting:
            if packer.fits(one):
                packer.add(one)
            else:
                kept.append(one)
        waiting = kept


def collate(chunk: list[Row]) -> Batch:
    """Stack rows; indices become those of the whole batch."""
    for index, row in enumerate(chunk):
        shift = index * PICTURES_PER_ROW * SOFT_TOKENS
        row.soft_tokens[row.soft_tokens >= 0] += shift
        row.answer_at += index * len(row.tokens)
    stacked = {
        name: torch.from_numpy(np.stack([getattr(row, name) for row in chunk]))
        for name in Row.__dataclass_fields__
    }
    for name in ("patches", "patch_positions", "answer_at", "answer"):
        stacked[name] = stacked[name].flatten(0, 1)
    for name in ("tokens", "soft_tokens", "answer_at", "answer"):
        stacked[name] = stacked[name].long()
    stacked["patch_positions"] = stacked["patch_positions"].long()
    return Batch(**stacked)
