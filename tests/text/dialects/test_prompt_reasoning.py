"""Reasoning that the prompt opens, with marks that are tokens and marks that are ordinary text."""

from __future__ import annotations

import pytest

from quire.core.request import FinishReason
from quire.text.dialects import DIALECTS
from tests.text.dialects.scripts import STOP_TOKEN, answer

THINKING = {
    name: dialect.reasoning
    for name, dialect in DIALECTS.items()
    if dialect.reasoning is not None and dialect.frame is None and name != "gemma4"
}
TURN = f"Hi<think>{STOP_TOKEN}user: a </think>b <think>{STOP_TOKEN}assistant\n"


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("name", THINKING)
def test_prompt_opens_reasoning(name: str, with_ids: bool) -> None:
    opening, closing = THINKING[name]
    for started in ("", "\n", "\nBut"):
        found = answer(
            name, f"Hm.{closing}\n\nFour.", prompt=TURN + opening + started, with_ids=with_ids
        )
        assert (found.reasoning, found.text) == ("Hm.", "Four.")


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize("name", THINKING)
def test_prompt_that_closes_reasoning_leaves_an_answer(name: str, with_ids: bool) -> None:
    opening, closing = THINKING[name]
    for prompt in (f"{TURN}{opening}\n\n{closing}\n\n", TURN, f"{TURN}{closing}"):
        assert answer(name, "Four.", prompt=prompt, with_ids=with_ids).text == "Four."


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [("<think>", True), ("Say <think>\n", True), ("Say <think> please: ", False), ("Hi", False)],
)
def test_text_that_no_token_parts_from_the_user_opens_reasoning_only_at_its_end(
    prompt: str, thinks: bool
) -> None:
    found = answer("olmo3", "x", prompt=prompt, with_ids=False, finish=FinishReason.LENGTH)
    assert (found.reasoning, found.text) == (("x", "") if thinks else ("", "x"))
