"""What the training stream is made of, and in what shares."""

from __future__ import annotations

import random
from functools import partial

from training.data import text, tools
from training.data.item import Generator, Item


def _long(low: int, high: int, rng: random.Random) -> Item:
    return text.retrieval(rng, rng.randint(low, high), rng.choice((2, 4, 8)))


TEXT_MIXTURE: dict[Generator, float] = {
    text.repeat: 10,
    text.arithmetic: 14,
    text.counting: 10,
    text.facts: 7,
    text.small_talk: 1,
    text.persona: 6,
    text.memory: 8,
    text.json_object: 7,
    text.thinking: 8,
    tools.one_call: 8,
    tools.several_calls: 7,
    tools.no_call: 5,
    tools.answer_from_result: 5,
    partial(_long, 2, 30): 6,
}
"""Short skills, by how often they are drawn."""
