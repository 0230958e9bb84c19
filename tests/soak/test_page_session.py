"""No word of a long session with the page is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.soak.page_session import work
from tests.support.browser import browser, page  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ACTS = 150


def test_no_word_of_a_long_session_is_lost(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    ledger = work(browser, tmp_path, seed=43, goes_on=lambda session: session.acts < ACTS)
    assert not ledger.faults(), "\n".join(ledger.session.done)
