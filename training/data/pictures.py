"""Drawn pictures and questions about them."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from training.data import asking, drawing
from training.data.asking import say
from training.data.drawing import FITTED, INKS, PAPERS, SHAPES, Scene, Thing, jitter
from training.data.item import Item, assistant, user

NUMBERS = ("first", "second")


def _names(rng: random.Random, count: int) -> list[tuple[str, str]]:
    """Return `count` shapes with their colours, all different."""
    shapes = rng.sample(SHAPES, count)
    return list(zip(shapes, rng.sample(sorted(INKS), count), strict=True))


def _any_names(rng: random.Random, count: int) -> list[tuple[str, str]]:
    return [(rng.choice(SHAPES), _any_ink(rng)) for _ in range(count)]


def _any_ink(rng: random.Random) -> str:
    return rng.choice(sorted(INKS))


def _other(rng: random.Random, value: str, values: tuple[str, ...]) -> str:
    return rng.choice([other for other in values if other != value])


def _ask(rng: random.Random, question: str, pictures: int = 1) -> list[dict[str, object]]:
    marks: list[dict[str, object]] = [{"type": "image"} for _ in range(pictures)]
    words: dict[str, object] = {"type": "text", "text": question}
    return [*marks, words] if rng.random() < 0.6 else [words, *marks]


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


def shape(rng: random.Random) -> Item:
    """Name the one shape, or the shape of a colour."""
    scene = drawing.arrange(rng, _names(rng, rng.choice((1, 1, 1, 2, 3))))
    asked = scene.things[0]
    if len(scene.things) == 1 and rng.random() < 0.9:
        question = say(rng, asking.SHAPE, one_word=True)
    else:
        question = say(rng, asking.SHAPE_OF, asked.colour, one_word=True)
    key = f"{asked.colour}:{scene}"
    return _item(rng, "picture_shape", key, question, asked.shape, [scene.draw(rng)])


def colour(rng: random.Random) -> Item:
    """Name the colour of a shape."""
    scene = drawing.arrange(rng, _names(rng, rng.choice((1, 1, 1, 2, 3))))
    asked = scene.things[0]
    kind = rng.random() if len(scene.things) == 1 else 0.0
    if kind < 0.4:
        question = say(rng, asking.COLOUR_OF, asked.shape, one_word=True)
    elif kind < 0.75:
        question = say(rng, asking.COLOUR_OF, rng.choice(asking.THINGS), one_word=True)
    else:
        question = say(rng, asking.COLOUR, one_word=True)
    key = f"{asked.shape}:{scene}"
    return _item(rng, "picture_colour", key, question, asked.colour, [scene.draw(rng)])


def both(rng: random.Random) -> Item:
    """Name colour and shape together: of one shape, of those in a row, or of two pictures'."""
    kind = rng.random()
    if kind < 0.4:
        scene = drawing.arrange(rng, _names(rng, 1))
        answer, question = scene.things[0].name, say(rng, asking.BOTH)
        return _item(rng, "picture_both", str(scene), question, answer, [scene.draw(rng)])
    if kind < 0.5:
        scene = drawing.in_a_line(rng, _names(rng, rng.choice((2, 2, 3))))
        answer = _listed([thing.name for thing in scene.things])
        key = f"line:{scene}:{answer}"
        question = say(rng, asking.SEVERAL)
        return _item(rng, "picture_both", key, question, answer, [scene.draw(rng)])
    return _two(rng)


def _two(rng: random.Random) -> Item:
    scenes = [drawing.arrange(rng, _names(rng, 1)) for _ in range(2)]
    kind = rng.choice(("shape", "colour", "colour", "both", "order"))
    key = f"{kind}:{scenes[0]}|{scenes[1]}"
    pictures = [scene.draw(rng) for scene in scenes]
    if kind != "order":
        named = [_name(scene.things[0], kind) for scene in scenes]
        question, answer = say(rng, asking.TWO[kind]), f"{named[0]} and {named[1]}"
        return _item(rng, "picture_both", key, question, answer, pictures)
    which = rng.randrange(2)
    asked = rng.choice(("shape", "colour", "both"))
    asks = asking.DESCRIBE_ONE_OF_TWO if asked == "both" else asking.ONE_OF_TWO
    question = say(rng, asks, asked=asked, which=NUMBERS[which], number=str(which + 1))
    answer = _name(scenes[which].things[0], asked)
    return _item(rng, "picture_both", f"{which}{asked}:{key}", question, answer, pictures)


def _name(thing: Thing, kind: str) -> str:
    return {"shape": thing.shape, "colour": thing.colour}.get(kind, thing.name)


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]])


def _plural(noun: str) -> str:
    return "crosses" if noun == "cross" else f"{noun}s"


def how_many(rng: random.Random) -> Item:
    """Count all shapes, or those of one kind or colour."""
    kinds, inks = rng.sample(SHAPES, 2), rng.sample(sorted(INKS), 2)
    names = [(rng.choice(kinds), rng.choice(inks)) for _ in range(rng.randint(1, 6))]
    scene = drawing.arrange(rng, names, grid=0.6)
    chance = rng.random()
    if chance < 0.45:
        asked, counted = rng.choice(("shapes", "shapes", "things", "objects", "figures")), names
        key = f"all:{scene}"
    elif chance < 0.85:
        kind = rng.choice(kinds)
        asked, counted = _plural(kind), [name for name in names if name[0] == kind]
        key = f"{kind}:{scene}"
    else:
        ink = rng.choice(inks)
        asked, counted = f"{ink} shapes", [name for name in names if name[1] == ink]
        key = f"{ink}:{scene}"
    question = say(rng, asking.HOW_MANY, asked)
    return _item(rng, "picture_count", key, question, str(len(counted)), [scene.draw(rng)])


def where(rng: random.Random) -> Item:
    """Say where a shape is, or what is at a place."""
    names = _names(rng, rng.choice((1, 2, 3)))
    scene = drawing.arrange(rng, names, 1) if rng.random() < 0.5 else drawing.in_cells(rng, names)
    asked = scene.things[0]
    key = f"{asked.shape}:{scene}"
    picture = scene.draw(rng)
    if rng.random() < 0.7:
        said = rng.choice((asked.shape, asked.shape, asked.name, f"{asked.colour} shape"))
        question = say(rng, asking.WHERE, said)
        return _item(rng, "picture_where", key, question, asked.place, [picture])
    at = asked.place if " " not in asked.place else f"{asked.place} corner"
    question = say(rng, asking.AT, at)
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
    taken = {ink, *clashing, *(blueish if ink in blueish else ())}
    paper = rng.choice([colour for colour in PAPERS if colour not in taken])
    width, height = rng.choice(FITTED)
    canvas = Image.new("RGB", (width * 2, height * 2), jitter(rng, INKS[paper]))
    pen = ImageDraw.Draw(canvas)
    path = rng.choice(fonts())
    room = min(canvas.width / (0.72 * len(number)), canvas.height * 0.9)
    font = _font(path, max(28, 4 * round(rng.uniform(0.55, 0.95) * room / 4)))
    left, top, right, bottom = pen.textbbox((0, 0), number, font=font)
    free_x, free_y = canvas.width - (right - left), canvas.height - (bottom - top)
    x = rng.uniform(0.1, 0.9) * max(free_x, 0) - left
    y = rng.uniform(0.1, 0.9) * max(free_y, 0) - top
    pen.text((x, y), number, fill=jitter(rng, INKS[ink]), font=font)
    return canvas.reduce(2)


def digits(rng: random.Random) -> Item:
    """Read a number of one to four digits."""
    number = "".join(rng.choice("0123456789") for _ in range(rng.choice((1, 2, 2, 3, 3, 4))))
    question = say(rng, asking.DIGITS)
    key = number if len(number) > 1 else f"{number}:{rng.random()}"
    return _item(rng, "picture_digits", key, question, number, [number_picture(rng, number)])


def compare(rng: random.Random) -> Item:
    """Two pictures: the same shape or colour, which has more, which has a given thing."""
    kind = rng.choice(("shape", "colour", "more", "which", "which"))
    if kind == "more":
        few, many = sorted(rng.sample(range(1, 7), 2))
        first, second = (drawing.arrange(rng, _any_names(rng, n), 0.6) for n in (few, many))
        if rng.random() < 0.5:
            first, second = second, first
        question = say(rng, asking.MORE)
        answer = "the first" if len(first.things) > len(second.things) else "the second"
    elif kind == "which":
        first, second = _different(rng)
        which = rng.randrange(2)
        said = _said(rng, (first, second)[which].things[0])
        question = say(rng, asking.WHICH, said)
        answer, kind = f"the {NUMBERS[which]}", f"which:{said}"
    else:
        first, second = (drawing.arrange(rng, _names(rng, 1)) for _ in range(2))
        a, b = first.things[0], second.things[0]
        if rng.random() < 0.5:
            b = replace(b, shape=a.shape) if kind == "shape" else replace(b, colour=a.colour)
            second = replace(second, things=(b,))
        question = say(rng, asking.SAME, asked=kind)
        same = a.shape == b.shape if kind == "shape" else a.colour == b.colour
        answer = "yes" if same else "no"
    key = f"{kind}:{first}|{second}"
    pictures = [first.draw(rng), second.draw(rng)]
    return _item(rng, "picture_compare", key, question, answer, pictures)


def _different(rng: random.Random) -> tuple[Scene, Scene]:
    """Two scenes of one shape each that have neither shape nor colour in common."""
    names = _names(rng, 2)
    return drawing.arrange(rng, names[:1]), drawing.arrange(rng, names[1:])


def _said(rng: random.Random, thing: Thing) -> str:
    """A thing by its shape, its colour, or both."""
    of_colour = f"{thing.colour} {rng.choice(asking.THINGS)}"
    return asking.a(rng.choice((thing.shape, of_colour, thing.name)))


def yes_or_no(rng: random.Random) -> Item:
    """Whether a picture shows a thing, or its shape is such or of such a colour."""
    scene = drawing.arrange(rng, _names(rng, rng.choice((1, 1, 2))))
    thing = rng.choice(scene.things)
    right = rng.random() < 0.5
    kind = rng.choice(("has", "shape", "colour") if len(scene.things) == 1 else ("has",))
    if not right:
        shapes = {thing.shape for thing in scene.things}
        inks = {thing.colour for thing in scene.things}
        thing = Thing(
            rng.choice([shape for shape in SHAPES if shape not in shapes]),
            rng.choice([ink for ink in sorted(INKS) if ink not in inks]),
            0,
        )
    if kind == "has":
        said = _said(rng, thing)
        question = say(rng, asking.HAS, said)
    elif kind == "shape":
        said = asking.a(thing.shape)
        question = say(rng, asking.IS_SHAPE, said)
    else:
        said = thing.colour
        question = say(rng, asking.IS_COLOUR, said)
    answer = "yes" if right else "no"
    key = f"{kind}:{said}:{scene}"
    return _item(rng, "picture_yes_no", key, question, answer, [scene.draw(rng)])


def follow_up(rng: random.Random) -> Item:
    """A second question in a turn of its own: about the same picture, or about another one."""
    scenes = [drawing.arrange(rng, _names(rng, 1))]
    asks = {"shape": asking.SHAPE, "colour": asking.COLOUR, "both": asking.BOTH}
    before, now = rng.sample(sorted(asks), 2)
    opening = user(_ask(rng, say(rng, asks[before])))
    said = assistant(_name(scenes[0].things[0], before))
    if rng.random() < 0.5:
        scenes.append(drawing.arrange(rng, _names(rng, 1)))
        now = rng.choice((before, now))
        question = user(_ask(rng, say(rng, asks[now])))
    elif now != "both" and rng.random() < 0.25:
        question = user(f"And the {now}?")
    else:
        question = user(say(rng, asks[now]))
    return Item(
        "picture_follow_up",
        f"picture_follow_up:{before}:{now}:{'|'.join(map(str, scenes))}",
        [opening, said, question],
        assistant(_name(scenes[-1].things[0], now)),
        images=[scene.draw(rng) for scene in scenes],
    )
