"""Facts that checkpoints publish; see `fact`."""

from __future__ import annotations

from tests.text.published.fact import Published
from tests.text.published.plain import PLAIN
from tests.text.published.with_tools import WITH_TOOLS

__all__ = ["PUBLISHED", "Published"]

PUBLISHED = (*WITH_TOOLS, *PLAIN)
