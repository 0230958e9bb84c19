"""A split model behind the HTTP side."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.client import COMPLETIONS, Client
from tests.support.child import Child, quire_serve
from tests.support.waiting import HANG_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize(
        "split",
        [("--tensor-parallel", "2"), ("--pipeline", "1:1")],
        ids=["each layer", "by layers"],
    ),
]

PROMPTS = ("Once", "What is 27 plus 45?", "1, 2, 3, " * 40)
SOON_S = 20.0
"""Well below any limit after which a process that waits for another would give up by itself."""


def test_answers_are_those_of_one_process(
    tmp_path: Path, child: Child, split: tuple[str, str]
) -> None:
    with quire_serve(tmp_path, *split) as served:
        assert set(served.samples()) >= {f'quire_rank_work_seconds{{rank="{n}"}}' for n in (0, 1)}
        with Client(served.url) as two, Client(child.url) as one:
            for prompt in PROMPTS:
                got, same = (
                    each.complete(prompt, max_tokens=24, temperature=0)["choices"]
                    for each in (two, one)
                )
                assert got == same
        served.wait_idle()


def test_a_process_that_dies_ends_the_server(tmp_path: Path, split: tuple[str, str]) -> None:
    """The stream ends with one error, the log names the process, and none is left."""
    with quire_serve(tmp_path, *split, "--restarts", "0") as served:
        family = psutil.Process(served.process.pid).children(recursive=True)
        (follower,) = [each for each in family if "quire.engine.follower" in each.cmdline()]
        body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{served.url}{COMPLETIONS}", json=body, timeout=HANG_S
        ) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert "error" not in json.loads(next(lines).removeprefix("data: "))
            follower.kill()
            rest = [line.removeprefix("data: ") for line in lines]
        errors = [each for each in rest if each.startswith('{"error"')]
        assert [json.loads(each)["error"]["code"] for each in errors] == ["engine_failure"]
        assert served.process.wait(SOON_S) == 1
        _, left = psutil.wait_procs(family, timeout=SOON_S)
        assert left == []
        assert "process 1 of the split model, on 127.0.0.1, ended (exit code -9)" in (
            served.log.read_text()
        )
