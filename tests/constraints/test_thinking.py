"""Thoughts that end by themselves, and thoughts that are ended."""

from __future__ import annotations

import pytest

from quire.constraints.thinking import ThinkingState
from quire.core.request import ThinkingBudget

START, END, TEXT = 90, 91, 1


def answer(state: ThinkingState, wishes: list[int]) -> list[int]:
    """Return the tokens of a model that wants `wishes`, but does as it is forced."""
    out = []
    for wish in wishes:
        forced = state.forced()
        token = wish if forced is None else forced
        state.accept(token)
        out.append(token)
    return out


def test_a_thought_is_ended_when_its_budget_is_spent() -> None:
    state = ThinkingState(ThinkingBudget(3, (), (END,)))
    assert answer(state, [TEXT] * 6) == [TEXT, TEXT, TEXT, END, TEXT, TEXT]
    assert not state.thinking


def test_all_end_ids_are_forced_in_order() -> None:
    state = ThinkingState(ThinkingBudget(1, (), (7, 8, END)))
    assert answer(state, [TEXT] * 5) == [TEXT, 7, 8, END, TEXT]


def test_a_thought_within_its_budget_is_left_alone() -> None:
    state = ThinkingState(ThinkingBudget(3, (), (END,)))
    wishes = [TEXT, TEXT, END, *[TEXT] * 10]
    assert answer(state, wishes) == wishes


def test_a_thought_that_ends_on_its_last_token_is_not_ended_twice() -> None:
    state = ThinkingState(ThinkingBudget(2, (), (END,)))
    assert answer(state, [TEXT, END, TEXT, TEXT]) == [TEXT, END, TEXT, TEXT]


def test_what_the_model_has_started_of_the_end_is_only_completed() -> None:
    state = ThinkingState(ThinkingBudget(2, (), (7, 8, END)))
    assert answer(state, [TEXT, 7, TEXT, TEXT, TEXT]) == [TEXT, 7, 8, END, TEXT]


def test_nothing_counts_before_the_thought_starts() -> None:
    state = ThinkingState(ThinkingBudget(2, (START, 5), (END,)))
    wishes = [TEXT, START, TEXT, START, 5, TEXT, TEXT, TEXT, TEXT]
    assert answer(state, wishes) == [*wishes[:7], END, TEXT]


def test_an_answer_without_a_thought_is_never_touched() -> None:
    state = ThinkingState(ThinkingBudget(0, (START,), (END,)))
    assert answer(state, [TEXT] * 20) == [TEXT] * 20


def test_the_budget_is_for_all_thoughts_together() -> None:
    state = ThinkingState(ThinkingBudget(3, (START,), (END,)))
    wishes = [START, TEXT, TEXT, END, TEXT, START, TEXT, TEXT, TEXT, START, TEXT, TEXT]
    assert answer(state, wishes) == [
        *[START, TEXT, TEXT, END, TEXT],
        *[START, TEXT, END, TEXT],
        *[START, END, TEXT],
    ]


@pytest.mark.parametrize("start", [(), (START,)])
def test_a_budget_of_nothing_ends_the_thought_at_once(start: tuple[int, ...]) -> None:
    state = ThinkingState(ThinkingBudget(0, start, (7, END)))
    assert answer(state, [*start, TEXT, TEXT, TEXT]) == [*start, 7, END, TEXT]


def test_another_token_than_the_forced_one_is_an_error() -> None:
    state = ThinkingState(ThinkingBudget(0, (), (END,)))
    with pytest.raises(ValueError, match="forced"):
        state.accept(TEXT)


def test_a_budget_must_be_able_to_end_a_thought() -> None:
    with pytest.raises(ValueError, match="end"):
        ThinkingState(ThinkingBudget(5, (), ()))


def test_an_end_of_ordinary_tokens_counts_however_it_is_cut() -> None:
    """If only `ids` counted, the budget would end reasoning that has ended already."""
    texts = {7: b"</", 8: b"think", END: b">", 5: b">\n\n", 6: b".</", TEXT: b"x"}
    wishes = [TEXT, 6, 8, 5, *[TEXT] * 9]
    budget = ThinkingBudget(5, (), (7, 8, END))
    spelled = ThinkingState(budget, lambda ids: b"".join(texts[each] for each in ids))
    assert answer(spelled, wishes) == wishes
    assert answer(ThinkingState(budget), wishes) != wishes
