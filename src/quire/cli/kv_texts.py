"""Texts on which KV formats are judged. Pure Python.

They are worded as the embedded model was taught (`training/data/text.py`), and plain enough for any
other.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

_WHO = ("The baker", "The sailor", "The teacher", "The fox", "The owl", "Boris", "Helga", "Ravi")
_VERBS = ("lifted", "bought", "found", "painted", "lost", "described", "sold", "remembered")
_THINGS = ("boat", "garden", "apple", "clock", "lamp", "violin", "basket", "mirror", "bicycle")
_LOOKS = ("red", "quiet", "green", "old", "small", "wooden", "bright", "heavy")
_PLACES = ("castle", "market", "river", "school", "island", "library", "forest", "station")
_OWNERS = ("Anna", "Peter", "Maria", "Tom", "Klara", "David", "Sofia", "Felix")


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens to read, with the parts that the model is to predict.

    Attributes:
        spans: (start, end) of answers, whose tokens are judged; other tokens are only read.
    """

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def _sentence(rng: random.Random) -> str:
    who, verb, thing = rng.choice(_WHO), rng.choice(_VERBS), rng.choice(_THINGS)
    return f"{who} {verb} the {rng.choice(_LOOKS)} {thing} near the {rng.choice(_PLACES)}."


def needle(sentences: int, depth: float, seed: int) -> tuple[str, str]:
    """Return filler with a code at a depth from 0 to 1, and the code."""
    rng = random.Random(f"{sentences}:{depth}:{seed}")
    owner, code = rng.choice(_OWNERS), str(rng.randint(10000, 99999))
    lines = [_sentence(rng) for _ in range(sentences)]
    lines.insert(round(depth * len(lines)), f"The code of {owner} is {code}.")
    return f"{' '.join(lines)}\n\nWhat is the code of {owner}?", code


def prompt_of(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> list[int]:
    """Return the tokens of one question."""
    if not template.exists:
        return tokenizer.encode(text, add_special_tokens=True)
    rendered = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)


def sized_needle(
    tokenizer: Tokenizer, template: ChatTemplate, length: int, depth: float, seed: int
) -> tuple[list[int], str]:
    """Return a prompt of about `length` tokens with a needle, and the expected answer.

    The text is lengthened step by step, because tokens per sentence depend on the tokenizer.
    """
    sentences = 1
    while True:
        text, code = needle(sentences, depth, seed)
        prompt = prompt_of(tokenizer, template, text)
        if len(prompt) >= length:
            return prompt, code
        sentences = max(sentences + 1, sentences * length // (len(prompt) + 8))


def _turns(sentences: int, seed: int) -> list[tuple[str, str]]:
    """Yield questions with right answers, most of which appear much earlier in the conversation."""
    rng = random.Random(f"{sentences}:{seed}")
    owners = rng.sample(_OWNERS, 3)
    codes = {owner: str(rng.randint(10000, 99999)) for owner in owners}
    lines = [_sentence(rng) for _ in range(sentences)]
    for owner, code in codes.items():
        lines.insert(rng.randint(0, len(lines)), f"The code of {owner} is {code}.")
    number, a, b = rng.randint(10, 99), rng.randint(10, 99), rng.randint(10, 99)
    repeated = " ".join(_sentence(rng) for _ in range(3))
    asked = [(f"What is the code of {owner}?", code) for owner, code in codes.items()]
    first, *others = asked
    return [
        (f"My lucky number is {number}.", "Noted."),
        (f"{' '.join(lines)}\n\n{first[0]}", first[1]),
        (f"Repeat exactly: {repeated}", repeated),
        ("Count from 1 to 40.", " ".join(str(n) for n in range(1, 41))),
        *others,
        (f"What is {a} + {b}?", str(a + b)),
        ("What is my lucky number?", str(number)),
    ]


def conversation(tokenizer: Tokenizer, template: ChatTemplate, length: int, seed: int) -> Text:
    """Return a conversation of about `length` tokens with known answers.

    All tokens are judged if there is no chat template, or if it changes earlier turns as the
    conversation grows.
    """
    sentences = 1
    while True:
        text = _rendered(tokenizer, template, _turns(sentences, seed))
        missing = length - len(text.tokens)
        if missing <= 0:
            return text
        sentences += max(1, missing // 16)


def _rendered(
    tokenizer: Tokenizer, template: ChatTemplate, turns: Sequence[tuple[str, str]]
) -> Text:
    if not template.exists:
        lines = [f"{question}\n{answer}" for question, answer in turns]
        return fully_judged(tokenizer.encode("\n\n".join(lines), add_special_tokens=True))
    messages: list[dict[str, str]] = []
    read, tokens, spans = "", [], []
    for question, answer in turns:
        messages.append({"role": "user", "content": question})
        prompt = template.render(messages, add_generation_prompt=True)
        if not prompt.startswith(read):
            return fully_judged(tokenizer.encode(prompt, add_special_tokens=False))
        tokens += tokenizer.encode(prompt[len(read) :], add_special_tokens=False)
        # The model also writes the tokens behind the answer, such as a turn's end.
        messages.append({"role": "assistant", "content": answer})
        read = prompt + answer
        start = len(tokens)
        tokens += tokenizer.encode(answer, add_special_tokens=False)
        spans.append((start, len(tokens) + 1))
    rest = template.render(messages, add_generation_prompt=False)[len(read) :]
    tokens += tokenizer.encode(rest, add_special_tokens=False)
    return Text(tuple(tokens), tuple(spans))


def fully_judged(tokens: Sequence[int]) -> Text:
    """Return a text with every token judged."""
    return Text(tuple(tokens), ((1, len(tokens)),))
