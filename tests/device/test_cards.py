"""Each process of a split model sees one NVIDIA card."""

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


def test_without_a_list_cards_count_from_nought(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may have the devices nvidia4 and nvidia5 alone, which CUDA calls 0 and 1."""
    monkeypatch.setattr(cards, "_LISTED", None)
    monkeypatch.setattr(cards.Path, "glob", lambda *_: iter(["/dev/nvidia4", "/dev/nvidia5"]))
    assert cards.count_cards() == 2
    assert cards.card_of(1) == {"CUDA_VISIBLE_DEVICES": "1"}
    assert cards.card_of(2) == {"CUDA_VISIBLE_DEVICES": ""}
    monkeypatch.setattr(cards.Path, "glob", lambda *_: iter([]))
    assert cards.card_of(1) == {"CUDA_VISIBLE_DEVICES": "1"}  # perhaps they are not to be seen
