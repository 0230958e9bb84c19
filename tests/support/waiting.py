"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

_EVERY_S = 0.01


def wait_until(
    holds: Callable[[], object], seconds: float, otherwise: Callable[[], str] | None = None
) -> None:
    """Returns as soon as `holds()` is true.

    Args:
        seconds: a guard against a hang, not a measure: the test fails when they are over.
        otherwise: what to say then.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        said = "it did not happen in time" if otherwise is None else otherwise()
        assert time.monotonic() < deadline, said
        time.sleep(_EVERY_S)
