"""Quire: an inference server that answers many requests at once, each as if it were alone."""

from __future__ import annotations

TYPE_CHECKING = False  # not typing's: nothing slow is imported before the command handles Ctrl-C
if TYPE_CHECKING:
    from typing import Any

    from quire.llm import LLM as LLM
    from quire.llm import AsyncLLM as AsyncLLM

__version__ = "0.2.0"
__all__ = ["LLM", "AsyncLLM", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the Python API when it is first asked for: the command line needs none of it."""
    if name not in ("LLM", "AsyncLLM"):
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from quire import llm

    return getattr(llm, name)
