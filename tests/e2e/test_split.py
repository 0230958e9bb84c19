"""A model split by layers behind the HTTP side."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.client import Client
from tests.support.child import Child, quire_serve

pytestmark = pytest.mark.slow

PROMPTS = ("Once", "What is 27 plus 45?", "1, 2, 3, " * 40)


def test_answers_are_those_of_one_process(tmp_path: Path, child: Child) -> None:
    with quire_serve(tmp_path, "--pipeline", "1:1") as split:
        assert set(split.samples()) >= {f'quire_rank_work_seconds{{rank="{n}"}}' for n in (0, 1)}
        with Client(split.url) as two, Client(child.url) as one:
            for prompt in PROMPTS:
                got, same = (
                    each.complete(prompt, max_tokens=24, temperature=0)["choices"]
                    for each in (two, one)
                )
                assert got == same
        split.wait_idle()
