"""The wordings in which pictures are asked about."""

from __future__ import annotations

import random

SHAPE = (
    "What shape is in the {picture}?",
    "Which shape is this?",
    "Name the shape.",
    "What shape is it?",
    "Which shape is it?",
    "Which shape do you see?",
    "What shape do you see in this {picture}?",
    "What shape is this?",
    "What shape is shown?",
    "What shape is shown in the {picture}?",
    "What shape can you see?",
    "What is the shape?",
    "What is the shape in the {picture}?",
    "What is the shape of the {thing}?",
    "What shape is the {thing}?",
    "What shape is the {thing} in the {picture}?",
    "What shape does the {thing} have?",
    "Which shape is in the {picture}?",
    "What kind of shape is this?",
    "Identify the shape.",
    "Tell me the shape.",
    "What shape does the {picture} show?",
    "Which shape does this {picture} show?",
    "Which shape is drawn here?",
    "What shape has been drawn?",
    "Which shape can be seen in the {picture}?",
    "Shape?",
)
SHAPE_OF = (
    "What shape is {}?",
    "Which shape is {}?",
    "Which shape is {} in the {picture}?",
    "What shape is the {} one?",
    "What shape is the {} {thing}?",
    "What is the shape of the {} {thing}?",
    "What is the {} shape?",
    "Name the {} shape.",
    "What {} shape do you see?",
    "What {} shape is in the {picture}?",
    "What is {}?",
)
COLOUR_OF = (
    "What {colour} is the {}?",
    "What {colour} is the {}?",
    "Which {colour} has the {}?",
    "{Colour} of the {}?",
    "What is the {colour} of the {}?",
    "What is the {colour} of the {} in the {picture}?",
    "Which {colour} is the {}?",
    "Tell me the {colour} of the {}.",
    "Name the {colour} of the {}.",
    "What {colour} is the {} in the {picture}?",
    "What {colour} is this {}?",
    "What {colour} does the {} have?",
    "Which {colour} does the {} have?",
    "In which {colour} is the {} drawn?",
)
COLOUR = (
    "What {colour} is it?",
    "Which {colour} is it?",
    "Name the {colour}.",
    "What {colour} is this?",
    "What {colour} do you see?",
    "What {colour} is shown?",
    "What is the {colour}?",
    "{Colour}?",
)
BOTH = (
    "What is in the {picture}?",
    "What is in this {picture}?",
    "What's in the {picture}?",
    "What do you see?",
    "What do you see in the {picture}?",
    "What can you see?",
    "What can you see in this {picture}?",
    "What {colour} and shape is it?",
    "What {colour} and shape is this?",
    "What shape and {colour} is this?",
    "What shape is this and what {colour} is it?",
    "What shape is in the {picture}, and what {colour} is it?",
    "What {colour} and shape is the {thing}?",
    "What {colour} and what shape is in the {picture}?",
    "What is the {colour} and the shape of the {thing}?",
    "What are the {colour} and shape?",
    "Which {colour} and which shape do you see?",
    "Which shape and which {colour} is it?",
    "Name the {colour} and the shape.",
    "Name the shape and its {colour}.",
    "Tell me the {colour} and the shape.",
    "Describe the {picture}.",
    "Describe this {picture}.",
    "Describe the shape.",
    "Describe the {thing}.",
    "Describe what you see.",
    "What does the {picture} show?",
    "What does this {picture} show?",
    "What is shown in the {picture}?",
    "What is drawn here?",
    "What is this?",
    "What is it?",
)
SEVERAL = (
    "What is in the {picture}?",
    "What do you see?",
    "What can you see in the {picture}?",
    "Describe the {picture}.",
    "What does the {picture} show?",
    "Which {thing}s are in the {picture}?",
    "What {thing}s are in the {picture}?",
    "Name everything in the {picture}, from left to right.",
    "What shapes and {colour}s are in the {picture}?",
    "Describe the {thing}s in the {picture}.",
)
ONE_OF_TWO = (
    "What {asked} is in the {which} {picture}?",
    "Which {asked} does the {which} {picture} show?",
    "Name the {asked} in the {which} {picture}.",
    "What {asked} is the {thing} in the {which} {picture}?",
    "What is the {asked} of the {thing} in the {which} {picture}?",
    "What {asked} is the {which} {thing}?",
    "What {asked} does the {which} {picture} have?",
    "What {asked} do you see in the {which} {picture}?",
    "Tell me the {asked} in the {which} {picture}.",
    "What {asked} is in {picture} {number}?",
)
DESCRIBE_ONE_OF_TWO = (
    "What is in the {which} {picture}?",
    "What does the {which} {picture} show?",
    "Describe the {which} {picture}.",
    "What do you see in the {which} {picture}?",
    "What is in {picture} {number}?",
)
TWO = {
    "shape": (
        "Which shapes are in the two {picture}s?",
        "What shapes are in the two {picture}s?",
        "What shapes are in these {picture}s?",
        "What are the shapes in the two {picture}s?",
        "What are the two shapes?",
        "What are the shapes?",
        "Name both shapes.",
        "Name the shapes.",
        "Name the two shapes in the {picture}s.",
        "Which two shapes?",
        "Which two shapes do you see?",
        "What shapes do you see?",
        "What shapes do the {picture}s show?",
        "What shape is in each {picture}?",
        "What shapes are these?",
        "Tell me the shapes of both {thing}s.",
        "List the shapes.",
    ),
    "colour": (
        "Which {colour}s are in the two {picture}s?",
        "What {colour}s are in the two {picture}s?",
        "What {colour}s are in these {picture}s?",
        "What are the {colour}s of the two {picture}s?",
        "What are the {colour}s of the {picture}s?",
        "What are the {colour}s in the two {picture}s?",
        "What are the {colour}s of the two {thing}s?",
        "What are the {colour}s of both {thing}s?",
        "What are the {colour}s of the {thing}s in the two {picture}s?",
        "What are the two {colour}s?",
        "What are the {colour}s?",
        "Name both {colour}s.",
        "Name the {colour}s.",
        "Name the {colour}s of the two {picture}s.",
        "Which two {colour}s?",
        "Which two {colour}s do you see?",
        "What {colour}s do you see?",
        "What {colour}s are the {thing}s?",
        "What {colour}s are the two {thing}s?",
        "What {colour}s do the {picture}s show?",
        "What {colour} is the {thing} in each {picture}?",
        "What {colour} is each {thing}?",
        "What {colour}s are these?",
        "Tell me the {colour}s of both {picture}s.",
        "List the {colour}s.",
    ),
    "both": (
        "What is in the two {picture}s?",
        "What is in the {picture}s?",
        "What is in each {picture}?",
        "What is shown in the two {picture}s?",
        "What do the {picture}s show?",
        "What do these two {picture}s show?",
        "What do you see?",
        "What do you see in the two {picture}s?",
        "What do you see in each {picture}?",
        "Describe both {picture}s.",
        "Describe the two {picture}s.",
        "Describe each {picture}.",
        "What {colour}s and shapes are in the two {picture}s?",
        "What are the {colour}s and shapes?",
        "Name the {colour} and the shape in each {picture}.",
        "What are these?",
    ),
}
DIGITS = (
    "Which number is in the {picture}?",
    "Which number is in the {picture}?",
    "Read the number.",
    "What number is this?",
    "What number do you see?",
    "What number does the {picture} show?",
    "Which digits do you see?",
)
HOW_MANY = (
    "How many {} are in the {picture}?",
    "How many {} do you see?",
    "How many {} are there?",
    "How many {} can you see in the {picture}?",
    "How many {} are in this {picture}?",
    "How many {} does the {picture} show?",
    "Count the {}.",
    "What is the number of {}?",
)
WHERE = (
    "Where is the {}?",
    "Where is the {} in the {picture}?",
    "In which part of the {picture} is the {}?",
    "Where in the {picture} is the {}?",
    "Where do you see the {}?",
    "Tell me where the {} is.",
)
AT = (
    "Which shape is at the {}?",
    "What shape is at the {}?",
    "Which shape is at the {} of the {picture}?",
    "What shape do you see at the {}?",
)
WHICH = (
    "Which {picture} has {}, the first or the second?",
    "Which {picture} has {}?",
    "Which {picture} shows {}?",
    "Which {picture} shows {}, the first or the second?",
    "Which of the two {picture}s shows {}?",
    "Which of the {picture}s has {}?",
    "Which one shows {}?",
    "Which one has {}?",
    "Which {picture} contains {}?",
    "In which {picture} do you see {}?",
    "In which {picture} is there {}?",
    "Is {} in the first or the second {picture}?",
)
MORE = (
    "Which {picture} has more {thing}s, the first or the second?",
    "Which {picture} has more {thing}s?",
    "Which {picture} shows more {thing}s?",
    "Which of the two {picture}s has more {thing}s?",
    "Are there more {thing}s in the first or the second {picture}?",
)
SAME = (
    "Do both {picture}s show the same {asked}?",
    "Do the two {picture}s show the same {asked}?",
    "Is the {asked} the same in both {picture}s?",
    "Is it the same {asked} in both {picture}s?",
    "Do the two {thing}s have the same {asked}?",
    "Are the two {thing}s of the same {asked}?",
    "Are both {asked}s the same?",
)
HAS = (
    "Is there {} in the {picture}?",
    "Is there {}?",
    "Do you see {}?",
    "Does the {picture} show {}?",
    "Can you see {} in the {picture}?",
    "Is {} in the {picture}?",
)
IS_SHAPE = ("Is this {}?", "Is it {}?", "Is the shape {}?", "Does the {picture} show {}?")
IS_COLOUR = ("Is it {}?", "Is the {thing} {}?", "Is this {thing} {}?", "Is the colour {}?")

PICTURES = ("picture", "picture", "picture", "image", "image", "photo", "drawing")
THINGS = ("shape", "shape", "shape", "object", "thing", "figure")
BRIEF = ("Answer briefly.", "Answer in one word.", "One word, please.", "Be brief.")


def say(
    rng: random.Random, asks: tuple[str, ...], *things: str, one_word: bool = False, **named: str
) -> str:
    """One of the wordings, filled in, in British or American spelling, now and then sloppy.

    Args:
        things: what stands for each `{}`.
        one_word: the answer is a single word, so that the question may ask for one.
        named: what stands for further names; "colour" among their values gets the spelling.
    """
    colour = "colour" if rng.random() < 0.6 else "color"
    words = {
        "picture": rng.choice(PICTURES),
        "thing": rng.choice(THINGS),
        "colour": colour,
        "Colour": colour.capitalize(),
    }
    words |= {name: colour if value == "colour" else value for name, value in named.items()}
    question = rng.choice(asks).format(*things, **words)
    chance = rng.random()
    if chance < 0.08:
        question = question.rstrip("?.")
    elif chance < 0.12:
        question = question[0].lower() + question[1:]
    elif chance < 0.16:
        question = question[0].lower() + question[1:].rstrip("?.")
    elif chance < 0.2:
        question = f"Please look: {question}" if rng.random() < 0.5 else f"Hello! {question}"
    if one_word and rng.random() < 0.06:
        question = f"{question} {rng.choice(BRIEF)}"
    return question


def a(noun: str) -> str:
    """The noun behind its article."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
