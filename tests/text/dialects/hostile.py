"""Makes outputs that a model might write, well and badly, and plays them in pieces of any size."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

from quire.core.request import FinishReason
from quire.text.dialects import DIALECTS, Parser, Tool
from quire.text.events import (
    Delta,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallStarted,
)
from tests.text.dialects.scripts import MARKERS, encode, vocabulary
from tests.text.dialects.test_properties import FRAGMENTS, THOUGHTS, WRITERS

STRINGS = [
    "x",
    "a\nb",
    'say "hi"',
    "it's",
    "\\d+",
    "é\ud83d",
    "🙂",
    "\n",
    " ",
    "</parameter>",
    "{[,:]}",
]
LONG = "a long value, as of a file\n" * 3
SPACES = ["", " ", "\n", "\n\n", " \n ", "\t"]


def _value(draw: random.Random, dialect: str) -> str:
    if draw.random() < 0.4:
        return draw.choice(STRINGS) + LONG * draw.choice([1, 1, 9, 40]) + draw.choice(STRINGS)
    if MARKERS[dialect] and draw.random() < 0.2:
        return draw.choice(STRINGS) + draw.choice(MARKERS[dialect]) + draw.choice(STRINGS)
    return draw.choice(STRINGS)


def _call(draw: random.Random, dialect: str) -> str:
    if dialect not in WRITERS:
        return "word"
    arguments = {
        "s": _value(draw, dialect),
        "i": draw.choice([0, 7, -3, 10**12]),
        "b": draw.random() < 0.5,
        "a": [_value(draw, dialect) for _ in range(draw.randint(0, 2))],
        "o": {"k": _value(draw, dialect)},
    }
    keys = draw.sample(list(arguments), draw.randint(0, 5))
    return WRITERS[dialect]({key: arguments[key] for key in keys})


def _damaged(draw: random.Random, text: str, dialect: str) -> str:
    """Return a text with some of its characters or markers left out, repeated, moved or
    replaced.
    """
    markers = MARKERS[dialect]
    pattern = "|".join(map(re.escape, markers))
    units = re.split(f"({pattern})|(?<=.)", text) if markers else list(text)
    units = [unit for unit in units if unit]
    for _ in range(draw.choice([0, 0, 1, 1, 2, 4])):
        if not units:
            break
        at = draw.randrange(len(units))
        match draw.randrange(5):
            case 0:
                del units[at]
            case 1:
                units.insert(at, units[at])
            case 2:
                units.insert(at, draw.choice([*FRAGMENTS, *markers, "\\q", "\\u12", '"', "'"]))
            case 3:
                units[at] = draw.choice([*FRAGMENTS, *markers])
            case _:
                del units[at:]
    return "".join(units)


def output(draw: random.Random, dialect: str) -> str:
    """Return one answer: reasoning, text and calls, damaged or not; or nothing but fragments."""
    if draw.random() < 0.25:
        fragments = [*FRAGMENTS, *MARKERS[dialect] * 3, *SPACES, "make", "now", "word"]
        return "".join(draw.choice(fragments) for _ in range(draw.randint(1, 25)))
    parts = []
    while draw.random() < 0.5:
        thought = draw.choice(SPACES) + draw.choice([*STRINGS, ""]) + draw.choice(SPACES)
        thought = THOUGHTS.get(dialect, "").replace("\n", draw.choice(SPACES)).format(thought)
        parts += [draw.choice(SPACES), thought]
    for _ in range(draw.randint(1, 3)):
        parts += [draw.choice(SPACES), draw.choice(["", "Prose.", "a b"]), draw.choice(SPACES)]
        parts.append(_call(draw, dialect))
    return _damaged(draw, "".join(parts), dialect)


def cut_at_random(draw: random.Random, text: str, mean: int) -> list[str]:
    """Return pieces of a text of `mean` characters on average."""
    pieces, at = [], 0
    while at < len(text):
        size = draw.randint(1, 2 * mean - 1)
        pieces.append(text[at : at + size])
        at += size
    return pieces


def units(dialect: str, text: str, *, with_ids: bool) -> list[tuple[bool, str]]:
    """Return runs of ordinary text (False), and the markers that are tokens of their own (True)."""
    markers = MARKERS[dialect] if with_ids else []
    if not markers:
        return [(False, text)]
    parts = re.split(f"({'|'.join(map(re.escape, markers))})", text)
    return [(part in markers, part) for part in parts if part]


def play(
    dialect: str,
    given: Iterable[tuple[bool, Sequence[str]]],
    tools: Sequence[Tool],
    *,
    with_ids: bool,
    prompt: str = "",
    finish: FinishReason = FinishReason.STOP,
) -> list[tuple[str, str]]:
    """Return a parser's events for markers and pieces of text. Adjacent events of a kind are
    joined.
    """
    known = vocabulary(dialect, with_ids)
    parser = DIALECTS[dialect].parser(encode(dialect, [prompt], with_ids), tools, known)
    deltas: list[Delta] = []
    for is_marker, pieces in given:
        for piece in pieces:
            deltas += _fed(parser, known.added.get(piece) if is_marker else None, piece)
    return joined([*deltas, *parser.finish(finish)])


def _fed(parser: Parser, token_id: int | None, piece: str) -> list[Delta]:
    if token_id is None:
        return parser.feed(-1, piece)
    return parser.feed(token_id, "")


def joined(deltas: Iterable[Delta]) -> list[tuple[str, str]]:
    """Return kinds and texts of deltas, up to the one that ends the answer."""
    found: list[tuple[str, list[str]]] = []
    for delta in deltas:
        kind, text = type(delta).__name__, ""
        match delta:
            case Text(text) | Reasoning(text):
                pass
            case ToolCallStarted(_, _, text):
                pass
            case ToolCallArguments(_, text):
                pass
        if found and found[-1][0] == kind and kind not in ("ToolCallStarted", "ToolCallEnded"):
            found[-1][1].append(text)
        else:
            found.append((kind, [text]))
        if isinstance(delta, ToolCallBroken):
            break
    return [(kind, "".join(texts)) for kind, texts in found]
