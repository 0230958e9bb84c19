"""Items to tokens, tokens to packed rows, rows to batches: what the worker processes do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from PIL.Image import Image
from tokenizers import Tokenizer
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

from training.chat import MODEL_DIR, answer_of, prompt_of
from training.configuration import FRAMES, MEL_BINS, PATCH, POOLING, SOFT_TOKENS
from training.data.item import Item
from training.data.sounds import RATE, Samples
from training.model import Batch

PATCHES = SOFT_TOKENS * POOLING**2
ROW = 4608
"""Tokens of a row: a retrieval over 4,096 tokens and its question fit."""
PICTURES_PER_ROW = 28
SOUNDS_PER_ROW = 6
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
    sounds: list[int]
    """Per token the sound that it stands for, or -1."""
    frames: list[npt.NDArray[np.float16]]
    """The spectrogram of each sound, `[frames, bins]`."""


def soft_token_count(image: Image) -> int:
    """Soft tokens of a picture that needs no resizing."""
    side = PATCH * POOLING
    return (image.width // side) * (image.height // side)


def encode(item: Item) -> Encoded:
    """Tokens of an item, each placeholder spread to as many as its medium has soft tokens."""
    tok = tokenizer()
    prompt = tok.encode(prompt_of(item), add_special_tokens=False).ids
    answer = tok.encode(answer_of(item), add_special_tokens=False).ids
    frames = [frames_of(sound) for sound in item.sounds]
    counts = {
        "image": [soft_token_count(image) for image in item.images],
        "audio": [-(-len(one) // 4) for one in frames],
    }
    tokens: list[int] = []
    owners: dict[str, list[int]] = {kind: [] for kind in counts}
    vocabulary = _control_tokens()
    kind_of = {vocabulary[f"<|{kind}|>"]: kind for kind in counts}
    seen = dict.fromkeys(counts, 0)
    for token in [*prompt, *answer]:
        spread, owner, kind = [token], [-1], kind_of.get(token)
        if kind is not None:
            count = counts[kind][seen[kind]]
            spread = [vocabulary[f"<|{kind}>"], *[token] * count, vocabulary[f"<{kind}|>"]]
            owner = [-1, *[seen[kind]] * count, -1]
            seen[kind] += 1
        tokens += spread
        for name, values in owners.items():
            values += owner if name == kind else [-1] * len(spread)
    answer_from = len(tokens) - len(answer)
    return Encoded(tokens, answer_from, owners["image"], item.images, owners["audio"], frames)


@cache
def _extractor() -> Gemma4AudioFeatureExtractor:
    return Gemma4AudioFeatureExtractor(feature_size=MEL_BINS, sampling_rate=RATE)


def frames_of(sound: Samples) -> npt.NDArray[np.float16]:
    """The log mel frames that lie within a sound, `[frames, bins]`."""
    made = _extractor()([sound], return_tensors="np")
    frames = made["input_features"][0][made["input_features_mask"][0]]
    return np.asarray(frames, dtype=np.float16)


def kinds_of(item: Encoded) -> torch.Tensor:
    """What transformers calls a token's modality: 0 text, 1 picture, 3 sound."""
    pictures, sounds = torch.tensor(item.pictures), torch.tensor(item.sounds)
    return (pictures >= 0).long() + 3 * (sounds >= 0).long()


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
    heard: np.ndarray
    frames: np.ndarray
    frame_counts: np.ndarray
    answer_at: np.ndarray
    answer: np.ndarray


def empty_row(length: int = ROW) -> Row:
    """A row of padding. Its media have one patch or frame each, so that no attention is empty."""
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
        heard=np.full(length, -1, dtype=np.int32),
        frames=np.zeros((SOUNDS_PER_ROW, FRAMES, MEL_BINS), dtype=np.float16),
        frame_counts=np.ones(SOUNDS_PER_ROW, dtype=np.int32),
        answer_at=np.zeros(ANSWERS_PER_ROW, dtype=np.int32),
        answer=np.full(ANSWERS_PER_ROW, -100, dtype=np.int32),
    )


class Packer:
    """Fills a row with conversations until the next one does not fit."""

    def __init__(self) -> None:
        self.row = empty_row()
        self.used = self.count = self.images = self.sounds = self.answers = 0

    def fits(self, item: Encoded) -> bool:
        answers = len(item.tokens) - item.answer_from
        return (
            self.used + len(item.tokens) <= ROW
            and self.images + len(item.images) <= PICTURES_PER_ROW
            and self.sounds + len(item.frames) <= SOUNDS_PER_ROW
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
        sounds = np.asarray(item.sounds, dtype=np.int32)
        for index, frames in enumerate(item.frames):
            slot = self.sounds + index
            row.frames[slot, : len(frames)] = frames
            row.frame_counts[slot] = len(frames)
            at = self.used + np.flatnonzero(sounds == index)
            row.heard[at] = slot * FRAMES // 4 + np.arange(len(at))
        answers = size - item.answer_from
        learnt = slice(self.answers, self.answers + answers)
        row.answer_at[learnt] = self.used + np.arange(item.answer_from, size) - 1
        row.answer[learnt] = item.tokens[item.answer_from :]
        self.used += size
        self.count += 1
        self.images += len(item.images)
        self.sounds += len(item.frames)
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
        heard = row.heard >= 0
        before = len(chunk) * PICTURES_PER_ROW * SOFT_TOKENS + index * SOUNDS_PER_ROW * FRAMES // 4
        row.soft_tokens[heard] = row.heard[heard] + before
        row.answer_at += index * len(row.tokens)
    stacked = {
        name: torch.from_numpy(np.stack([getattr(row, name) for row in chunk]))
        for name in Row.__dataclass_fields__
        if name != "heard"
    }
    for name in ("patches", "patch_positions", "frames", "frame_counts", "answer_at", "answer"):
        stacked[name] = stacked[name].flatten(0, 1)
    for name in ("tokens", "soft_tokens", "answer_at", "answer"):
        stacked[name] = stacked[name].long()
    stacked["patch_positions"] = stacked["patch_positions"].long()
    return Batch(**stacked)
