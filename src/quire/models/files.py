"""Reading the JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.core.errors import ModelError


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        ModelError: the file cannot be read, or holds something else; names it.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds {type(content).__name__}, not an object")
    return content
