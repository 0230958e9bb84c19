"""Names of the speculation modes in settings and requests."""

from __future__ import annotations

from typing import Literal, get_args

Speculation = Literal["auto", "off", "ngram", "mtp", "draft"]
"""Choice of drafters: `ngram` uses those without a model, `mtp` the model's head as well, `draft` a
draft model as well. `auto` uses all that the server has opened.
"""

LOOKUPS = frozenset({"cached", "ngram"})
"""Drafters that look up what followed the same tokens before."""
HEAD = "mtp"
"""Name of the drafter that is a head of the model."""
DRAFT = "draft"
"""Name of the drafter that is a smaller model with the same vocabulary."""
PREDICTION = "prediction"
"""Name of the drafter that uses the request's predicted answer."""


def check_speculate(value: str) -> str:
    """Return a setting of `--speculate`.

    Raises:
        ValueError: it is not a mode, or is `draft` without a model.
    """
    mode, _, model = value.partition("=")
    plain = [each for each in get_args(Speculation) if each != DRAFT]
    if value in plain or (mode == DRAFT and model):
        return value
    raise ValueError(f"must be {', '.join(plain)} or {DRAFT}=MODEL")


def speculation_of(value: str) -> tuple[Speculation, str | None]:
    """Return the mode that a setting of `--speculate` names, and the draft model.

    Raises:
        ValueError: as `check_speculate`.
    """
    mode, _, model = check_speculate(value).partition("=")
    return next(each for each in get_args(Speculation) if each == mode), model or None
