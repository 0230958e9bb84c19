"""What a generated item is, and how items are split into train and test for good."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

Message = dict[str, Any]
Tool = dict[str, Any]
Split = Literal["train", "test"]

TEST_SHARE = 10
"""One identity in this many belongs to the test split."""


@dataclass(frozen=True)
class Item:
    """One conversation, the answer that it should get, and how to judge an answer."""

    skill: str
    key: str
    """Identity: two items with one key ask the same thing. The split depends on it alone."""
    messages: list[Message]
    answer: Message
    """The assistant message expected: `content` or `tool_calls`, and `reasoning_content`."""
    match: str = "exact"
    tools: list[Tool] | None = None
    enable_thinking: bool = False
    images: list[Image] = field(default_factory=list)
    sounds: list[npt.NDArray[np.float32]] = field(default_factory=list)
    """At 16,000 samples a second."""


def split_of(key: str) -> Split:
    """The split that an identity belongs to, today and in every later run."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return "test" if int.from_bytes(digest, "big") % TEST_SHARE == 0 else "train"


Generator = Callable[[random.Random], Item]


def draw(generator: Generator, rng: random.Random, split: Split) -> Item:
    """An item of `split`: what the generator makes is thrown away until one belongs there."""
    while True:
        item = generator(rng)
        if split_of(item.key) == split:
            return item


def distinct(generator: Generator, rng: random.Random, split: Split) -> Iterator[Item]:
    """Items of `split` with no identity twice."""
    seen: set[str] = set()
    while True:
        item = draw(generator, rng, split)
        if item.key not in seen:
            seen.add(item.key)
            yield item


def user(content: Any) -> Message:
    """A user message."""
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    """A system message."""
    return {"role": "system", "content": content}


def assistant(content: str, reasoning: str | None = None) -> Message:
    """An assistant message, with its thought if it had one."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return message


def calls(*functions: tuple[str, dict[str, Any]], reasoning: str | None = None) -> Message:
    """An assistant message that calls tools, in order."""
    message = assistant("", reasoning)
    message["tool_calls"] = [
        {
            "id": f"call_{index}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for index, (name, arguments) in enumerate(functions)
    ]
    return message
