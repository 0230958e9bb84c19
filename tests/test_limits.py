"""The sizes that keep files, classes and functions readable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "quire"
FILE_LINES, FUNCTION_LINES, METHODS = 450, 60, 20

Function = ast.FunctionDef | ast.AsyncFunctionDef


def breaches(text: str) -> Iterator[str]:
    """Yield what in a module's source is over a limit."""
    if (lines := len(text.splitlines())) > FILE_LINES:
        yield f"{lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function):
            lines = (node.end_lineno or 0) - node.lineno + 1
            if lines > FUNCTION_LINES:
                yield f"{node.name}: {lines} lines"
        elif isinstance(node, ast.ClassDef):
            methods = sum(isinstance(each, Function) for each in node.body)
            if methods > METHODS:
                yield f"{node.name}: {methods} methods"


def test_within_limits() -> None:
    paths = sorted(SOURCE.rglob("*.py"))
    assert paths
    found = [f"{path}: {each}" for path in paths for each in breaches(path.read_text())]
    assert found == []


def test_breaches_are_found() -> None:
    body = "\n".join(f"    def f{number}(self): pass" for number in range(METHODS + 1))
    long = "\n".join("    x = 1" for _ in range(FUNCTION_LINES))
    text = f"class A:\n{body}\ndef g():\n{long}\n" + "y = 2\n" * FILE_LINES
    lines = f"{len(text.splitlines())} lines"
    assert list(breaches(text)) == [lines, "A: 21 methods", "g: 61 lines"]
