"""Which NVIDIA card a process of a split model sees."""

from __future__ import annotations

import pytest

from quire.device import cards


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(cards, "_LISTED", "3, GPU-5")
    return monkeypatch


def test_each_process_sees_one_of_the_cards_that_were_given(listed: pytest.MonkeyPatch) -> None:
    assert cards.count_cards() == 2
    assert [cards.card_of(place) for place in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": each} for each in ("3", "GPU-5", "")
    ]


def test_the_card_of_the_leading_process_hides_none_from_others(
    listed: pytest.MonkeyPatch,
) -> None:
    listed.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5")
    cards.see_one_card(0)
    assert cards.card_of(1) == {"CUDA_VISIBLE_DEVICES": "GPU-5"}
