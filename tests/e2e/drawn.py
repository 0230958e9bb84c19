"""Pictures as a user of Pillow draws them, with questions in a user's words.

No code is shared with what the embedded model was trained on (`training.data`): shapes are drawn by
Pillow's own calls, in its named colours. Some of the wordings were shown in training, some not.
"""

from __future__ import annotations

import base64
import io
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import PIL.Image
import PIL.ImageDraw

SIZES = ((256, 256), (224, 224), (64, 64), (512, 512), (128, 128), (640, 480), (300, 200))
COLOURS = (
    "red", "green", "blue", "yellow", "orange", "purple", "black", "white", "brown", "pink", "grey",
)  # fmt: skip
GROUNDS = ("white", "black", "lightyellow", "lightblue", "beige", "navy", "white")
CLASHES = {
    "white": {"white", "lightyellow", "beige", "lightblue"},
    "yellow": {"lightyellow", "beige"},
    "pink": {"lightyellow", "beige", "lightblue"},
    "black": {"black", "navy"},
    "blue": {"navy"},
    "purple": {"navy"},
}
"""Grounds on which a colour is hard to see."""
SHAPES = ("circle", "square", "triangle", "rectangle")
CIRCLES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Radii in shares of half the picture's shorter side."""

Pen = PIL.ImageDraw.ImageDraw
Where = tuple[float, float, float]
"""Centre and radius in pixels."""


def _circle(pen: Pen, where: Where, **ink: Any) -> None:
    x, y, r = where
    pen.ellipse((x - r, y - r, x + r, y + r), **ink)


def _square(pen: Pen, where: Where, **ink: Any) -> None:
    x, y, r = where
    pen.rectangle((x - r, y - r, x + r, y + r), **ink)


def _rectangle(pen: Pen, where: Where, **ink: Any) -> None:
    x, y, r = where
    pen.rectangle((x - r, y - r / 2, x + r, y + r / 2), **ink)


def _triangle(pen: Pen, where: Where, **ink: Any) -> None:
    x, y, r = where
    pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], **ink)


def _star(pen: Pen, where: Where, **ink: Any) -> None:
    x, y, r = where
    corners = []
    for step in range(10):
        reach, angle = r if step % 2 == 0 else 0.4 * r, math.radians(36 * step - 90)
        corners.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    pen.polygon(corners, **ink)


def _diamond(pen: Pen, where: Where, **ink: Any) -> None:
    x, y, r = where
    pen.polygon([(x, y - r), (x + 0.7 * r, y), (x, y + r), (x - 0.7 * r, y)], **ink)


def _cross(pen: Pen, where: Where, **ink: Any) -> None:
    x, y, r = where
    pen.rectangle((x - r / 3, y - r, x + r / 3, y + r), **ink)
    pen.rectangle((x - r, y - r / 3, x + r, y + r / 3), **ink)


PENS: dict[str, Callable[..., None]] = {
    "circle": _circle,
    "square": _square,
    "triangle": _triangle,
    "rectangle": _rectangle,
    "star": _star,
    "diamond": _diamond,
    "cross": _cross,
}


@dataclass(frozen=True)
class Drawn:
    """One question about drawn pictures, and its answer."""

    category: str
    turns: tuple[tuple[str, tuple[PIL.Image.Image, ...]], ...]
    """The user's words turn by turn, each with its pictures."""
    said: tuple[str, ...]
    """The assistant's answers between those turns."""
    expected: str
    about: str

    @property
    def messages(self) -> list[dict[str, Any]]:
        """Return the messages that chat completions take."""
        found: list[dict[str, Any]] = []
        for index, (words, pictures) in enumerate(self.turns):
            parts: list[dict[str, Any]] = [_part(picture) for picture in pictures]
            parts.append({"type": "text", "text": words})
            found.append({"role": "user", "content": parts if pictures else words})
            if index < len(self.said):
                found.append({"role": "assistant", "content": self.said[index]})
        return found


def _part(picture: PIL.Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    picture.save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True)
class Sketch:
    """One shape on one ground."""

    shape: str
    colour: str
    ground: str
    size: tuple[int, int]
    radius: float
    x: float = 0.5
    y: float = 0.5

    def __str__(self) -> str:
        where = f"{self.radius:.2f} at {self.x:.2f}, {self.y:.2f}"
        return f"{self.colour} {self.shape} on {self.ground}, {self.size}, {where}"

    def draw(self, **ink: Any) -> PIL.Image.Image:
        picture = PIL.Image.new("RGB", self.size, self.ground)
        where = (self.x * self.size[0], self.y * self.size[1], self.radius * min(self.size) / 2)
        PENS[self.shape](PIL.ImageDraw.Draw(picture), where, **(ink or {"fill": self.colour}))
        return picture


def sketch(rng: random.Random, shapes: Sequence[str] = SHAPES, **fixed: Any) -> Sketch:
    """Return some shape anywhere; `fixed` names what is not left to chance."""
    colour = fixed.get("colour") or rng.choice(COLOURS)
    ground = rng.choice([g for g in GROUNDS if g not in CLASHES.get(colour, ())])
    size = rng.choice(SIZES)
    radius = rng.uniform(0.2, 0.9)
    spread = [(1 - radius * min(size) / side) / 2 for side in size]
    x, y = (0.5 + rng.uniform(-share, share) for share in spread)
    made = {"shape": rng.choice(shapes), "colour": colour, "ground": ground, "size": size}
    return Sketch(**(made | {"radius": radius, "x": x, "y": y} | fixed))


def one(category: str, question: str, sketched: Sketch, expected: str, **ink: Any) -> Drawn:
    """Return a question about one picture."""
    about = f"{question} {sketched}"
    return Drawn(category, ((question, (sketched.draw(**ink),)),), (), expected, about)


def two(category: str, question: str, pair: tuple[Sketch, Sketch], expected: str) -> Drawn:
    """Return a question about two pictures."""
    pictures = tuple(each.draw() for each in pair)
    return Drawn(
        category, ((question, pictures),), (), expected, f"{question} {pair[0]}; {pair[1]}"
    )


def circles() -> Iterator[Drawn]:
    """Yield circles of every size."""
    rng = random.Random("circles")
    for radius, size in itertools.product(CIRCLES, SIZES[:5]):
        drawn = sketch(rng, ("circle",), radius=radius, size=size, x=0.5, y=0.5)
        if radius * size[0] >= 12:  # a radius of six pixels and more
            yield one("circles", "What shape is this?", drawn, "circle")


def shapes() -> Iterator[Drawn]:
    rng = random.Random("shapes")
    asks = (
        "What shape is in the image?",
        "Which shape do you see?",
        "Name the shape in this photo",
    )
    for index in range(60):
        drawn = sketch(rng, tuple(PENS) if index % 2 else SHAPES)
        yield one("shapes", asks[index % 3], drawn, drawn.shape)


def colours() -> Iterator[Drawn]:
    rng = random.Random("colours")
    asks = ("What colour is the shape?", "What color is it?", "Which color does this shape have?")
    for index in range(66):
        drawn = sketch(rng, colour=COLOURS[index % len(COLOURS)])
        yield one("colours", asks[index % 3], drawn, drawn.colour)


def both() -> Iterator[Drawn]:
    rng = random.Random("both")
    asks = (
        "What colour and shape is this?", "Describe this image.", "What do you see here?",
        "What is in the picture?",
    )  # fmt: skip
    for index in range(60):
        drawn = sketch(rng)
        yield one("both", asks[index % 4], drawn, f"{drawn.colour} {drawn.shape}")


def outlines() -> Iterator[Drawn]:
    """Yield thin outlines, and shapes with a border."""
    rng = random.Random("outlines")
    for index in range(40):
        size = rng.choice(((256, 256), (224, 224), (512, 512)))
        drawn = sketch(rng, radius=rng.uniform(0.4, 0.85), x=0.5, y=0.5, size=size, ground="white",
                       colour=rng.choice(("red", "green", "blue", "orange", "purple")))  # fmt: skip
        width = max(3, size[0] // 64)
        ink = {"outline": drawn.colour, "width": width}
        if index % 2:
            ink = {"fill": drawn.colour, "outline": "black", "width": width}
        asks = (("What shape is this?", drawn.shape), ("What colour is the shape?", drawn.colour))
        question, expected = asks[index // 2 % 2]
        yield one("outlines", question, drawn, expected, **ink)


def pair(rng: random.Random) -> tuple[Sketch, Sketch]:
    """Return two pictures that share neither shape nor colour."""
    shapes, colours = rng.sample(SHAPES, 2), rng.sample(COLOURS, 2)
    first, second = (
        sketch(rng, (shape,), colour=colour) for shape, colour in zip(shapes, colours, strict=True)
    )
    return first, second


def pair_of_circles() -> Drawn:
    """Return two large circles, each filling its picture."""
    first = Sketch("circle", "red", "white", (256, 256), 0.9)
    second = Sketch("circle", "blue", "black", (224, 224), 0.9)
    question = "What are the colours of the two images?"
    return two("two: colours", question, (first, second), "red and blue")


def two_pictures() -> Iterator[Drawn]:
    rng = random.Random("two")
    asks = ("What are the colours of the two images?", "What colors are the two shapes?",
            "Name the colours of both pictures.")  # fmt: skip
    for index in range(48):
        a, b = drawn = pair(rng)
        yield two("two: colours", asks[index % 3], drawn, f"{a.colour} and {b.colour}")
    for index in range(24):
        a, b = drawn = pair(rng)
        question = ("What is in each image?", "Describe the two pictures.")[index % 2]
        answer = f"{a.colour} {a.shape} and {b.colour} {b.shape}"
        yield two("two: both", question, drawn, answer)


def which() -> Iterator[Drawn]:
    rng = random.Random("which")
    for index in range(48):
        drawn = pair(rng)
        side = rng.randrange(2)
        asked = drawn[side]
        article = "an" if asked.colour == "orange" else "a"
        question = (
            f"Which picture shows {article} {asked.colour} thing?",
            f"Which image has a {asked.shape}?",
            f"Which picture shows {article} {asked.colour} {asked.shape}?",
        )[index % 3]
        yield two("two: which", question, drawn, ("the first", "the second")[side])


def turns() -> Iterator[Drawn]:
    """Yield a second picture in a second turn, and a second question about the first one."""
    rng = random.Random("turns")
    for index in range(32):
        a, b = pair(rng)
        opening = ("What is in the picture?", (a.draw(),))
        said = f"{a.colour} {a.shape}"
        if index % 2:
            later: Any = ("And what is in this one?", (b.draw(),))
            answer = f"{b.colour} {b.shape}"
        else:
            later, answer = (
                (("What colour is it?", ()), a.colour),
                (("What shape is it?", ()), a.shape),
            )[index // 2 % 2]
        yield Drawn("turns", (opening, later), (said,), answer, f"{later[0]} {a}; {b}")


def yes_or_no() -> Iterator[Drawn]:
    rng = random.Random("yes or no")
    for index in range(32):
        drawn, other = pair(rng)
        asked = drawn if rng.random() < 0.5 else other
        question = (f"Is the shape {asked.colour}?", f"Is there a {asked.shape} in the picture?")
        expected = "yes" if asked is drawn else "no"
        yield one("yes or no", question[index % 2], drawn, expected)


CATEGORIES = (circles, shapes, colours, both, outlines, two_pictures, which, turns, yes_or_no)


def drawings() -> list[Drawn]:
    """Return all drawings, the same in every run."""
    return [each for make in CATEGORIES for each in make()]
