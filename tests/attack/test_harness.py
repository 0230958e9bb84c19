"""The harness sees what it is there to see."""

from __future__ import annotations

import httpx
import pytest

from tests.attack.harness import Seen, Victim


def test_ordinary_requests_are_no_attack(victim: Victim) -> None:
    with victim.watched() as seen:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        for _ in range(5):
            answer = httpx.post(f"{victim.url}/v1/chat/completions", json=body, timeout=60)
            assert answer.status_code == 200
    seen.check()
    assert seen.healths > 0


@pytest.mark.parametrize(
    "fault",
    [
        {"answers": ["b"]},
        {"answers": []},
        {"gap_s": 60.0},
        {"health_s": 60.0},
        {"turns": [30.0, 2000.0]},
        {"peak": 2 << 30},
        {"grown": lambda: 1 << 30},
        {"errors": ["the connection was lost"]},
    ],
    ids=lambda fault: next(iter(fault)),
)
def test_what_a_neighbour_notices_is_a_fault(
    fault: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.waiting.HANG_S", 0.0)
    seen = Seen(**({"expected": "a", "answers": ["a"]} | fault))  # type: ignore[arg-type]
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        seen.check()
