"""Stand-ins that a model sees while it is traced: operations and a step that record each call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import mlx.core as mx

from quire.cache.specs import KVLayout, RecurrentState
from quire.device.activations import Gating
from quire.device.mixture import Router
from quire.device.operations import Operations
from quire.device.ranks import Part
from quire.device.recurrence import DeltaGates
from quire.device.rotation import Rotate
from quire.device.weights import ExpertMatrices, GatedExperts, PackedWeight, PlainExperts
from quire.models.base import ForwardContext, LanguageModel
from quire.models.media_rows import MediaRows
from quire.program.values import Program, Weight

Output = tuple[tuple[int, ...], mx.Dtype]


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an operation while a model is traced.

    Attributes:
        operands: arguments that are arrays depending on the step, by parameter.
        outputs: shape and type of each result.
        attributes: all other arguments, by parameter.
    """

    kind: str
    operands: Mapping[str, mx.array]
    outputs: tuple[Output, ...]
    attributes: Mapping[str, Any]


class KnownWeights:
    """The weights of a model, found by the identity of their arrays or of stand-ins for these.

    Args:
        parameters: the weights by their paths. Each may have a stand-in while the model is traced.
    """

    def __init__(self, parameters: Mapping[str, mx.array]) -> None:
        self._known = {id(array): (name, array) for name, array in parameters.items()}
        self._parameters = parameters

    def stand_in(self, name: str, array: mx.array) -> None:
        """Let `array` stand for the weight of that name from now on."""
        self._known[id(array)] = name, self._parameters[name]

    def knows(self, array: mx.array) -> bool:
        """Whether an array is a weight, or stands for one."""
        return id(array) in self._known

    def weight(self, value: Any) -> Weight:
        """Return an array or a dataclass of arrays, with stand-ins replaced by weights."""
        first, real = self._resolved(value)
        return Weight(first, real)

    def _resolved(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, mx.array):
            return self._known.get(id(value), ("", value))
        if not is_dataclass(value) or isinstance(value, type):
            return "", value
        first, changed = "", {}
        for each in fields(value):
            name, changed[each.name] = self._resolved(getattr(value, each.name))
            first = first or name
        return first, replace(value, **changed)


class TracedOperations(Operations):
    """Operations that record their calls.

    Args:
        holes: arrays that the calls return, in order; without them they return zeros.
    """

    def __init__(self, weights: KnownWeights, holes: Iterator[mx.array] | None = None) -> None:
        self._weights, self._holes = weights, holes
        self.calls: list[Call] = []

    def record(
        self, kind: str, parameters: Mapping[str, Any], *outputs: Output, **attributes: Any
    ) -> list[mx.array]:
        """Record a call, and return stand-ins for its outputs.

        Args:
            parameters: arrays, weights, dataclasses of weights, and None for what is absent.
        """
        operands: dict[str, mx.array] = {}
        own: dict[str, Any] = {}
        for name, value in parameters.items():
            if value is None:
                own[name] = None
            elif isinstance(value, mx.array) and not self._weights.knows(value):
                operands[name] = value
            else:
                own[name] = self._weights.weight(value)
        self.calls.append(Call(kind, operands, outputs=outputs, attributes=own | attributes))
        if self._holes is None:
            return [mx.zeros(*each) for each in outputs]
        return [next(self._holes) for _ in outputs]

    def record_one(
        self, kind: str, parameters: Mapping[str, Any], output: Output, **attributes: Any
    ) -> mx.array:
        """Record a call with one output, and return a stand-in for it; see `record`."""
        (found,) = self.record(kind, parameters, output, **attributes)
        return found

    # -- operations ------------------------------------------------------------------------------

    def linear(self, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        out = (*x.shape[:-1], weight.shape[0]), x.dtype
        return self.record_one("linear", {"x": x, "weight": weight, "bias": bias}, out)

    def packed_linear(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        out = (*x.shape[:-1], weight.codes.shape[-2]), x.dtype
        return self.record_one("packed_linear", {"x": x, "weight": weight, "bias": bias}, out)

    def summed(self, x: mx.array, part: Part) -> mx.array:
        return self.record_one("summed", {"x": x}, (x.shape, x.dtype), part=part)

    def gathered(self, x: mx.array, part: Part) -> mx.array:
        out = (*x.shape[:-1], x.shape[-1] * part.size), x.dtype
        return self.record_one("gathered", {"x": x}, out, part=part)

    def embed(
        self, tokens: mx.array, table: mx.array | PackedWeight, dtype: mx.Dtype | None
    ) -> mx.array:
        if isinstance(table, mx.array):
            out = (*tokens.shape, table.shape[-1]), dtype or table.dtype
        else:
            width = table.codes.shape[-1] * 32 // table.packing.bits
            out = (*tokens.shape, width), _row_type(table, dtype)
        return self.record_one("embed", {"tokens": tokens, "table": table}, out, dtype=dtype)

    def experts(
        self, x: mx.array, chosen: mx.array, weights: mx.array, experts: GatedExperts | PlainExperts
    ) -> mx.array:
        given = {"x": x, "chosen": chosen, "weights": weights, "experts": experts}
        return self.record_one("experts", given, (x.shape, x.dtype))

    def by_head(self, x: mx.array, matrices: ExpertMatrices) -> mx.array:
        weight = matrices.weight
        outputs = (weight if isinstance(weight, mx.array) else weight.codes).shape[1]
        out = (*x.shape[:2], outputs), x.dtype
        return self.record_one("by_head", {"x": x, "matrices": matrices}, out)

    def route(
        self,
        logits: mx.array,
        correction: mx.array | None,
        per_expert: mx.array | None,
        router: Router,
    ) -> tuple[mx.array, mx.array]:
        given = {"logits": logits, "correction": correction, "per_expert": per_expert}
        shape = len(logits), router.k
        outputs = (shape, mx.int32), (shape, mx.float32)
        chosen, weights = self.record("route", given, *outputs, router=router)
        return chosen, weights

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        return self.record_one("rms_norm", {"x": x, "weight": weight}, (x.shape, x.dtype), eps=eps)

    def layer_norm(
        self, x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float
    ) -> mx.array:
        given = {"x": x, "weight": weight, "bias": bias}
        return self.record_one("layer_norm", given, (x.shape, x.dtype), eps=eps)

    def rotation(self, cosines: mx.array, sines: mx.array, neighbours: bool) -> Rotate:
        def rotate(x: mx.array) -> mx.array:
            given = {"x": x, "cosines": cosines, "sines": sines}
            return self.record_one("rotate", given, (x.shape, x.dtype), neighbours=neighbours)

        return rotate

    def attend_groups(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        scale: float,
        *,
        reach: int | None = None,
        lengths: mx.array | None = None,
    ) -> mx.array:
        given = {"q": q, "k": k, "v": v, "lengths": lengths}
        out = (*q.shape[:3], v.shape[3]), q.dtype
        return self.record_one("attend_groups", given, out, scale=scale, reach=reach)

    def best(self, logits: mx.array) -> mx.array:
        return self.record_one("best", {"logits": logits}, (logits.shape[:-1], mx.int32))

    def likeliest(self, logits: mx.array) -> tuple[mx.array, mx.array]:
        shape = logits.shape[:-1]
        outputs = (shape, mx.int32), (shape, mx.float32)
        token, chance = self.record("likeliest", {"logits": logits}, *outputs)
        return token, chance

    def activate(self, name: str, x: mx.array) -> mx.array:
        return self.record_one("activate", {"x": x}, (x.shape, x.dtype), name=name)

    def gated(self, gating: Gating, x: mx.array, y: mx.array) -> mx.array:
        dtype = mx.result_type(x, y) if gating.plain else x.dtype
        return self.record_one("gated", {"x": x, "y": y}, (x.shape, dtype), gating=gating)


def _row_type(table: PackedWeight, dtype: mx.Dtype | None) -> mx.Dtype:
    """Return the type of the rows that `Operations.embed` looks up in codes."""
    one = mx.zeros(1, dtype=mx.int32)
    return Operations().embed(one, table, dtype).dtype  # lazy: only the type is asked for


@dataclass(frozen=True)
class Variant:
    """The kind of step that a program is for. Its numbers of rows stay open.

    Attributes:
        axes: axes of positions; 0 means int32 `[T]`, more mean float32 `[T, axes]`, which the model
            sees as `[axes, T]`.
        media: width of the media rows that replace embeddings; 0 for none.
        levels: arrays of media rows; see `MediaRows`.
        dtype: type of media rows.
    """

    axes: int = 0
    media: int = 0
    levels: int = 1
    dtype: mx.Dtype = mx.float32

    def fields(self, rows: int) -> dict[str, mx.array]:
        """Return arrays with the shapes and types of a step of so many rows, by name."""
        shape, dtype = ((rows, self.axes), mx.float32) if self.axes else ((rows,), mx.int32)
        made = {"tokens": mx.zeros(rows, mx.int32), "positions": mx.zeros(shape, dtype)}
        if self.media:
            made["media.placed"] = mx.zeros((rows, 1), dtype=mx.bool_)
            for level in range(self.levels):
                made[f"media.{level}"] = mx.zeros((rows, self.media), dtype=self.dtype)
        return made


def position_axes(program: Program) -> int:
    """Return the axes of positions as a program declares them; see `Variant`."""
    _, *axes = program.values[program.fields["positions"]].shape
    return axes[0] if axes and isinstance(axes[0], int) else 0


def declared_positions(positions: mx.array, axes: int) -> mx.array:
    """Return a step's positions as a program with so many axes declares them: int32 `[T]`, or
    float32 `[T, axes]`.

    Args:
        positions: `[T]`, the same in each axis, or `[axes, T]`; if the program has none, all axes
            must agree.
    """
    if not axes:
        return (positions[0] if positions.ndim > 1 else positions).astype(mx.int32)
    rows = positions.shape[-1]
    return mx.broadcast_to(positions.T.reshape(rows, -1).astype(mx.float32), (rows, axes))


class TracedStep(ForwardContext):
    """The step that a model sees while it is traced.

    Args:
        given: the fields of `variant`.
    """

    def __init__(
        self,
        operations: TracedOperations,
        model: LanguageModel,
        variant: Variant,
        given: Mapping[str, mx.array],
    ) -> None:
        self._model, self._operations = model, operations
        self._owner = KVLayout.of(model.layout).owner
        media = None
        if variant.media:
            levels = tuple(given[f"media.{level}"] for level in range(variant.levels))
            media = MediaRows(given["media.placed"], levels)
        super().__init__(media=media)
        positions = given["positions"]
        self.tokens, self.positions = given["tokens"], positions.T if variant.axes else positions

    def attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array | None,
        v: mx.array | None,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: mx.array | None = None,
        chosen_by: int | None = None,
    ) -> mx.array:
        kept = self._model.layout[self._owner[layer]].kept
        if kept is None:
            assert v is not None, "a layer that keeps nothing gets its values"
            width = v.shape[-1]
        else:
            assert kept.stored is not None, "layers that attend keep keys and values"
            width = kept.stored.value_dim
        return self._operations.record_one(
            "attend",
            {"q": q, "k": k, "v": v, "sinks": sinks},
            ((*q.shape[:2], width), q.dtype),
            layer=layer,
            scale=scale,
            softcap=softcap,
            chosen_by=chosen_by,
        )

    def choose(self, layer: int, q: mx.array, k: mx.array, weights: mx.array, limit: int) -> None:
        self._operations.record(
            "choose", {"q": q, "k": k, "weights": weights}, layer=layer, limit=limit
        )

    def convolve(
        self, layer: int, x: mx.array, taps: mx.array, bias: mx.array | None, *, silu: bool
    ) -> mx.array:
        given = {"x": x, "taps": taps, "bias": bias}
        return self._operations.record_one(
            "convolve", given, (x.shape, x.dtype), layer=layer, silu=silu
        )

    def delta_rule(
        self, layer: int, mixed: mx.array, gates: DeltaGates, key_heads: int
    ) -> mx.array:
        spec = self._model.layout[layer]
        assert isinstance(spec, RecurrentState)
        heads, value_dim, _ = {name: shape for name, shape, _ in spec.arrays}["delta"]
        given = {each.name: getattr(gates, each.name) for each in fields(gates)}
        bounds = {name: given.pop(name) for name in ("most_correction", "most_forgotten")}
        return self._operations.record_one(
            "delta_rule",
            {"mixed": mixed, **given},
            ((len(mixed), heads, value_dim), mixed.dtype),
            layer=layer,
            key_heads=key_heads,
            **bounds,
        )

    def state_space(
        self,
        layer: int,
        values: mx.array,
        keys: mx.array,
        queries: mx.array,
        steps: mx.array,
        rates: mx.array,
    ) -> mx.array:
        given = {"values": values, "keys": keys, "queries": queries, "steps": steps, "rates": rates}
        return self._operations.record_one(
            "state_space", given, (values.shape, values.dtype), layer=layer
        )

    def sampled_rows_only(self) -> None:
        return None
