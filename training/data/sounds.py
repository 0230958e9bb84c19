"""Spoken numbers and tones, and questions about them."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training.data import pictures
from training.data.item import Item, assistant, user

RATE = 16_000
"""Samples a second."""
LONGEST = 3.4
"""Seconds of the longest sound."""
BANK = Path(__file__).with_name("voices.npz")
"""What `training.voices` writes: by "digit:voice:take" the samples in 16 bits."""
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PITCHES = {"low": (140.0, 260.0), "middle": (520.0, 900.0), "high": (1800.0, 3200.0)}
"""Frequencies in Hz that each name stands for."""

Samples = npt.NDArray[np.float32]


@cache
def _bank() -> dict[int, dict[str, list[npt.NDArray[np.int16]]]]:
    """By digit and voice the recordings."""
    takes: dict[int, dict[str, list[npt.NDArray[np.int16]]]] = {}
    with np.load(BANK) as file:
        for name in file.files:
            digit, voice, _ = name.split(":")
            takes.setdefault(int(digit), {}).setdefault(voice, []).append(file[name])
    return takes


def _silence(rng: random.Random, low: float, high: float) -> Samples:
    return np.zeros(round(rng.uniform(low, high) * RATE), np.float32)


def _finish(rng: random.Random, pieces: list[Samples]) -> Samples:
    """The pieces in a row, at some loudness, over a little noise."""
    whole = np.concatenate(pieces)
    whole = whole * np.float32(rng.uniform(0.15, 0.9) / max(float(np.abs(whole).max()), 1e-6))
    noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(len(whole))
    whole = whole + noise.astype(np.float32) * np.float32(10 ** rng.uniform(-5, -2.3))
    return np.clip(whole, -1, 1)


def spoken(rng: random.Random, number: str) -> Samples:
    """The digits one after the other, all in one voice."""
    voice = rng.choice(sorted(_bank()[0]))
    pieces = [_silence(rng, 0.05, 0.3)]
    for digit in number:
        take = rng.choice(_bank()[int(digit)][voice]).astype(np.float32) / 32768
        speed = rng.uniform(0.92, 1.15)
        at = np.arange(0, len(take) - 1, speed)
        pieces += [np.interp(at, np.arange(len(take)), take).astype(np.float32)]
        pieces += [_silence(rng, 0.06, 0.2)]
    sound = _finish(rng, pieces)
    return sound if len(sound) <= LONGEST * RATE else spoken(rng, number)


def _tone(frequency: float, seconds: float, to: float | None = None) -> Samples:
    """A sine with soft ends, which glides `to` another frequency if one is given."""
    count = round(seconds * RATE)
    hertz = np.linspace(frequency, frequency if to is None else to, count)
    edge = np.minimum(1.0, np.minimum(np.arange(count), np.arange(count)[::-1]) / (0.01 * RATE))
    return (np.sin(2 * np.pi * np.cumsum(hertz) / RATE) * edge).astype(np.float32)


def _named(rng: random.Random, name: str) -> float:
    return rng.uniform(*PITCHES[name])


def _item(
    rng: random.Random, skill: str, key: str, question: str, answer: str, sounds: list[Samples]
) -> Item:
    marks: list[dict[str, object]] = [{"type": "audio"} for _ in sounds]
    words: dict[str, object] = {"type": "text", "text": question}
    content = [*marks, words] if rng.random() < 0.7 else [words, *marks]
    key = f"{skill}:{key}"
    return Item(skill, key, [user(content)], assistant(answer), sounds=sounds)


def _number(rng: random.Random) -> str:
    return "".join(rng.choice("0123456789") for _ in range(rng.choice((1, 2, 2, 3, 3, 4))))


def digits(rng: random.Random) -> Item:
    """Write down a spoken number of one to four digits."""
    number = _number(rng)
    question = rng.choice(
        (
            "Which number do you hear?",
            "What number is spoken?",
            "Which digits are spoken?",
            "Write down the number.",
            "What do you hear?",
        )
    )
    key = number if len(number) > 1 else f"{number}:{rng.random()}"
    return _item(rng, "sound_digits", key, question, number, [spoken(rng, number)])


def pitch(rng: random.Random) -> Item:
    """Say how high a tone is, or whether it rises or falls."""
    if rng.random() < 0.6:
        name = rng.choice(sorted(PITCHES))
        hertz = _named(rng, name)
        tone = _tone(hertz, rng.uniform(0.3, 1.2))
        question = rng.choice(
            ("Is the tone low, middle or high?", "How high is the tone?", "What pitch is it?")
        )
        answer, key = name, f"{hertz:.1f}"
    else:
        low, high = _named(rng, "low"), _named(rng, "high")
        rising = rng.random() < 0.5
        tone = _tone(low, rng.uniform(0.4, 1.2), high) if rising else _tone(high, 0.8, low)
        question = rng.choice(("Does the tone rise or fall?", "Is the tone rising or falling?"))
        answer = ("rise" if "rise" in question else "rising") if rising else (
            "fall" if "rise" in question else "falling"
        )  # fmt: skip
        key = f"{rising}:{low:.1f}:{high:.1f}"
    sound = _finish(rng, [_silence(rng, 0.05, 0.3), tone, _silence(rng, 0.05, 0.2)])
    return _item(rng, "sound_pitch", key, question, answer, [sound])


def beeps(rng: random.Random) -> Item:
    """Count tones."""
    count = rng.randint(1, 6)
    hertz = rng.uniform(400, 2500)
    pieces = [_silence(rng, 0.05, 0.3)]
    for _ in range(count):
        pieces += [_tone(hertz, rng.uniform(0.1, 0.25)), _silence(rng, 0.12, 0.25)]
    question = rng.choice(
        ("How many beeps do you hear?", "How many tones are there?", "Count the beeps.")
    )
    key = f"{count}:{hertz:.1f}"
    return _item(rng, "sound_beeps", key, question, str(count), [_finish(rng, pieces)])


def compare(rng: random.Random) -> Item:
    """Two sounds, or a sound and a picture: whether they say the same number."""
    number = _number(rng)[:2]
    same = rng.random() < 0.5
    other = (
        number if same else rng.choice([n for n in (_number(rng)[:2], "5", "38") if n != number])
    )
    answer = "yes" if same else "no"
    key = f"{number}:{other}:{rng.randint(0, 9)}"
    if rng.random() < 0.5:
        question = rng.choice(
            ("Do both sounds say the same number?", "Are the two numbers the same?")
        )
        sounds = [spoken(rng, number), spoken(rng, other)]
        return _item(rng, "sound_compare", key, question, answer, sounds)
    question = rng.choice(
        (
            "Does the picture show the number that is spoken?",
            "Do the picture and the sound give the same number?",
        )
    )
    item = _item(rng, "sound_compare", f"picture:{key}", question, answer, [spoken(rng, number)])
    item.messages[0]["content"].insert(0, {"type": "image"})
    item.images.append(pictures.number_picture(rng, other))
    return item
