"""Lark grammars without recursion become regular expressions."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from quire.serving.regular_lark import NotRegular, regular

PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""A patch as agents write it."""

CASES = [
    ('start: "a" "b"', ["ab"], ["a", "abb"]),
    ('start: a | B\na: "x"+\nB.2: /[0-9]{2}/', ["x", "xx", "12"], ["", "1", "x1"]),
    ('?start: ["no"] ("a".."c")~2..3', ["ab", "nocab"], ["a", "abd", "abca"]),
    ('start: "A.B"i // a comment\n', ["a.b", "A.B"], ["aXb"]),
    ('start: WORD " " N\n%import common.WORD\n%import common.INT -> N', ["abc 12"], ["abc"]),
    ('start: /a\\/b/ "\\n" "\\"q\\""', ['a/b\n"q"'], ["a/b"]),
    (
        PATCH,
        [
            "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch\n",
            "*** Begin Patch\n*** Update File: b\n@@ def f\n-a\n+b\n c\n*** End Patch",
        ],
        ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\nx\n*** End Patch"],
    ),
]


@pytest.mark.parametrize(("grammar", "texts", "others"), CASES)
def test_the_expression_matches_what_the_grammar_does(
    grammar: str, texts: list[str], others: list[str]
) -> None:
    found = re.compile(regular(grammar))
    assert all(found.fullmatch(each) for each in texts)
    assert not any(found.fullmatch(each) for each in others)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start? ")"', "'start' is recursive"),
        ("start: other", "'other' is not defined"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("start: X\n%import common.C_COMMENT -> X", "common.C_COMMENT"),
        ('start: "a" @', "'@' is not understood"),
        ('start: ("a"', "missing"),
        ("begin: /a/", "'start' is not defined"),
        ("", "does not begin with a rule"),
        ("a", "does not begin with a rule"),
        ('"a" start: "b"', "does not begin with a rule"),
        ('start: "a"..B', "'B' is not understood"),
        ('start: "a"..', "'' is not understood"),
        ("start: " + "(" * 999 + '"a"' + ")" * 999, "nested too deeply"),
        ("start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(999)), "nested too deeply"),
    ],
)
def test_others_say_why_not(grammar: str, reason: str) -> None:
    with pytest.raises(NotRegular, match=re.escape(reason)):
        regular(grammar)


@pytest.mark.parametrize("joint", [" ", "|"])
def test_a_short_grammar_of_a_long_expression_takes_little_memory(joint: str) -> None:
    parts = {"start": joint.join(["many"] * 2_000), "many": "some " * 60, "some": f'"{"x" * 1000}"'}
    grammar = "\n".join(f"{name}: {part}" for name, part in parts.items())
    tracemalloc.start()
    try:
        with pytest.raises(NotRegular, match="too long"):
            regular(grammar)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20
