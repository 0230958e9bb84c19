"""Writes the held-out items that ship: one JSON-lines file a skill, under tests/data/skills."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image

from quire.demo.skills import SkillItem
from training.chat import REPOSITORY
from training.data import pictures, sounds, text, tools
from training.data.item import Generator, Item, Message, distinct
from training.data.sounds import Samples
from training.packing import encode

SEED = 20261122
SHIPPED_MEDIA = 60
"""Items of each skill that has pictures or sounds; the others ship whole."""
FOLDER: Path = REPOSITORY / "tests" / "data" / "skills"

TOKENS_PER_SENTENCE = 9.7


def of_length(tokens: int, rng: random.Random) -> Item:
    """A retrieval whose prompt has `tokens` tokens, or up to a twentieth more."""
    while True:
        item = text.retrieval(rng, round(tokens / TOKENS_PER_SENTENCE) - 4, 4)
        if tokens <= encode(item).answer_from <= tokens * 1.05:
            return item


TEXT_SKILLS: dict[str, tuple[Generator, int]] = {
    "repeat": (text.repeat, 150),
    "arithmetic": (text.arithmetic, 200),
    "counting": (text.counting, 150),
    "facts": (text.facts, 150),
    "persona": (text.persona, 150),
    "memory": (text.memory, 150),
    "retrieval_256": (partial(of_length, 256), 100),
    "retrieval_1024": (partial(of_length, 1024), 100),
    "retrieval_4096": (partial(of_length, 4096), 60),
    "tool_call": (tools.one_call, 150),
    "tool_several": (tools.several_calls, 150),
    "tool_none": (tools.no_call, 150),
    "tool_answer": (tools.answer_from_result, 150),
    "thinking": (text.thinking, 150),
    "json": (text.json_object, 150),
}
PICTURE_SKILLS: dict[str, tuple[Generator, int]] = {
    "picture_shape": (pictures.shape, 150),
    "picture_colour": (pictures.colour, 150),
    "picture_count": (pictures.how_many, 150),
    "picture_where": (pictures.where, 150),
    "picture_digits": (pictures.digits, 150),
    "picture_compare": (pictures.compare, 150),
    "picture_both": (pictures.both, 150),
}
SOUND_SKILLS: dict[str, tuple[Generator, int]] = {
    "sound_digits": (sounds.digits, 150),
    "sound_pitch": (sounds.pitch, 150),
    "sound_beeps": (sounds.beeps, 150),
    "sound_compare": (sounds.compare, 150),
}
MEDIA_SKILLS = PICTURE_SKILLS | SOUND_SKILLS


def held_out(skill: str) -> Iterator[Item]:
    """The test items of a skill, the same in every run."""
    generator, count = (TEXT_SKILLS | MEDIA_SKILLS)[skill]
    drawn = distinct(generator, random.Random(f"{SEED}:{skill}"), "test")
    for _ in range(count):
        yield next(drawn)


def on_the_wire(message: Message, images: Iterator[Image], heard: Iterator[Samples]) -> Message:
    """A message as a client sends it: arguments of calls as JSON strings, media as base64.

    Args:
        images, heard: those of the item that have not been sent yet.
    """

    def part_on_the_wire(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "image":
            return {"type": "image_url", "image_url": {"url": data_url(next(images))}}
        if part["type"] == "audio":
            sound = {"data": mp3(next(heard)), "format": "mp3"}
            return {"type": "input_audio", "input_audio": sound}
        return part

    if isinstance(message["content"], list):
        return {**message, "content": [part_on_the_wire(part) for part in message["content"]]}
    if "tool_calls" not in message:
        return message
    sent = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        sent.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": sent}


def data_url(image: Image) -> str:
    """A picture as PNG."""
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def mp3(sound: Samples) -> str:
    """A sound as an MP3 file, in base64."""
    import av  # here, because the machine that trains and evaluates may lack it

    file = io.BytesIO()
    with av.open(file, "w", format="mp3") as out:
        stream = out.add_stream("mp3", rate=sounds.RATE, bit_rate=32_000, layout="mono")
        pcm = (sound * 32767).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(pcm, format="s16p", layout="mono")
        frame.sample_rate = sounds.RATE
        out.mux(stream.encode(frame) + stream.encode(None))
    return base64.b64encode(file.getvalue()).decode()


def expected(item: Item) -> Any:
    """What the judge compares with: the text, or the calls."""
    if item.match != "tools":
        return item.answer["content"]
    return [call["function"] for call in item.answer["tool_calls"]]


def skill_item(skill: str, item: Item) -> SkillItem:
    """An item in the form that ships."""
    images = iter(item.images)
    heard = iter(item.sounds)
    messages = [on_the_wire(message, images, heard) for message in item.messages]
    return SkillItem(skill, messages, expected(item), item.match, item.tools, item.enable_thinking)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for skill in (*TEXT_SKILLS, *MEDIA_SKILLS):
        items = held_out(skill)
        if skill in MEDIA_SKILLS:
            items = islice(items, SHIPPED_MEDIA)
        lines = [json.dumps(skill_item(skill, item).__dict__, ensure_ascii=False) for item in items]
        (FOLDER / f"{skill}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{skill:16s} {len(lines)} items")


if __name__ == "__main__":
    main()
