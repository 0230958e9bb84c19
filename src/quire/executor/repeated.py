"""Steps whose shapes were seen before. MLX builds their graphs by itself, without the model's code.

`mx.compile` keeps the graph of a call and builds it again, in about a quarter of the time that
Python takes. A step qualifies if its arrays determine its graph: see `StepInputs.alike`. Its inputs
are tokens, positions, all that the host makes for attention and states, and the pools.

The first shapes of each KV format are verified against the model's code.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence

import mlx.core as mx

from quire.cache.pools import Pools
from quire.core.kv_format import KVFormat
from quire.device.dtypes import noting
from quire.device.verified import Check, Verification, verified_kernels
from quire.executor.agreement import tolerance_of, whole_error
from quire.executor.computed import Computed
from quire.executor.inputs import StepInputs, StepUses
from quire.models.base import ForwardContext

log = logging.getLogger("quire.executor")

_MOST = 64
"""Most shapes of steps that are known at a time. A graph takes a few hundred bytes a node."""
_VERIFIED = 8
"""Shapes of a KV format that are verified. Their steps run the model's code, too."""
_COPIED_BYTES = 512 << 20
"""Largest size of all pools for a verification, which holds up to three copies of them."""

_Key = tuple[object, ...]
_Model = Callable[[ForwardContext], mx.array]
_Logits = Callable[[mx.array], mx.array]


class RepeatedSteps:
    """Computes steps, by compiled graphs where their shapes repeat.

    The first step of a shape runs the model's code, the second compiles it, and those after it
    reuse the graph. If a graph fails or computes something else than the model's code, no graphs
    are used from then on.

    Args:
        logits: computes logits `[T, vocab]` of the model's output, for graphs alone.
        compiles: whether graphs are compiled at all.
        identity: identity of the weights, under which verification results are kept; empty keeps
            none.
    """

    def __init__(
        self, model: _Model, pools: Pools, *, logits: _Logits, compiles: bool, identity: str = ""
    ) -> None:
        self._model, self._logits = model, logits
        self._pools, self._compiles = pools, compiles
        self._identity = identity
        self._uses: dict[KVFormat, StepUses] = {}
        """The attention and states that the model's layers use, by the step's KV format."""
        self._graphs: OrderedDict[_Key, _Graph | None] = OrderedDict()
        """Graphs by the shapes of steps; None for a shape that is not compiled yet."""
        self._agreeing: defaultdict[KVFormat, set[_Key]] = defaultdict(set)
        """Shapes of a format that agreed with the model's code, in this run or an earlier one."""
        self._since_replay = 2
        """Steps since the last one that a graph built. Two may not be evaluated yet."""

    def clear(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()

    def fail(self) -> None:
        """Forget all graphs after a failed step. Use none any more if one may have built it."""
        if self._since_replay < 2:
            self._stop("a step failed that `mx.compile` may have built")
        self.clear()

    def compute(self, inputs: StepInputs) -> Computed:
        """Compute a step's layers, and write to the pools."""
        self._since_replay += 1
        format = inputs.alike if self._compiles else None
        if format is None:
            return Computed(self._model(inputs))
        if format not in self._uses:
            hidden = self._model(inputs)
            self._uses[format] = inputs.uses
            return Computed(hidden)
        try:
            found = self._repeated(inputs, format)
        except Exception as problem:
            # Compiled steps only save time, and MLX may refuse to compile a graph with any type of
            # error. The model's code computes the same step, and the log line gives the error.
            self._stop(str(problem))
            found = None
        return Computed(self._model(inputs)) if found is None else found

    def _repeated(self, inputs: StepInputs, format: KVFormat) -> Computed | None:
        """Compute a step by the graph of its shape. Return None if there is none."""
        made = [[inputs.tokens, inputs.positions], *inputs.rehearse(self._uses[format])]
        key = (format, *(tuple(array.shape for array in each) for each in made))
        if key not in self._graphs:
            self._graphs[key] = None
            if len(self._graphs) > _MOST:
                self._graphs.popitem(last=False)
            return None
        self._graphs.move_to_end(key)
        given = [array for each in made for array in each]
        graph = self._graphs[key]
        if graph is None:
            graph = _Graph(self._model, self._logits, self._pools)
            if not self._trusts(format, key):
                return self._verified(inputs, given, key=key, graph=graph)
            self._graphs[key] = graph
        computed = graph.compute(inputs, given)
        self._since_replay = 0
        return computed

    def _trusts(self, format: KVFormat, key: _Key) -> bool:
        """Return whether a shape needs no verification, because it or enough others agreed."""
        agreeing = self._agreeing[format]
        if key in agreeing or len(agreeing) >= _VERIFIED:
            return True
        held = bool(self._identity) and verified_kernels().holds(self._verification(key))
        if held:
            agreeing.add(key)
        return held

    def _verification(self, key: _Key) -> Verification:
        return Verification(Check.COMPILED_STEPS_AGREE, (self._identity, *key))

    def _verified(
        self, inputs: StepInputs, given: Sequence[mx.array], *, key: _Key, graph: _Graph
    ) -> Computed | None:
        """Compute a step both ways, and keep the graph if they agree. Return the model's result.

        All pools are kept meanwhile, so that they can be put back even if the graph fails while
        it is evaluated. Return None, and verify nothing, if they are too large for that.
        """
        pools, format = self._pools, inputs.sequences[0].format
        if sum(array.nbytes for array in pools.arrays()) > _COPIED_BYTES:
            return None
        mx.synchronize()
        mx.eval(pools.arrays())
        before = _references(pools.arrays())
        try:
            found = _outputs(graph.compute(inputs, given)) + _references(pools.arrays())
            mx.eval(found)
        finally:
            pools.replace(iter(before))
        hidden = self._model(inputs)
        computed = Computed(hidden, self._logits(hidden))
        expected = _outputs(computed) + pools.arrays()
        mx.eval(expected)
        error = max(whole_error(*each) for each in zip(found, expected, strict=True))
        log.debug("compiled step of %d rows: relative error %.2g", len(hidden), error)
        if error > tolerance_of(format):
            self._stop(f"relative error {error:.2g} against the model's code")
            return computed
        self._graphs[key] = graph
        self._agreeing[format].add(key)
        if self._identity:
            verified_kernels().add(self._verification(key))
        return computed

    def _stop(self, why: str) -> None:
        """Use no graphs from now on."""
        log.warning("Compiled steps disabled: %s. Python builds every step.", why)
        self._compiles, self._since_replay = False, 2
        self.clear()


def _outputs(computed: Computed) -> list[mx.array]:
    """Return the arrays that a step computes besides the pools: hidden states and logits."""
    assert computed.logits is not None, "graphs compute logits"
    return [computed.hidden, computed.logits]


def _references(arrays: Sequence[mx.array]) -> list[mx.array]:
    """Return the same arrays as other objects, which keep their contents when those are written."""
    return [array[...] for array in arrays]


class _UnknownArrays(Exception):
    """A model reads arrays of the host that `StepInputs.rehearse` did not make."""

    def __init__(self) -> None:
        super().__init__("the model reads unforeseen arrays")


class _Graph:
    """The compiled graph of steps of one shape."""

    def __init__(self, model: _Model, logits: _Logits, pools: Pools) -> None:
        self._model, self._logits, self._pools = model, logits, pools
        self._call = mx.compile(self._compute)
        self._step: tuple[StepInputs, Sequence[mx.array]] | None = None
        """The step that is computed, and its arrays in the order of the inputs."""

    def compute(self, inputs: StepInputs, given: Sequence[mx.array]) -> Computed:
        """Compute a step with the arrays `given`, and write to the pools."""
        self._step = inputs, given
        try:
            hidden, logits, written = self._call(given, self._pools.arrays())
        finally:
            self._step = None
        self._pools.replace(iter(written))
        return Computed(hidden, logits)

    def _compute(
        self, given: Sequence[mx.array], pools: Sequence[mx.array]
    ) -> tuple[mx.array, mx.array, list[mx.array]]:
        """Run the model with other arrays in the place of a step's own and of the pools'."""
        assert self._step is not None, "a step is computed"
        inputs, own = self._step
        kept, own_pools = _references(own), self._pools.arrays()
        _set(own, given)
        self._pools.replace(iter(pools))
        try:
            with noting() as late:
                hidden = self._model(inputs)
                logits = self._logits(hidden)
            if late:
                raise _UnknownArrays
            return hidden, logits, self._pools.arrays()
        finally:
            _set(own, kept)
            self._pools.replace(iter(own_pools))


def _set(arrays: Sequence[mx.array], others: Sequence[mx.array]) -> None:
    """Let arrays that objects of a step hold stand for others of the same shapes."""
    for array, other in zip(arrays, others, strict=True):
        array[...] = other
