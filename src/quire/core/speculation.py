"""Names of the speculation modes in settings and requests."""

from __future__ import annotations

from typing import Literal

Speculation = Literal["auto", "off", "ngram", "mtp"]
"""`ngram` is the drafters without a model, `mtp` the model's head as well; `auto` is what never
costs: `ngram` so far, since a head does not pay beside many streams."""

LOOKUPS = frozenset({"cached", "ngram"})
"""Drafters that look for what followed the same tokens before."""
HEAD = "mtp"
"""The drafter that is a head of the model."""
PREDICTION = "prediction"
"""The drafter of the answer that a request expects."""
