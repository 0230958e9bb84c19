"""The end of a run says what was skipped for want of what."""

from __future__ import annotations

import pytest

from tests.support.skips import summary


def report(reason: str) -> pytest.TestReport:
    where = ("tests/a.py", 1, f"Skipped: {reason}")
    return pytest.TestReport("tests/a.py::b", ("a.py", 1, "b"), {}, "skipped", where, "setup")


def test_reasons_are_counted_and_missing_modules_get_their_extra() -> None:
    no_torch = "could not import 'torch': No module named 'torch'"
    found = [report("no browser is installed"), report(no_torch), report(no_torch)]
    assert list(summary(found)) == [
        '2 skipped: torch is not installed (pip install -e ".[oracle]")',
        "1 skipped: no browser is installed",
    ]
