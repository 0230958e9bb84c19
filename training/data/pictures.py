"""Drawn pictures and questions about them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from training.data.item import Item, assistant, user

SIZES = ((128, 128), (128, 128), (128, 128), (144, 112), (112, 144), (176, 96))
"""Width and height; the processor leaves pictures of these sizes as they are."""

SUPERSAMPLE = 2

INKS: dict[str, tuple[int, int, int]] = {
    "red": (215, 30, 35),
    "green": (35, 150, 55),
    "blue": (35, 70, 210),
    "yellow": (245, 220, 40),
    "orange": (250, 135, 20),
    "purple": (130, 45, 160),
    "black": (15, 15, 15),
    "white": (250, 250, 250),
    "brown": (120, 70, 30),
    "pink": (250, 150, 190),
    "grey": (130, 130, 130),
}
PAPERS = ("white", "white", "black", "grey", "yellow", "blue", "pink", "green")
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond", "ring", "heart")
COLUMNS = ("left", "centre", "right")
ROWS = ("top", "middle", "bottom")

Box = tuple[float, float, float, float]

ASK_SHAPE = (
    "What shape is in the picture?",
    "Which shape is this?",
    "Name the shape.",
    "What shape is it?",
    "Which shape do you see?",
    "What shape do you see in this picture?",
)
ASK_COLOUR_OF = (
    "What colour is the {}?",
    "Which colour has the {}?",
    "Colour of the {}?",
    "What is the colour of the {}?",
    "Which colour is the {}?",
    "What color is the {}?",
    "Tell me the colour of the {}.",
)
ASK_COLOUR = ("What colour is it?", "Which colour is it?", "Name the colour.")
ASK_BOTH = (
    "What is in the picture?",
    "What do you see?",
    "What colour and shape is it?",
    "Which colour and which shape do you see?",
    "Name the colour and the shape.",
    "Describe the picture.",
    "What colour and what shape is in the picture?",
    "What does the picture show?",
)
ASK_ONE_OF_TWO = (
    "What {} is in the {} picture?",
    "Which {} does the {} picture show?",
    "Name the {} in the {} picture.",
)
ASK_TWO = {
    "shape": ("Which shapes are in the two pictures?", "Name both shapes.", "Which two shapes?"),
    "colour": (
        "Which colours are in the two pictures?",
        "Name both colours.",
        "Which two colours?",
    ),
    "both": (
        "What is in the two pictures?",
        "What do the pictures show?",
        "Describe both pictures.",
        "What do you see in each picture?",
    ),
}


@dataclass(frozen=True)
class Thing:
    """A shape in a cell of the three by three grid."""

    shape: str
    colour: str
    cell: int

    @property
    def place(self) -> str:
        column, row = COLUMNS[self.cell % 3], ROWS[self.cell // 3]
        if row == "middle":
            return "centre" if column == "centre" else column
        return row if column == "centre" else f"{row} {column}"

    def __str__(self) -> str:
        return f"{self.colour} {self.shape} at {self.cell}"


def _polygon(
    centre: tuple[float, float], radius: float, corners: int, turn: float
) -> list[tuple[float, float]]:
    x, y = centre
    return [
        (
            x + radius * math.sin(turn + 2 * math.pi * step / corners),
            y - radius * math.cos(turn + 2 * math.pi * step / corners),
        )
        for step in range(corners)
    ]


def _star(centre: tuple[float, float], radius: float, turn: float) -> list[tuple[float, float]]:
    outer = _polygon(centre, radius, 5, turn)
    inner = _polygon(centre, radius * 0.42, 5, turn + math.pi / 5)
    return [point for pair in zip(outer, inner, strict=True) for point in pair]


def _heart(centre: tuple[float, float], radius: float) -> list[tuple[float, float]]:
    x, y = centre
    points = []
    for step in range(40):
        t = 2 * math.pi * step / 40
        wide = 16 * math.sin(t) ** 3
        high = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x + wide * radius / 17, y - high * radius / 17))
    return points


def _draw_shape(
    pen: ImageDraw.ImageDraw,
    shape: str,
    ink: tuple[int, int, int],
    centre: tuple[float, float],
    radius: float,
    turn: float,
) -> None:
    x, y = centre
    box: Box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=ink)
    elif shape == "ring":
        pen.ellipse(box, outline=ink, width=max(2, round(radius * 0.32)))
    elif shape == "square":
        pen.polygon(_polygon(centre, radius * 1.2, 4, math.pi / 4 + turn * 0.3), fill=ink)
    elif shape == "diamond":
        points = _polygon(centre, radius * 1.1, 4, 0.0)
        pen.polygon([(x + (px - x) * 0.7, py) for px, py in points], fill=ink)
    elif shape == "triangle":
        pen.polygon(_polygon(centre, radius * 1.15, 3, turn * 0.4), fill=ink)
    elif shape == "star":
        pen.polygon(_star(centre, radius * 1.2, turn * 0.4), fill=ink)
    elif shape == "heart":
        pen.polygon(_heart(centre, radius), fill=ink)
    else:
        arm = radius * 0.32
        pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=ink)
        pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=ink)


def _jitter(rng: random.Random, colour: str) -> tuple[int, int, int]:
    red, green, blue = (
        max(0, min(255, channel + rng.randint(-12, 12))) for channel in INKS[colour]
    )
    return red, green, blue


def _canvas(rng: random.Random, taken: set[str]) -> Image.Image:
    paper = rng.choice([colour for colour in PAPERS if colour not in taken])
    width, height = rng.choice(SIZES)
    size = (width * SUPERSAMPLE, height * SUPERSAMPLE)
    return Image.new("RGB", size, _jitter(rng, paper))


def _finish(canvas: Image.Image) -> Image.Image:
    return canvas.reduce(SUPERSAMPLE)


def scene(rng: random.Random, things: list[Thing]) -> Image.Image:
    """A picture of the things, each somewhere in its cell."""
    canvas = _canvas(rng, {thing.colour for thing in things})
    pen = ImageDraw.Draw(canvas)
    wide, high = canvas.width / 3, canvas.height / 3
    for thing in things:
        radius = min(wide, high) * rng.uniform(0.3, 0.44)
        x = (thing.cell % 3 + 0.5) * wide + rng.uniform(-0.06, 0.06) * wide
        y = (thing.cell // 3 + 0.5) * high + rng.uniform(-0.06, 0.06) * high
        turn = rng.uniform(-1, 1)
        _draw_shape(pen, thing.shape, _jitter(rng, thing.colour), (x, y), radius, turn)
    return _finish(canvas)


def _things(rng: random.Random, count: int, different: bool = True) -> list[Thing]:
    cells = rng.sample(range(9), count)
    shapes = rng.sample(SHAPES, count) if different else [rng.choice(SHAPES) for _ in cells]
    colours = rng.sample(sorted(INKS), count) if different else [_any_ink(rng) for _ in cells]
    rest = set(PAPERS) - set(colours)
    if not rest:
        return _things(rng, count, different)
    return [Thing(*triple) for triple in zip(shapes, colours, cells, strict=True)]


def _any_ink(rng: random.Random) -> str:
    return rng.choice(sorted(INKS))


def _ask(rng: random.Random, question: str, pictures: int = 1) -> list[dict[str, object]]:
    marks: list[dict[str, object]] = [{"type": "image"} for _ in range(pictures)]
    words: dict[str, object] = {"type": "text", "text": question}
    return [*marks, words] if rng.random() < 0.7 else [words, *marks]


def _item(
    rng: random.Random, skill: str, key: str, question: str, answer: str, images: list[Image.Image]
) -> Item:
    return Item(
        skill,
        f"{skill}:{key}",
        [user(_ask(rng, question, len(images)))],
        assistant(answer),
        images=images,
    )


def _description(things: list[Thing]) -> str:
    return ", ".join(sorted(str(thing) for thing in things))


def shape(rng: random.Random) -> Item:
    """Name the one shape, or the shape of a colour."""
    things = _things(rng, rng.choice((1, 1, 2, 3)))
    asked = things[0]
    if len(things) == 1:
        question = rng.choice(ASK_SHAPE)
    else:
        question = rng.choice((f"What shape is {asked.colour}?", f"Which shape is {asked.colour}?"))
    key = f"{asked.colour}:{_description(things)}"
    return _item(rng, "picture_shape", key, question, asked.shape, [scene(rng, things)])


def colour(rng: random.Random) -> Item:
    """Name the colour of a shape."""
    things = _things(rng, rng.choice((1, 1, 2, 3)))
    asked = things[0]
    questions = [ask.format(asked.shape) for ask in ASK_COLOUR_OF]
    if len(things) == 1:
        questions += [ask.format("shape") for ask in ASK_COLOUR_OF] + list(ASK_COLOUR)
    question = rng.choice(questions)
    key = f"{asked.shape}:{_description(things)}"
    return _item(rng, "picture_colour", key, question, asked.colour, [scene(rng, things)])


def both(rng: random.Random) -> Item:
    """Name colour and shape together, of one picture's shape or of each of two pictures'."""
    first = _things(rng, 1)
    if rng.random() < 0.6:
        thing = first[0]
        key = _description(first)
        answer = f"{thing.colour} {thing.shape}"
        return _item(rng, "picture_both", key, rng.choice(ASK_BOTH), answer, [scene(rng, first)])
    second = _things(rng, 1)
    kind = rng.choice(("shape", "colour", "both", "order"))
    named = [_name(things[0], kind) for things in (first, second)]
    pictures = [scene(rng, first), scene(rng, second)]
    key = f"{kind}:{_description(first)}|{_description(second)}"
    if kind == "order":
        which = rng.randrange(2)
        asked = rng.choice(("shape", "colour"))
        question = rng.choice(ASK_ONE_OF_TWO).format(asked, ("first", "second")[which])
        answer = _name((first, second)[which][0], asked)
        return _item(rng, "picture_both", f"{which}{asked}:{key}", question, answer, pictures)
    question = rng.choice(ASK_TWO[kind])
    return _item(rng, "picture_both", key, question, f"{named[0]} and {named[1]}", pictures)


def _name(thing: Thing, kind: str) -> str:
    return {"shape": thing.shape, "colour": thing.colour}.get(kind, f"{thing.colour} {thing.shape}")


def how_many(rng: random.Random) -> Item:
    """Count all shapes, or those of one kind."""
    count = rng.randint(1, 6)
    kinds = rng.sample(SHAPES, 2)
    inks = rng.sample(sorted(INKS), 2)
    cells = rng.sample(range(9), count)
    things = [Thing(rng.choice(kinds), rng.choice(inks), cell) for cell in cells]
    if rng.random() < 0.5:
        question = rng.choice(
            ("How many shapes are in the picture?", "How many shapes do you see?")
        )
        answer, asked = count, "all"
    else:
        asked = rng.choice(kinds)
        plural = "crosses" if asked == "cross" else f"{asked}s"
        question = rng.choice(
            ("How many {} are in the picture?", "How many {} do you see?")
        ).format(plural)
        answer = sum(thing.shape == asked for thing in things)
    key = f"{asked}:{_description(things)}"
    return _item(rng, "picture_count", key, question, str(answer), [scene(rng, things)])


def where(rng: random.Random) -> Item:
    """Say where a shape is, or what is at a place."""
    things = _things(rng, rng.choice((1, 2, 3)))
    asked = things[0]
    key = f"{asked.shape}:{_description(things)}"
    picture = scene(rng, things)
    if rng.random() < 0.7:
        question = rng.choice(("Where is the {}?", "In which part of the picture is the {}?"))
        question = question.format(asked.shape)
        return _item(rng, "picture_where", key, question, asked.place, [picture])
    at = asked.place if " " not in asked.place else f"{asked.place} corner"
    question = f"Which shape is at the {at}?"
    return _item(rng, "picture_where", f"at:{key}", question, asked.shape, [picture])


@cache
def fonts() -> tuple[str, ...]:
    """Font files with plain digits, of those that matplotlib ships."""
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    families = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr10", "cmss10", "cmtt10", "cmb10")
    banned = ("Display",)
    return tuple(
        str(path)
        for path in sorted(folder.glob("*.ttf"))
        if path.stem.startswith(families) and not any(word in path.stem for word in banned)
    )


@cache
def _font(path: str, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


def number_picture(rng: random.Random, number: str) -> Image.Image:
    """The number, in some font, size and place."""
    ink = _any_ink(rng)
    near = {"white": {"yellow", "pink"}, "black": {"brown", "purple"}, "yellow": {"white"},
            "pink": {"white", "grey"}, "grey": {"pink", "purple", "brown", "green"}}  # fmt: skip
    clashing = near.get(ink, set()) | {paper for paper, inks in near.items() if ink in inks}
    blueish = {"blue", "purple", "black", "green", "brown"}
    canvas = _canvas(rng, {ink, *clashing, *(blueish if ink in blueish else ())})
    pen = ImageDraw.Draw(canvas)
    path = rng.choice(fonts())
    room = min(canvas.width / (0.72 * len(number)), canvas.height * 0.9)
    font = _font(path, max(28, 4 * round(rng.uniform(0.55, 0.95) * room / 4)))
    left, top, right, bottom = pen.textbbox((0, 0), number, font=font)
    free_x, free_y = canvas.width - (right - left), canvas.height - (bottom - top)
    x = rng.uniform(0.1, 0.9) * max(free_x, 0) - left
    y = rng.uniform(0.1, 0.9) * max(free_y, 0) - top
    pen.text((x, y), number, fill=_jitter(rng, ink), font=font)
    return _finish(canvas)


def digits(rng: random.Random) -> Item:
    """Read a number of one to four digits."""
    number = "".join(rng.choice("0123456789") for _ in range(rng.choice((1, 2, 2, 3, 3, 4))))
    question = rng.choice(
        ("Which number is in the picture?", "Read the number.", "What number is this?")
    )
    key = number if len(number) > 1 else f"{number}:{rng.random()}"
    return _item(rng, "picture_digits", key, question, number, [number_picture(rng, number)])


def compare(rng: random.Random) -> Item:
    """Two pictures: the same shape or colour, which has more, which has a given shape."""
    kind = rng.choice(("shape", "colour", "more", "which"))
    first, second = _things(rng, 1), _things(rng, 1)
    if kind == "more":
        few, many = sorted(rng.sample(range(1, 7), 2))
        first, second = _things(rng, few, False), _things(rng, many, False)
        if rng.random() < 0.5:
            first, second = second, first
        question = "Which picture has more shapes, the first or the second?"
        answer = "the first" if len(first) > len(second) else "the second"
    elif kind == "which":
        second = [
            Thing(
                rng.choice([s for s in SHAPES if s != first[0].shape]),
                second[0].colour,
                second[0].cell,
            )
        ]
        asked = rng.choice((first, second))
        question = f"Which picture has a {asked[0].shape}, the first or the second?"
        answer = "the first" if asked is first else "the second"
    else:
        a, b = first[0], second[0]
        if rng.random() < 0.5:
            b = (
                Thing(a.shape, b.colour, b.cell)
                if kind == "shape"
                else Thing(b.shape, a.colour, b.cell)
            )
        second = [b]
        same = a.shape == b.shape if kind == "shape" else a.colour == b.colour
        question = f"Do both pictures show the same {kind}?"
        answer = "yes" if same else "no"
    key = f"{kind}:{_description(first)}|{_description(second)}"
    pictures = [scene(rng, first), scene(rng, second)]
    return _item(rng, "picture_compare", key, question, answer, pictures)
