"""Calls whose arguments cannot be told apart by position name them.

The fourth and later arguments of a call, and a bare None, True or False, are keywords. Exceptions
are listed here, each group with its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "quire"
POSITIONAL = 3
"""The most arguments that a call gives by position."""

PYTHON = {
    *("CDLL", "Field", "Path", "anext", "bisect_left", "call_later", "debug", "error", "filter"),
    *("finalize", "get", "getattr", "info", "max", "min", "next", "partial", "pop", "put"),
    *("reschedule", "select", "set_level", "set_result", "setblocking", "setdefault", "slice"),
    *("to_thread", "warning", "zip"),
}
"""Functions of Python and libraries: their arguments have no names, or are any number. In
`Field(None, ...)` the first argument is the default, as Pydantic writes it."""

ARRAYS = {
    *("addmm", "array", "einsum", "eval", "frombuffer", "gather_qmm", "gated_delta_update"),
    *("layer_norm", "quantized_matmul", "reshape", "rms_norm", "transpose"),
}
"""Functions of MLX and NumPy, in the order of their papers or of axes."""

FOREIGN = {"nvrtcCreateProgram", "_KernelNode"}
"""A function and a structure of CUDA, by ctypes."""

COMPILED = {"_extension", "_native", "_ops", "native", "ops", "segment"}
"""Objects of this project's compiled extensions, whose functions take arguments by position."""

CALLBACKS = {"advance", "answer", "compile", "on_progress", "turn", "values"}
"""Values of type `Callable`, whose arguments have no names."""

ATTENTION = {"attend"}
"""Attention takes `layer, q, k, v`: one more than other calls."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def called(call: ast.Call) -> tuple[str, str]:
    """Return a call's function and the last name of the object that it is looked up on."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id, ""
    if isinstance(function, ast.Attribute):
        owner = function.value
        return function.attr, getattr(owner, "attr", getattr(owner, "id", ""))
    return "", ""


def late(call: ast.Call, allowed: int) -> Iterator[ast.expr]:
    """Yield the positional arguments of a call that could be keywords and have to be."""
    stars = [at for at, each in enumerate(call.args) if isinstance(each, ast.Starred)]
    first = max(stars, default=-1) + 1  # an argument before a starred one has no name
    for at, argument in enumerate(call.args[first:], first):
        bare = isinstance(argument, ast.Constant) and (
            argument.value is None or isinstance(argument.value, bool)
        )
        if bare or at >= allowed:
            yield argument


def breaches(tree: ast.Module, variadic: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield the calls that give too many arguments by position, by their lines.

    Args:
        variadic: functions that take any number of arguments.
    """
    excepted = PYTHON | ARRAYS | FOREIGN | CALLBACKS | variadic
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name, owner = called(node)
        if not name or name in excepted or owner in COMPILED:
            continue
        if any(late(node, POSITIONAL + (name in ATTENTION))):
            yield node.lineno, ast.unparse(node)


def variadic(trees: Iterable[ast.Module]) -> frozenset[str]:
    """Return the names of functions that take any number of positional arguments."""
    return frozenset(
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.args.vararg is not None
    )


def test_calls_name_their_arguments() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
    assert trees
    any_number = variadic(trees.values())
    found = [
        f"{path.relative_to(SOURCE)}:{line}: {call}"
        for path, tree in trees.items()
        for line, call in breaches(tree, any_number)
    ]
    assert found == []


def test_breaches_are_found() -> None:
    text = """
def many(*given): ...
f(1, 2, 3, 4)
f(None)
f(a, False, b=3)
f(*given, 2, 3, 4)
f(1, 2, 3, d=4, e=True)
f(0, 1)
f(1, 2, 3, *given)
many(1, 2, 3, 4, None)
step.attend(layer, q, k, v)
step.attend(layer, q, k, v, scale)
kept.pop(1, None)
"""
    tree = ast.parse(text)
    assert [line for line, _ in breaches(tree, variadic([tree]))] == [3, 4, 5, 6, 12]
