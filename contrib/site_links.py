"""A hook of MkDocs: links that leave docs/ name the file of the repository instead."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page whose links lead to other pages of the site alone."""
    return _OUTSIDE.sub(r"\1 (`\2`)", markdown)
