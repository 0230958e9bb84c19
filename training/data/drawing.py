"""Draws scenes: plain shapes anywhere in a picture of any size, or each in a cell of a grid."""

from __future__ import annotations

import io
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Point = tuple[float, float]

SOFT_TOKENS = 70
CELL = 16
"""Pixels on the side of what becomes one soft token."""

FITTED = ((128, 128), (128, 128), (128, 128), (144, 112), (112, 144), (176, 96))
"""Width and height; the processor leaves pictures of these sizes as they are."""
SQUARES = (256, 256, 256, 224, 224, 128, 64, 96, 100, 150, 200, 300, 320, 400, 512)
"""Sides of the square pictures that people draw."""

INKS: dict[str, Colour] = {
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
PURE: dict[str, tuple[Colour, ...]] = {
    "red": ((255, 0, 0), (255, 0, 0), (220, 20, 60), (200, 0, 0)),
    "green": ((0, 128, 0), (0, 255, 0), (0, 180, 0), (34, 139, 34), (0, 100, 0), (50, 205, 50)),
    "blue": ((0, 0, 255), (0, 0, 255), (65, 105, 225), (0, 0, 160), (30, 144, 255)),
    "yellow": ((255, 255, 0), (255, 255, 0), (255, 230, 0)),
    "orange": ((255, 165, 0), (255, 165, 0), (255, 140, 0), (255, 128, 0)),
    "purple": ((128, 0, 128), (128, 0, 128), (160, 32, 240), (148, 0, 211)),
    "black": ((0, 0, 0),),
    "white": ((255, 255, 255),),
    "brown": ((165, 42, 42), (139, 69, 19), (150, 75, 0), (101, 67, 33)),
    "pink": ((255, 192, 203), (255, 105, 180), (255, 182, 193), (255, 20, 147)),
    "grey": ((128, 128, 128), (128, 128, 128), (169, 169, 169), (100, 100, 100)),
}
"""What programs draw with under these names."""
PAPERS = ("white", "white", "black", "grey", "yellow", "blue", "pink", "green")
SHAPES = (
    "circle", "square", "triangle", "star", "cross", "diamond", "ring", "heart", "rectangle",
)  # fmt: skip
COLUMNS = ("left", "centre", "right")
ROWS = ("top", "middle", "bottom")
CONTRAST = 75
"""Distance in RGB between an ink and its ground, at least."""


@dataclass(frozen=True)
class Spot:
    """Where a free shape is: its centre in shares of width and height.

    The radius is in shares of half the shorter side.
    """

    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Thing:
    """A shape in a cell of the three by three grid; with a spot, its exact place."""

    shape: str
    colour: str
    cell: int
    spot: Spot | None = None

    @property
    def place(self) -> str:
        column, row = COLUMNS[self.cell % 3], ROWS[self.cell // 3]
        if row == "middle":
            return "centre" if column == "centre" else column
        return row if column == "centre" else f"{row} {column}"

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    def __str__(self) -> str:
        size = f" of {round(10 * self.spot.radius)}" if self.spot else ""
        return f"{self.name} at {self.cell}{size}"


@dataclass(frozen=True)
class Scene:
    """Things in a picture of so many pixels."""

    size: tuple[int, int]
    things: tuple[Thing, ...]

    def __str__(self) -> str:
        return ", ".join(sorted(map(str, self.things)))

    def draw(self, rng: random.Random) -> Image.Image:
        """The picture, at the size that the processor brings it to."""
        free = any(thing.spot for thing in self.things)
        inks = [_ink(rng, thing.colour) for thing in self.things]
        smooth = not free or (rng.random() < 0.5 and max(self.size) <= 320)
        width, height = (side * (2 if smooth else 1) for side in self.size)
        canvas = _ground(rng, (width, height), inks, {thing.colour for thing in self.things})
        pen = ImageDraw.Draw(canvas)
        for thing, ink in zip(self.things, inks, strict=True):
            if thing.spot:
                centre = (thing.spot.x * width, thing.spot.y * height)
                radius = thing.spot.radius * min(width, height) / 2
            else:
                wide, high = width / 3, height / 3
                radius = min(wide, high) * rng.uniform(0.3, 0.44)
                centre = (
                    (thing.cell % 3 + 0.5 + rng.uniform(-0.06, 0.06)) * wide,
                    (thing.cell // 3 + 0.5 + rng.uniform(-0.06, 0.06)) * high,
                )
            draw_shape(rng, pen, thing.shape, ink, centre, radius, thing.spot)
        picture = canvas.reduce(2) if smooth else canvas
        return _worn(rng, fit(picture)) if free else fit(picture)


def fit(picture: Image.Image) -> Image.Image:
    """A picture as the processor resizes it: whole cells, as many as it has soft tokens at most."""
    factor = math.sqrt(SOFT_TOKENS * CELL**2 / (picture.width * picture.height))
    size = (
        int(factor * picture.width / CELL) * CELL,
        int(factor * picture.height / CELL) * CELL,
    )
    return picture if size == picture.size else picture.resize(size, Image.Resampling.BICUBIC)


def _size(rng: random.Random) -> tuple[int, int]:
    chance = rng.random()
    if chance < 0.15:
        return rng.choice(FITTED)
    if chance < 0.65:
        return (rng.choice(SQUARES),) * 2
    if chance < 0.75:
        return (rng.randint(60, 420),) * 2
    longer = rng.randint(100, 420)
    sides = longer, round(longer / rng.choice((1.25, 4 / 3, 1.5, 16 / 9, rng.uniform(1, 2))))
    return sides if rng.random() < 0.6 else (sides[1], sides[0])


def arrange(rng: random.Random, names: Sequence[tuple[str, str]], grid: float = 0.3) -> Scene:
    """A scene of shapes with their colours; `grid` is the share of scenes drawn on the grid."""
    if len(names) > 9:
        raise ValueError("a scene has nine things at most")
    if rng.random() < grid:
        cells = rng.sample(range(9), len(names))
        size = rng.choice(FITTED)
        return Scene(size, tuple(Thing(*n, cell) for n, cell in zip(names, cells, strict=True)))
    largest = {1: 0.95, 2: 0.62, 3: 0.48}.get(len(names), 0.36)
    return spread(rng, names, largest)


def spread(rng: random.Random, names: Sequence[tuple[str, str]], largest: float) -> Scene:
    """A scene of things anywhere, none of which touches another."""
    size = _size(rng)
    smallest = max(0.1, 10 / min(size))
    while True:
        spots: list[Spot] = []
        for _ in names:
            radius = rng.uniform(smallest, max(largest, smallest))
            spots.append(_somewhere(rng, size, radius))
        if not _touching(size, spots):
            break
        largest *= 0.97
    return Scene(size, tuple(_thing(n, spot) for n, spot in zip(names, spots, strict=True)))


def in_cells(rng: random.Random, names: Sequence[tuple[str, str]]) -> Scene:
    """A scene of things of many sizes, each so near to the middle of its cell that it is clear."""
    size = _size(rng)
    while True:
        spots = []
        for cell in rng.sample(range(9), len(names)):
            x = (cell % 3 + 0.5 + rng.uniform(-0.26, 0.26)) / 3
            y = (cell // 3 + 0.5 + rng.uniform(-0.26, 0.26)) / 3
            room = 2 * min(min(x, 1 - x) * size[0], min(y, 1 - y) * size[1]) / min(size)
            radius = rng.uniform(max(0.1, 10 / min(size)), 0.42)
            spots.append(Spot(x, y, min(radius, room)))
        if not _touching(size, spots):
            return Scene(size, tuple(_thing(n, s) for n, s in zip(names, spots, strict=True)))


def in_a_line(rng: random.Random, names: Sequence[tuple[str, str]]) -> Scene:
    """A scene of things that stand clearly from left to right, in this order."""
    while True:
        scene = spread(rng, names, 0.5)
        things = sorted(scene.things, key=_across)
        gaps = [_across(b) - _across(a) for a, b in itertools.pairwise(things)]
        if min(gaps, default=1) > 0.15:
            pairs = zip(names, things, strict=True)
            return replace(
                scene, things=tuple(replace(t, shape=n[0], colour=n[1]) for n, t in pairs)
            )


def _across(thing: Thing) -> float:
    return thing.spot.x if thing.spot else thing.cell % 3 / 3


def _somewhere(rng: random.Random, size: tuple[int, int], radius: float) -> Spot:
    """Within the picture, and often in its middle."""
    if rng.random() < 0.25:
        return Spot(0.5, 0.5, radius)
    shares = [radius * min(size) / 2 / side for side in size]
    x, y = (rng.uniform(min(share, 0.5), max(1 - share, 0.5)) for share in shares)
    return Spot(x, y, radius)


def _thing(name: tuple[str, str], spot: Spot) -> Thing:
    cell = min(2, int(3 * spot.x)) + 3 * min(2, int(3 * spot.y))
    return Thing(*name, cell, spot)


def _touching(size: tuple[int, int], spots: Sequence[Spot]) -> bool:
    for index, one in enumerate(spots):
        for other in spots[:index]:
            apart = math.hypot((one.x - other.x) * size[0], (one.y - other.y) * size[1])
            if apart < 1.2 * (one.radius + other.radius) * min(size) / 2:
                return True
    return False


def polygon(centre: Point, radius: float, corners: int, turn: float) -> list[Point]:
    """A regular polygon; unturned, a corner points up."""
    x, y = centre
    angles = (turn + 2 * math.pi * step / corners for step in range(corners))
    return [(x + radius * math.sin(angle), y - radius * math.cos(angle)) for angle in angles]


def _box(centre: Point, across: float, down: float, turn: float = 0.0) -> list[Point]:
    x, y = centre
    cos, sin = math.cos(turn), math.sin(turn)
    corners = ((-across, -down), (across, -down), (across, down), (-across, down))
    return [(x + a * cos - b * sin, y + a * sin + b * cos) for a, b in corners]


def _star(rng: random.Random, centre: Point, radius: float, turn: float) -> list[Point]:
    outer = polygon(centre, radius, 5, turn)
    inner = polygon(centre, radius * rng.uniform(0.36, 0.5), 5, turn + math.pi / 5)
    return [point for pair in zip(outer, inner, strict=True) for point in pair]


def _heart(centre: Point, radius: float) -> list[Point]:
    x, y = centre
    points = []
    for step in range(40):
        t = 2 * math.pi * step / 40
        wide = 16 * math.sin(t) ** 3
        high = 13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)
        points.append((x + wide * radius / 17, y - high * radius / 17))
    return points


def _triangle(rng: random.Random, centre: Point, radius: float, turn: float) -> list[Point]:
    """Mostly with a level base; some right-angled, upside down or turned."""
    x, y = centre
    kind = rng.random()
    if kind < 0.4:
        return polygon(centre, radius * 1.1, 3, turn * 0.4)
    if kind < 0.5:
        return polygon(centre, radius, 3, rng.uniform(0, 2 * math.pi))
    across, down = radius * rng.uniform(0.6, 1.0), radius * rng.uniform(0.6, 1.0)
    tip = rng.choice((0.0, 0.0, 0.0, 0.0, -1.0, 1.0, rng.uniform(-1, 1)))
    sign = -1 if rng.random() < 0.2 else 1
    return [
        (x + tip * across, y - sign * down),
        (x + across, y + sign * down),
        (x - across, y + sign * down),
    ]


def _cross(rng: random.Random, centre: Point, radius: float) -> list[Point]:
    x, y = centre
    arm = radius * rng.uniform(0.2, 0.38)
    quarter = [(arm, -radius), (arm, -arm), (radius, -arm)]
    points = []
    for _ in range(4):
        points += [(x + a, y + b) for a, b in quarter]
        quarter = [(-b, a) for a, b in quarter]
    return points


def _corners(
    rng: random.Random, shape: str, centre: Point, radius: float, turn: float
) -> list[Point]:
    """Corners of any shape but the round ones."""
    match shape:
        case "square":
            half = radius * rng.uniform(0.8, 1.0)
            return _box(centre, half, half, turn * 0.3)
        case "rectangle":
            narrow = radius / rng.uniform(1.45, 2.6)
            sides = (radius, narrow) if rng.random() < 0.6 else (narrow, radius)
            return _box(centre, *sides, turn * 0.15)
        case "diamond":
            x, wide = centre[0], rng.uniform(0.6, 1.0)
            return [(x + (px - x) * wide, py) for px, py in polygon(centre, radius, 4, 0.0)]
        case "triangle":
            return _triangle(rng, centre, radius, turn)
        case "star":
            return _star(rng, centre, radius * 1.1, turn * 0.4)
        case "heart":
            return _heart(centre, radius)
        case _:
            return _cross(rng, centre, radius)


def draw_shape(
    rng: random.Random,
    pen: ImageDraw.ImageDraw,
    shape: str,
    ink: Colour,
    centre: Point,
    radius: float,
    spot: Spot | None,
) -> None:
    """One shape: filled, and where it is free and not small some are outlines or have a border."""
    x, y = centre
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "ring":
        width = max(2, round(radius * rng.uniform(0.2, 0.42)))
        pen.ellipse(box, outline=ink, width=width)
        return
    fill: Colour | None = ink
    border, width = None, 0
    chance = rng.random()
    if spot and spot.radius > 0.25 and chance < 0.2:
        width = max(1, round(radius * rng.uniform(0.03, 0.08)))
        edge = rng.choice(("black", "white"))
        border = INKS[edge] if chance < 0.07 else ink
        fill = ink if chance < 0.07 else None
    if shape == "circle":
        pen.ellipse(box, fill=fill, outline=border, width=width)
        return
    # A large shape is turned less: it would leave the picture.
    turn = 0.0 if spot and rng.random() < 0.5 else rng.uniform(-1, 1)
    turn *= 1 - spot.radius if spot else 1
    points = _corners(rng, shape, centre, radius, turn)
    pen.polygon(points, fill=fill, outline=border, width=width)


def jitter(rng: random.Random, colour: Colour, most: int = 12) -> Colour:
    """A colour close by."""
    red, green, blue = (max(0, min(255, c + rng.randint(-most, most))) for c in colour)
    return red, green, blue


def _ink(rng: random.Random, name: str) -> Colour:
    if rng.random() < 0.4:
        return jitter(rng, INKS[name])
    pure = rng.choice(PURE[name])
    return pure if rng.random() < 0.7 else jitter(rng, pure, 6)


def _paper(rng: random.Random, taken: set[str]) -> Colour:
    free = [name for name in PAPERS if name not in taken]
    chance = rng.random()
    if chance < 0.35 and "white" not in taken:
        return 255, 255, 255
    if chance < 0.45 and "black" not in taken:
        return 0, 0, 0
    if chance < 0.75 and free:
        name = rng.choice(free)
        return jitter(rng, INKS[name]) if rng.random() < 0.7 else rng.choice(PURE[name])
    low = 170 if rng.random() < 0.6 else 0
    return rng.randint(low, 255), rng.randint(low, 255), rng.randint(low, 255)


def _far(colour: Colour, others: Iterable[Colour]) -> bool:
    return all(math.dist(colour, other) >= CONTRAST for other in others)


def _ground(
    rng: random.Random, size: tuple[int, int], inks: Sequence[Colour], taken: set[str]
) -> Image.Image:
    """Plain, or from one colour to one close by."""
    paper = _paper(rng, taken)
    while not _far(paper, inks):
        paper = _paper(rng, taken if rng.random() < 0.9 else set())
    plain = Image.new("RGB", size, paper)
    other = jitter(rng, paper, 60)
    if rng.random() > 0.12 or not _far(other, inks):
        return plain
    ramp = Image.linear_gradient("L")
    ramp = (ramp.rotate(90) if rng.random() < 0.5 else ramp).resize(size)
    return Image.composite(plain, Image.new("RGB", size, other), ramp)


def _worn(rng: random.Random, picture: Image.Image) -> Image.Image:
    """Some pictures get noise or the traces of JPEG."""
    chance = rng.random()
    if chance < 0.12:
        noise = np.random.default_rng(rng.getrandbits(32)).normal(
            0, rng.uniform(2, 18), (picture.height, picture.width, 3)
        )
        return Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))
    if chance < 0.2:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=rng.randint(50, 95))
        return Image.open(file).convert("RGB")
    return picture
