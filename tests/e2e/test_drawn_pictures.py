"""The embedded model about pictures as people draw them: any size, any place, their own words."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from tests.e2e.client import CHAT, Client, at_once
from tests.e2e.drawn import Drawn, circles, drawings, pair_of_circles


def ask(client: Client, drawn: Drawn) -> str:
    answer = client.post(CHAT, messages=drawn.messages, temperature=0, max_tokens=24)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_large_circles_and_the_colours_of_two_pictures(client: Client) -> None:
    large = [each for each in circles() if "(256, 256)" in each.about][4::4]
    assert len(large) == 2
    asked = [*large, pair_of_circles()]
    answers = at_once(partial(ask, client, each) for each in asked)
    assert answers == [each.expected for each in asked]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_drawings_are_understood(client: Client) -> None:
    asked = drawings()
    answers: list[str] = []
    for start in range(0, len(asked), 8):
        answers += at_once(partial(ask, client, each) for each in asked[start : start + 8])
    count = Counter(each.category for each in asked)
    right: Counter[str] = Counter()
    for each, answer in zip(asked, answers, strict=True):
        right[each.category] += answer == each.expected
        if answer != each.expected:
            print(f"{each.category}: {each.about}: {answer!r}, not {each.expected!r}")
    print({category: f"{right[category]} of {count[category]}" for category in count})
    assert all(right[category] >= 0.95 * count[category] for category in count)
