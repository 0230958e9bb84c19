"""Names of the speculation modes in settings and requests."""

from __future__ import annotations

from typing import Literal, get_args

Speculation = Literal["auto", "off", "ngram", "mtp", "draft"]
"""`ngram` is the drafters without a model, `mtp` the model's head as well, `draft` a draft model as
well; `auto` is what never costs: `ngram`, and the draft model that the server was given."""

LOOKUPS = frozenset({"cached", "ngram"})
"""Drafters that look for what followed the same tokens before."""
HEAD = "mtp"
"""The drafter that is a head of the model."""
DRAFT = "draft"
"""The drafter that is a smaller model of the same vocabulary."""
PREDICTION = "prediction"
"""The drafter of the answer that a request expects."""


def check_speculate(value: str) -> str:
    """Return a setting of `--speculate`.

    Raises:
        ValueError: it is no mode, or `draft` without a model.
    """
    mode, _, model = value.partition("=")
    plain = [each for each in get_args(Speculation) if each != DRAFT]
    if value in plain or (mode == DRAFT and model):
        return value
    raise ValueError(f"input should be {', '.join(plain)} or {DRAFT}=MODEL")


def speculation_of(value: str) -> tuple[Speculation, str | None]:
    """Return the mode that a setting of `--speculate` names, and the draft model.

    Raises:
        ValueError: as `check_speculate`.
    """
    mode, _, model = check_speculate(value).partition("=")
    return next(each for each in get_args(Speculation) if each == mode), model or None
