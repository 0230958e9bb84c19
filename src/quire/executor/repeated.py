"""Steps whose shapes were seen before. MLX builds their graphs by itself, without the model's code.

`mx.compile` keeps the graph of a call and builds it again, in about a quarter of the time that
Python takes. A step qualifies if its arrays determine its graph: see `StepInputs.alike`. Its inputs
are tokens, positions, all that the host makes for attention and states, and the pools.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

import mlx.core as mx

from quire.cache.pools import Pools
from quire.core.kv_format import KVFormat
from quire.device.dtypes import noting
from quire.executor.inputs import StepInputs, StepUses
from quire.models.base import ForwardContext

log = logging.getLogger("quire.executor")

_MOST = 64
"""Most shapes of steps that are known at a time. A graph takes a few hundred bytes a node."""

_Key = tuple[object, ...]
_Model = Callable[[ForwardContext], mx.array]


class RepeatedSteps:
    """Computes the hidden states of steps, by compiled graphs where their shapes repeat.

    The first step of a shape runs the model's code, the second compiles it, and those after it
    reuse the graph.

    Args:
        compiles: whether graphs are compiled at all.
    """

    def __init__(self, model: _Model, pools: Pools, *, compiles: bool) -> None:
        self._model, self._pools, self._compiles = model, pools, compiles
        self._uses: dict[KVFormat, StepUses] = {}
        """What the model's layers ask of a step, by format."""
        self._graphs: OrderedDict[_Key, _Graph | None] = OrderedDict()
        """Graphs by the shapes of steps; None after the first step of a shape."""

    def clear(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()

    def hidden(self, inputs: StepInputs) -> mx.array:
        """Return the model's output for a step, and write to the pools."""
        format = inputs.alike if self._compiles else None
        if format is None:
            return self._model(inputs)
        if (uses := self._uses.get(format)) is None:
            hidden = self._model(inputs)
            self._uses[format] = inputs.uses
            return hidden
        given = [[inputs.tokens, inputs.positions], *inputs.rehearse(uses)]
        key = (format, *(tuple(tuple(array.shape) for array in each) for each in given))
        if key not in self._graphs:
            self._graphs[key] = None
            if len(self._graphs) > _MOST:
                self._graphs.popitem(last=False)
            return self._model(inputs)
        self._graphs.move_to_end(key)
        graph = self._graphs[key]
        if graph is None:
            graph = self._graphs[key] = _Graph(self._model, self._pools)
        try:
            return graph.hidden(inputs, [array for each in given for array in each])
        except _UnknownArrays:
            log.warning("Graphs of steps are not kept: the model reads unforeseen arrays")
            self._compiles = False
            self.clear()
            return self._model(inputs)


class _UnknownArrays(Exception):
    """A model reads arrays of the host that `StepInputs.rehearse` did not make."""


class _Graph:
    """The compiled graph of steps of one shape."""

    def __init__(self, model: _Model, pools: Pools) -> None:
        self._model, self._pools = model, pools
        self._call = mx.compile(self._compute)
        self._step: tuple[StepInputs, Sequence[mx.array]] | None = None
        """The step that is computed, and its arrays in the order of the inputs."""

    def hidden(self, inputs: StepInputs, given: Sequence[mx.array]) -> mx.array:
        """Return the model's output for a step with the arrays `given`, and write to the pools."""
        self._step = inputs, given
        try:
            hidden, written = self._call(given, self._pools.arrays())
        finally:
            self._step = None
        self._pools.replace(iter(written))
        return hidden

    def _compute(
        self, given: Sequence[mx.array], pools: Sequence[mx.array]
    ) -> tuple[mx.array, list[mx.array]]:
        """Run the model with other arrays in the place of a step's own and of the pools'."""
        assert self._step is not None, "a step is computed"
        inputs, own = self._step
        kept, own_pools = [each[...] for each in own], self._pools.arrays()
        _set(own, given)
        self._pools.replace(iter(pools))
        try:
            with noting() as late:
                hidden = self._model(inputs)
            if late:
                raise _UnknownArrays
            return hidden, self._pools.arrays()
        finally:
            _set(own, kept)
            self._pools.replace(iter(own_pools))


def _set(arrays: Sequence[mx.array], others: Sequence[mx.array]) -> None:
    """Let arrays that objects of a step hold stand for others of the same shapes."""
    for array, other in zip(arrays, others, strict=True):
        array[...] = other
