"""Events do not depend on how an output is cut into pieces, whatever it says; nor does the time
that they take grow faster than the output."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest

from quire.core.request import FinishReason
from quire.text.dialects import DIALECTS, Tool
from quire.text.dialects.tag_flow import TagFlow
from tests.text.dialects import hostile
from tests.text.dialects.scripts import MARKERS, TOOLS
from tests.text.dialects.test_properties import TOOL

ENDS = [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]


def check(dialect: str, seed: int) -> None:
    """Asserts that one output in one piece, in characters and at random cuts says the same."""
    draw = random.Random(f"{dialect} {seed}")
    text = hostile.output(draw, dialect)
    with_ids, finish = draw.random() < 0.5, draw.choice(ENDS)
    prompt = draw.choice(["", "", *MARKERS[dialect]])
    units = hostile.units(dialect, text, with_ids=with_ids)

    def played(cut: Callable[[str], list[str]]) -> list[tuple[str, str]]:
        given = [(is_marker, [part] if is_marker else cut(part)) for is_marker, part in units]
        return hostile.play(
            dialect, given, [TOOL, *TOOLS], with_ids=with_ids, prompt=prompt, finish=finish
        )

    whole = played(lambda part: [part])
    assert played(list) == whole, (text, with_ids, finish, prompt)
    for mean in (3, 20):
        pieces = played(lambda part, mean=mean: hostile.cut_at_random(draw, part, mean))
        assert pieces == whole, (text, with_ids, finish, prompt)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_events_do_not_depend_on_cuts(dialect: str) -> None:
    """Of 29 dialects by 6 outputs; each way to hold text back is shared by several dialects."""
    for seed in range(6):
        check(dialect, seed)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_events_of_1000_outputs_do_not_depend_on_cuts(dialect: str) -> None:
    for seed in range(25, 1025):
        check(dialect, seed)


class Counting(TagFlow):
    """Counts the characters that it holds whenever a piece has come."""

    examined = 0

    def feed(self, text: str, *, marker: bool = False) -> str:
        written = super().feed(text, marker=marker)
        Counting.examined += len(text) + len(self._text)
        return written


VALUES = {
    "numbers": json.dumps(list(range(10_000))),
    "signs": "[" + "<1, </p, \n<" * 4_000 + "]",
    "tags": "[" + "</parameter> \n <parameter=x" * 1_500 + "]",
    "spaces": "[" + "</parameter>" + " " * 40_000 + "]",
}
IN_TAGS = {
    "qwen3_coder": "<tool_call>\n<function=make>\n<parameter=o>\n{}\n</parameter>\n</function>\n",
    "seed": "<seed:tool_call>\n<function=make>\n<parameter=o>{}</parameter>\n</function>\n",
    "minimax": '<minimax:tool_call>\n<invoke name="make">\n<parameter name="o">{}</parameter>\n'
    "</invoke>\n",
}


@pytest.mark.parametrize("dialect", IN_TAGS)
@pytest.mark.parametrize("value", ["numbers", "signs"])
def test_values_that_are_no_text_are_looked_at_once(
    dialect: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.text.dialects.readers.TagFlow", Counting)
    monkeypatch.setattr(Counting, "examined", 0)
    text = IN_TAGS[dialect].format(VALUES[value])
    tool = Tool("make", {"properties": {"o": {"type": "array"}}})
    pieces = [text[at : at + 3] for at in range(0, len(text), 3)]
    found = hostile.play(dialect, [(False, pieces)], [tool], with_ids=False)
    assert [kind for kind, _ in found] == ["ToolCallStarted", "ToolCallArguments", "ToolCallEnded"]
    assert len(text) < Counting.examined < 8 * len(text)
