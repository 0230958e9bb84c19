"""Reports the tests that a run left out, and what they need."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import pytest

_MODULE = re.compile(r"could not import '([^']+)'")
_EXTRAS = {
    "torch": "oracle",
    "transformers": "oracle",
    "mlx_lm": "oracle",
    "peft": "oracle",
    "av": "media",
    "pypdfium2": "media",
    "playwright.sync_api": "test",
    "ray": "ray",
}
"""The extra of the package that brings a module."""


def summary(skipped: Iterable[pytest.TestReport | pytest.CollectReport]) -> Iterator[str]:
    """Yield a line for each reason, the commonest first: how many tests, and what they lack."""
    for reason, count in Counter(map(_reason, skipped)).most_common():
        yield f"{count} skipped: {reason}"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    text = text.removeprefix("Skipped: ")
    if module := _MODULE.match(text):
        name = module[1]
        extra = _EXTRAS.get(name) or _EXTRAS.get(name.partition(".")[0])
        hint = f' (pip install -e ".[{extra}]")' if extra else ""
        return f"{name} is not installed{hint}"
    return text
