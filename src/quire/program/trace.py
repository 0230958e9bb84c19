"""Traces the program of a step from a model: the model's own code is its only description.

A model is traced at several numbers of rows. Each integer that differs between them becomes a
linear form of the numbers, so one program holds for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_unflatten

from quire.device.device import traced_by
from quire.models.base import ForwardContext, LanguageModel, named_parameters
from quire.program.pieces import at_once
from quire.program.primitives import Primitives, frozen, recorded
from quire.program.tracing import Call, KnownWeights, TracedOperations, TracedStep, Variant
from quire.program.values import Constant, Form, Node, Program, Value

Traced = Callable[[TracedOperations, Mapping[str, mx.array]], Sequence[mx.array]]
"""A function that computes the outputs from the operations and the named fields."""
Field = tuple[tuple[int, ...], mx.Dtype]
"""The shape of a row of an array, and its type."""


HIDDEN = "hidden"
"""The field of final hidden states."""


class NotLinear(Exception):
    """Raised if a model's computation depends on its number of rows other than by linear forms."""


@dataclass(frozen=True, eq=False)
class StepPrograms:
    """The programs of a model for one kind of step.

    Attributes:
        body: from the step to normalised hidden states, `[T, hidden]`.
        head: from `[R, hidden]` to logits `[R, vocab]`.
        joined: the body with fewer products, see `with_matrices_joined`; None if there is none.
        ending: the body, joined if there is such a one, with an end that computes wanted rows, see
            `with_wanted_rows`; None if there is none.
    """

    body: Program
    head: Program
    joined: Program | None = None
    ending: Program | None = None


@dataclass(frozen=True, eq=False)
class BehindStep:
    """A computation that a drafter runs on a step's final hidden states.

    Attributes:
        module: holds its weights.
        run: takes hidden states `[T, hidden]`, the token after each row's, int32 `[T]`, and the
            rows; returns `[T, width]`.
        logits: takes these, and returns logits `[T, vocab]`.
    """

    module: nn.Module
    run: Callable[[mx.array, mx.array, ForwardContext], mx.array]
    logits: Callable[[mx.array], mx.array]


def trace(model: LanguageModel, variant: Variant | None = None) -> StepPrograms:
    """Trace the programs of a model whose weights are loaded. Nothing is computed on the device.

    Args:
        variant: the kind of step; None means text only.

    Raises:
        NotLinear: the model's code depends on the number of rows in another way.
    """
    body = trace_body(model, variant)
    return StepPrograms(body, _trace_head(model, model.logits, body))


def trace_body(model: LanguageModel, variant: Variant | None = None) -> Program:
    """Trace the program up to the hidden states; for arguments and errors see `trace`."""
    how = Variant() if variant is None else variant

    def body(operations: TracedOperations, given: Mapping[str, mx.array]) -> list[mx.array]:
        return [model(TracedStep(operations, model, how, given=given))]

    return at_once(_traced(model, body, ("T",), fields=lambda sizes: how.fields(sizes["T"])))


def trace_behind(model: LanguageModel, behind: BehindStep, states: Value) -> StepPrograms:
    """Trace what reads a step's final hidden states, which are the field `HIDDEN` of the body.

    Args:
        model: the model of the step.
        states: the hidden states, as the program of the step returns them.

    Raises:
        NotLinear: as `trace`.
    """
    how, width = Variant(model.position_axes), states.shape[-1]
    assert isinstance(width, int), "the hidden size is fixed"

    def run(operations: TracedOperations, given: Mapping[str, mx.array]) -> list[mx.array]:
        step = TracedStep(operations, model, how, given=given)
        return [behind.run(given[HIDDEN], given["tokens"], step)]

    def fields(sizes: Mapping[str, int]) -> dict[str, mx.array]:
        hidden = mx.zeros((sizes["T"], width), states.dtype)
        return how.fields(sizes["T"]) | {HIDDEN: hidden}

    body = at_once(_traced(behind.module, run, ("T",), fields=fields))
    return StepPrograms(body, _trace_head(behind.module, behind.logits, body))


def _trace_head(
    module: nn.Module, logits: Callable[[mx.array], mx.array], body: Program
) -> Program:
    """Trace a function from a body's rows to logits."""
    hidden = body.values[body.outputs[0]]
    width = hidden.shape[-1]
    assert isinstance(width, int), "the hidden size is fixed"

    def head(operations: TracedOperations, given: Mapping[str, mx.array]) -> list[mx.array]:
        return [logits(given[HIDDEN])]

    def rows(sizes: Mapping[str, int]) -> dict[str, mx.array]:
        return {HIDDEN: mx.zeros((sizes["R"], width), hidden.dtype)}

    return at_once(_traced(module, head, ("R",), fields=rows))


def steps_of(model: LanguageModel) -> Variant:
    """Return the kind of step that holds text and, if the model has encoders, media rows."""
    encoders = model.encoders.values()
    if not encoders:
        return Variant()
    hidden, _ = _text_step(model, KnownWeights(named_parameters(model)))
    levels = max(each.levels for each in encoders)
    media = hidden.shape[-1]
    return Variant(model.position_axes, media=media, levels=levels, dtype=hidden.dtype)


def trace_rows(module: nn.Module, fields: Mapping[str, Field]) -> Program:
    """Trace a module that treats each of `T` rows alone, and touches no state.

    Args:
        fields: the shape of a row and the type of each argument, by name.

    Raises:
        NotLinear: as `trace`.
    """

    def run(operations: TracedOperations, given: Mapping[str, mx.array]) -> Sequence[mx.array]:
        outputs: Sequence[mx.array] = module(**given)
        return outputs

    def rows(sizes: Mapping[str, int]) -> dict[str, mx.array]:
        return {name: mx.zeros((sizes["T"], *row), dtype) for name, (row, dtype) in fields.items()}

    return at_once(_traced(module, run, ("T",), fields=rows))


def trace_encoder(
    model: LanguageModel, kind: str, shape: tuple[int, ...]
) -> Generator[None, None, Program]:
    """Trace the program that encodes items of one shape. The model may run between two pieces.

    Its field "features" holds the features of `N` items one after the other, its outputs are the
    levels of rows, see `MediaEncoder.__call__`. Without the symbol `N` it is for one item.

    Args:
        kind: the media kind.
        shape: an item's shape.

    Raises:
        NotLinear: the encoder's code depends on the number of items in another way.
    """

    def encode(operations: TracedOperations, given: Mapping[str, mx.array]) -> Sequence[mx.array]:
        return model.encoders[kind](given["features"], shape)

    encoder = model.encoders[kind]
    size = encoder.feature_bytes(shape)

    def features(sizes: Mapping[str, int]) -> dict[str, mx.array]:
        return {"features": mx.zeros(sizes.get("N", 1) * size, dtype=mx.uint8)}

    symbols = ("N",) if encoder.takes_several else ()
    return _traced(model, encode, symbols, fields=features)


def multiplied(model: LanguageModel) -> frozenset[str]:
    """Return the paths of the weights that a step multiplies rows by."""
    weights = KnownWeights(named_parameters(model))
    found: set[str] = set()
    for call in _text_step(model, weights)[1]:
        if call.kind in ("linear", "packed_linear"):
            found.add(call.attributes["weight"].name)
        elif call.kind == "experts":
            experts = call.attributes["experts"].value
            found |= {weights.weight(each.array).name for each in experts.matrices}
    return frozenset(found)


def _text_step(model: LanguageModel, weights: KnownWeights) -> tuple[mx.array, list[Call]]:
    """Run a model on a step of text; return the hidden states, whose numbers mean nothing, and the
    calls.
    """
    how = Variant()
    with traced_by(operations := TracedOperations(weights)):
        hidden = model(TracedStep(operations, model, how, given=how.fields(rows=5)))
    return hidden, operations.calls


def _traced(
    model: nn.Module,
    function: Traced,
    symbols: tuple[str, ...],
    fields: Callable[[Mapping[str, int]], dict[str, mx.array]],
) -> Generator[None, None, Program]:
    """Trace at one number of rows in each piece, and merge the programs in the last one."""
    points, programs = _points(symbols), list[Program]()
    for point in points:
        if programs:
            yield
        programs.append(_at_one_size(model, function, fields(point)))
    yield
    return _unified(programs, points)


def _points(symbols: Sequence[str]) -> list[dict[str, int]]:
    """Choose the sizes to trace at: a base point, one more for each symbol, and one for checking.

    Sizes of one point differ from each other.
    """
    base = {name: 5 + 2 * i for i, name in enumerate(symbols)}
    steps = [base | {name: base[name] + 2} for name in symbols]
    return [base, *steps, {name: size + 4 for name, size in base.items()}]


def _at_one_size(model: nn.Module, function: Traced, given: Mapping[str, mx.array]) -> Program:
    """Trace the program at one number of rows.

    The first run fills caches that modules make on their first call, and shows the calls' shapes.
    In the second run, weights and the results of calls are inputs of the recorded function.
    """
    parameters = named_parameters(model)
    weights = KnownWeights(parameters)
    with traced_by(first := TracedOperations(weights)):
        function(first, given)
    holes = [mx.zeros(*out) for call in first.calls for out in call.outputs]
    traced: list[TracedOperations] = []

    def run(*arrays: mx.array) -> list[mx.array]:
        fields, rest = arrays[: len(given)], arrays[len(given) :]
        results, own = rest[: len(holes)], rest[len(holes) :]
        for name, array in zip(parameters, own, strict=True):
            weights.stand_in(name, array)
        model.update(tree_unflatten(list(zip(parameters, own, strict=True))))
        with traced_by(operations := TracedOperations(weights, iter(results))):
            traced.append(operations)
            made = function(operations, dict(zip(given, fields, strict=True)))
        return [*(x for call in operations.calls for x in call.operands.values()), *made]

    try:
        recording = recorded(run, [*given.values(), *holes, *parameters.values()])
    finally:
        model.update(tree_unflatten(list(parameters.items())))
    return _Assembly(recording, list(given), parameters).program(traced[-1].calls)


class _Assembly:
    """Merges recorded primitives and noted calls into one program.

    Calls keep their order; each follows the primitives that it needs.
    """

    def __init__(
        self, recording: Primitives, fields: Sequence[str], parameters: Mapping[str, mx.array]
    ) -> None:
        self._recording, self._fields, self._parameters = recording, fields, parameters
        self._ids: dict[str, int] = {}
        self._values: dict[int, Value] = {}
        self._nodes: list[Node] = []
        self._makers = {out[0]: event for event in recording.primitives for out in event["outputs"]}

    def program(self, calls: Sequence[Call]) -> Program:
        constants = {
            self._new(name, array.shape, array.dtype): Constant("", array)
            for name, array in self._recording.constants
        }
        inputs = iter(self._recording.inputs)
        outputs = (name for name, *_ in self._recording.outputs)
        given = {field: self._new(*next(inputs)) for field in self._fields}
        results = [[self._new(*next(inputs)) for _ in call.outputs] for call in calls]
        for name, array in self._parameters.items():
            constants[self._new(*next(inputs))] = Constant(name, array)
        for call, made in zip(calls, results, strict=True):
            own = tuple(self._computed(next(outputs)) for _ in call.operands)
            roles = tuple(call.operands)
            self._nodes.append(
                Node(call.kind, own, tuple(made), roles=roles, attributes=call.attributes)
            )
        final = tuple(self._computed(name) for name in outputs)
        read = {id for node in self._nodes for id in node.inputs} | set(final)
        return Program(
            (),
            given,
            {id: constant for id, constant in constants.items() if id in read},
            values=self._values,
            nodes=tuple(self._nodes),
            outputs=final,
        )

    def _new(self, name: str, shape: Sequence[int], dtype: mx.Dtype) -> int:
        self._ids[name] = id = len(self._ids)
        self._values[id] = Value(tuple(shape), dtype)
        return id

    def _computed(self, name: str) -> int:
        """Add the nodes that compute an array; return the array's id."""
        pending = [name]
        while pending:
            if pending[-1] in self._ids:
                pending.pop()
                continue
            event = self._makers[pending[-1]]
            missing = [each[0] for each in event["inputs"] if each[0] not in self._ids]
            pending += missing
            if not missing:
                own = tuple(self._ids[each[0]] for each in event["inputs"])
                made = tuple(self._new(*each) for each in event["outputs"])
                arguments = tuple(map(frozen, event["arguments"]))
                self._nodes.append(Node(event["name"], own, made, roles=(), arguments=arguments))
        return self._ids[name]


# -- one program from several ----------------------------------------------------------------------


def _unified(programs: Sequence[Program], points: Sequence[Mapping[str, int]]) -> Program:
    """Merge the programs of one model at several sizes.

    Args:
        points: the sizes, see `_points`.

    Raises:
        NotLinear: they differ in more than integers, or these are not linear in the sizes.
    """
    first, symbols = programs[0], tuple(points[0])
    if len({len(each.nodes) for each in programs}) > 1:
        raise NotLinear(f"{[len(each.nodes) for each in programs]} nodes at {points}")
    nodes = []
    for same in zip(*(each.nodes for each in programs), strict=True):
        if len({(each.kind, each.inputs, each.outputs) for each in same}) > 1:
            raise NotLinear(f"{same[0].kind} is {same[-1].kind} at other sizes")
        arguments = _fitted([each.arguments for each in same], points)
        nodes.append(replace(same[0], arguments=arguments))
    for id, constant in first.constants.items():
        others = [each.constants[id].array for each in programs[1:]]
        if any(not _equal(constant.array, other) for other in others):
            raise NotLinear(f"a constant of shape {constant.array.shape}")
    values = {
        id: Value(_fitted([each.values[id].shape for each in programs], points), value.dtype)
        for id, value in first.values.items()
    }
    return replace(first, symbols=symbols, nodes=tuple(nodes), values=values)


def _fitted(found: Sequence[Any], points: Sequence[Mapping[str, int]]) -> Any:
    """Merge nested tuples of several sizes: equal leaves stay, integers that differ become linear
    forms.
    """
    if isinstance(found[0], tuple):
        if len({len(each) for each in found}) > 1:
            raise NotLinear(f"sequences {found[0]} and {found[-1]}")
        return tuple(_fitted(each, points) for each in zip(*found, strict=True))
    if all(each == found[0] for each in found):
        return found[0]
    if not isinstance(found[0], int | float):
        raise NotLinear(f"arguments {found[0]} and {found[-1]}")
    base = points[0]
    slopes = {
        symbol: (found[i + 1] - found[0]) / (points[i + 1][symbol] - base[symbol])
        for i, symbol in enumerate(base)
    }
    terms = tuple((symbol, int(slope)) for symbol, slope in slopes.items() if slope)
    form = Form(int(found[0] - sum(base[s] * slope for s, slope in slopes.items())), terms)
    if any(form.at(point) != each for point, each in zip(points, found, strict=True)):
        raise NotLinear(f"numbers {found} at {points}")
    return form


def _equal(a: mx.array, b: mx.array) -> bool:
    if a is b:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.array_equal(_host(a), _host(b)))


def _host(array: mx.array) -> np.ndarray[Any, Any]:
    wide = array.astype(mx.float32) if array.dtype == mx.bfloat16 else array
    return np.array(wide)
