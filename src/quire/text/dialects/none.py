"""No dialect: all text is the answer."""

from __future__ import annotations

from functools import partial

from quire.text.dialects.base import Dialect
from quire.text.dialects.marker_parser import Layout, MarkerParser

NONE = Dialect(
    name="none",
    recognises=lambda template, model_type: True,
    build=partial(MarkerParser, Layout()),
)
