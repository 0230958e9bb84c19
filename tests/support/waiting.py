"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

HANG_S = 120.0
"""A guard against a hang, not a measure: a machine may be busy with something else for seconds."""
_EVERY_S = 0.01


def wait_until(
    holds: Callable[[], object],
    otherwise: Callable[[], str] | None = None,
    progress: Callable[[], object] | None = None,
) -> None:
    """Returns as soon as `holds()` is true; fails after `HANG_S`.

    Args:
        otherwise: what to say then.
        progress: a value that changes as long as it may still come true; then another `HANG_S` is
            waited.
    """
    deadline = time.monotonic() + HANG_S
    seen = None if progress is None else progress()
    while not holds():
        if time.monotonic() > deadline:
            latest = None if progress is None else progress()
            if latest == seen:
                pytest.fail("it did not happen in time" if otherwise is None else otherwise())
            seen, deadline = latest, time.monotonic() + HANG_S
        time.sleep(_EVERY_S)
