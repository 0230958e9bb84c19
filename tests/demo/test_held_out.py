"""Training never sees a test item: the split hangs on the item alone."""

import random
from collections.abc import Callable

import pytest

pytest.importorskip("PIL")

from training.chat import answer_of, prompt_of
from training.data import text, tools
from training.data.item import Item, distinct, draw, split_of

GENERATORS = (
    text.repeat,
    text.arithmetic,
    text.counting,
    text.facts,
    text.persona,
    text.memory,
    text.thinking,
    text.json_object,
    tools.one_call,
    tools.several_calls,
    tools.no_call,
    tools.answer_from_result,
)


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda generator: generator.__name__)
def test_no_identity_is_in_both_splits(generator: Callable[[random.Random], Item]) -> None:
    rng = random.Random(11)
    test = distinct(generator, rng, "test")
    held_out = {next(test).key for _ in range(40)}
    trained = {draw(generator, rng, "train").key for _ in range(400)}
    assert not held_out & trained
    assert {split_of(key) for key in held_out} == {"test"}


def test_a_held_out_sum_stands_in_no_other_skill() -> None:
    """Sums inside personas, memories and tool questions come from the training split."""
    rng = random.Random(12)
    for _ in range(300):
        assert split_of(text.aside(rng).key) == "train"


def test_a_conversation_reads_as_one_text() -> None:
    """Prompt and answer together are what the template makes of the conversation afterwards."""
    rng = random.Random(13)
    item = draw(tools.answer_from_result, rng, "train")
    whole = prompt_of(item) + answer_of(item)
    assert whole.startswith("<bos><|turn>system\n")
    assert whole.endswith("<turn|>")
    assert whole.count("<|turn>model\n") == 1
