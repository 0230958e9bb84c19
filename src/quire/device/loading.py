"""Loads MLX, or reports how to install it."""

from __future__ import annotations

import sys

from quire.core.errors import QuireError

_HOW = (
    "pip install 'quire-serve[cpu]' for a machine without a GPU, 'quire-serve[cuda12]' or "
    "'quire-serve[cuda13]' for an NVIDIA GPU"
)


def load_mlx() -> None:
    """Import MLX, which takes a moment.

    Raises:
        QuireError: it is not installed, or has no backend for this machine.
    """
    try:
        import mlx.core
    except ImportError as error:
        how = "pip install mlx" if sys.platform == "darwin" else _HOW
        raise QuireError(f"MLX cannot be loaded ({error}). Install it: {how}.") from error
    assert mlx.core
