"""What the training stream is made of, and in what shares."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache, partial

from tokenizers import Tokenizer

from training.chat import MODEL_DIR
from training.data import pictures, sounds, text, tools
from training.data.item import Generator, Item, assistant, draw, user


def _long(low: int, high: int, rng: random.Random) -> Item:
    return text.retrieval(rng, rng.randint(low, high), rng.choice((2, 4, 8)))


@cache
def _pieces() -> tuple[str, ...]:
    """Every word of the vocabulary, so that none is left that was never repeated."""
    vocabulary = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).get_vocab()
    words = {piece.lstrip("\u0120") for piece in vocabulary}
    return tuple(sorted(word for word in words if word.isascii() and word.isalpha()))


def repeat_pieces(rng: random.Random) -> Item:
    """Repeat any words of the vocabulary, whatever they mean."""
    words = " ".join(rng.choice(_pieces()) for _ in range(rng.randint(1, 5)))
    text_to_say = words + rng.choice(("", "", ".", "!"))
    ask = rng.choice(text.REPEAT_ASKS)
    return Item(
        "repeat", f"repeat:{text_to_say}", [user(ask.format(text_to_say))], assistant(text_to_say)
    )


TEXT_MIXTURE: dict[Generator, float] = {
    text.repeat: 11,
    text.arithmetic: 14,
    text.counting: 10,
    text.facts: 7,
    text.small_talk: 1.5,
    text.unknown: 1.5,
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

TRAINING_ONLY: dict[Generator, float] = {
    repeat_pieces: 5,
    text.count_among: 14,
    text.count_letters: 7,
    text.think_count: 10,
}
"""More of what is hard to learn. The tokenizer's corpus goes without."""

PICTURE_MIXTURE: dict[Generator, float] = {
    pictures.shape: 6,
    pictures.colour: 6,
    pictures.both: 10,
    pictures.how_many: 5,
    pictures.where: 6,
    pictures.digits: 5,
    pictures.compare: 7,
    pictures.yes_or_no: 3,
    pictures.follow_up: 3,
}
"""Picture skills, by how often they are drawn."""

SOUND_MIXTURE: dict[Generator, float] = {
    sounds.digits: 12,
    sounds.pitch: 3,
    sounds.beeps: 4,
    sounds.compare: 5,
}
"""Skills of hearing, by how often they are drawn."""

COMPANY_SHARE = 0.15
"""Share of the short items that stand in a longer conversation, where their skill allows."""

THINK_SHARE = 0.05
"""Share of the items that are asked with thinking on, where their skill has a thought to show."""


def items(
    rng: random.Random,
    long_share: float,
    longest: int,
    picture_share: float,
    sound_share: float,
) -> Iterator[Item]:
    """The endless training stream.

    `long_share` of the items are retrievals over up to `longest` sentences of filler (about 13
    tokens each), `picture_share` have pictures, `sound_share` sounds.
    """
    text_mixture = TEXT_MIXTURE | TRAINING_ONLY
    kinds = [(list(m), list(m.values())) for m in (PICTURE_MIXTURE, SOUND_MIXTURE, text_mixture)]
    shares = [picture_share, sound_share, 1 - long_share - picture_share - sound_share]
    while True:
        if rng.random() < long_share:
            yield draw(partial(_long, longest // 4, longest), rng, "train")
            continue
        generators, weights = rng.choices(kinds, shares)[0]
        item = draw(rng.choices(generators, weights)[0], rng, "train")
        if rng.random() < COMPANY_SHARE:
            item = text.in_company(item, rng)
        yield text.with_thought(item) if rng.random() < THINK_SHARE else item
