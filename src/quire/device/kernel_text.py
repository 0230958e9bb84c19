"""Kernels' sources, as MLX compiles them at first use."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files


@cache
def kernel_text(package: str, name: str) -> str:
    """A file of `sources/` beside a package, without comments: MLX hashes the text at each call."""
    text = files(package).joinpath("sources", name).read_text()
    text = re.sub(r"\s*//.*", "", text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip()) + "\n"
