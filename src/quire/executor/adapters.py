"""LoRA adapters chosen by request: low-rank products added to the model's own, row by row.

Each row of a step names an adapter, or none. For each matrix, the factors of all adapters in memory
form one stack, padded to one rank; its first entry is zero. All rows of a step are multiplied
together, each by its own entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from quire.core.errors import ModelError
from quire.device.device import current_device
from quire.device.low_rank import runs_of
from quire.device.operations import Operations
from quire.device.rotation import Rotate
from quire.device.weights import (
    ExpertMatrices,
    GatedExperts,
    GatedMatrices,
    HeadPart,
    Matrix,
    PackedWeight,
    PlainExperts,
)
from quire.models.base import LanguageModel, named_parameters
from quire.models.weights.low_rank import LowRank
from quire.program.trace import multiplied
from quire.scheduler.plan import ScheduledSequence


@dataclass(frozen=True, slots=True, eq=False)
class _Stack:
    """The factors of one matrix: `[adapters, rank, in]` and `[adapters, rank, out]`.

    Attributes:
        experts: of a stack of matrices of experts, how many these are; the stack has factors for
            each adapter and expert then, those of one adapter side by side. 0 for one matrix.
    """

    inner: mx.array
    outer: mx.array
    experts: int = 0

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes + self.outer.nbytes


@dataclass(frozen=True, eq=False)
class Factors:
    """The factors of the adapters in memory. Another object takes its place when these change.

    Attributes:
        stacks: by the identity of the weight's array.
        by_name: first and second factors of each stack by the weight's name.
    """

    stacks: Mapping[int, _Stack]
    by_name: Mapping[str, tuple[mx.array, mx.array]]

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks.values())


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedRows:
    """The rows of a step of which some have adapters.

    Attributes:
        operations: the device's operations, with low-rank products added.
        numbers: each row's entry of the stacks, `[T]` of `Operations.index_type`.
    """

    factors: Factors
    operations: Operations
    numbers: mx.array


class Adapters:
    """The LoRA adapters in memory. Owned by the engine.

    Args:
        model: the model, with weights loaded.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._parameters = named_parameters(model)
        self._multiplied: frozenset[str] | None = None
        self._loaded: dict[str, LowRank] = {}
        self._factors = Factors({}, {})

    def __contains__(self, name: str) -> bool:
        return name in self._loaded

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._loaded)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the factors take."""
        return self._factors.nbytes

    def identity(self, name: str) -> str:
        """Return the part of block keys that separates an adapter's blocks; empty without an
        adapter.
        """
        return self._loaded[name].identity if name else ""

    def add(self, name: str, adapter: LowRank) -> None:
        """Add an adapter. Requests may name it from the next step on.

        Raises:
            ModelError: a matrix that it changes is not multiplied by rows.
        """
        if self._multiplied is None:
            self._multiplied = multiplied(self._model)
        used = {}
        for path, factors in adapter.factors.items():
            if f"{path}.weight" in self._multiplied:
                used[path] = factors
            elif factors[1].any().item():  # untrained factors change nothing
                raise ModelError(
                    f"adapter {name!r}: {path!r} does not support adapters of requests; merge "
                    "the adapter into the weights (--adapter FOLDER)"
                )
        self._loaded[name] = LowRank(used, adapter.identity)
        self._restack()

    def remove(self, name: str) -> None:
        """Remove an adapter that no request in flight uses."""
        del self._loaded[name]
        self._restack()

    def rows(
        self, sequences: Sequence[ScheduledSequence], wanted: Sequence[int] | None
    ) -> AdaptedRows | None:
        """Return the rows of a step with their factors; None if no row uses an adapter.

        Args:
            sequences: in the order of the step's rows.
            wanted: indices of the rows that are sampled, with which the model may continue alone;
                None means all.
        """
        if not [each for each in sequences if each.adapter]:
            return None
        numbers = {name: number for number, name in enumerate(self._loaded, 1)}
        rows = [numbers.get(s.adapter, 0) for s in sequences for _ in range(s.count)]
        base = current_device().operations
        choice = _Choice(rows, base.index_type)
        choices = {len(rows): choice}
        if wanted is not None:
            own = _Choice([rows[row] for row in wanted], base.index_type)
            choices.setdefault(len(wanted), own)
        adapted = _AdaptedOperations(base, self._factors.stacks, choices)
        return AdaptedRows(self._factors, cast(Operations, adapted), choice.numbers)

    def _restack(self) -> None:
        paths = dict.fromkeys(path for each in self._loaded.values() for path in each.factors)
        stacks = {path: self._stack(path) for path in paths}
        mx.eval([[stack.inner, stack.outer] for stack in stacks.values()])
        self._factors = Factors(
            {id(self._parameters[f"{path}.weight"]): stack for path, stack in stacks.items()},
            {f"{path}.weight": (stack.inner, stack.outer) for path, stack in stacks.items()},
        )

    def _stack(self, path: str) -> _Stack:
        found = [each.factors.get(path) for each in self._loaded.values()]
        some = next(factors for factors in found if factors is not None)
        rank = max(factors[0].shape[-1] for factors in found if factors is not None)
        (*lead, inputs, _), (*_, outputs), dtype = some[0].shape, some[1].shape, some[0].dtype
        none = mx.zeros((*lead, inputs, rank), dtype), mx.zeros((*lead, rank, outputs), dtype)
        inner, outer = list[mx.array](), list[mx.array]()
        for factors in (none, *found):
            one, other = factors or none
            padding = [*[(0, 0)] * len(lead), (0, rank - one.shape[-1]), (0, 0)]
            inner.append(mx.pad(one.swapaxes(-1, -2), padding))
            outer.append(mx.pad(other, padding))
        if not lead:
            return _Stack(mx.stack(inner), mx.stack(outer))
        return _Stack(mx.concatenate(inner), mx.concatenate(outer), experts=lead[0])


class _Choice:
    """For each row, the index of its adapter in a stack."""

    def __init__(self, rows: list[int], dtype: mx.Dtype) -> None:
        self._rows = rows
        self.numbers = mx.array(rows, dtype)
        self._runs = runs_of(rows)

    def add_product(
        self, y: mx.array, x: mx.array, stack: _Stack, operations: Operations
    ) -> mx.array:
        """Add the low-rank products of rows `[T, ..., in]` to `[T, ..., out]`."""
        return operations.add_low_rank(
            y, x, self.numbers, inner=stack.inner, outer=stack.outer, runs=self._runs
        )

    def repeated(self, times: int) -> _Choice:
        """Return the choice for rows each of which stands so many times, one after the other."""
        return _Choice([row for row in self._rows for _ in range(times)], self.numbers.dtype)

    def expert_product(self, x: mx.array, chosen: mx.array, stack: _Stack) -> mx.array:
        """Return the low-rank products by experts.

        Args:
            x: `[T, in]` or `[T, k, in]`.
            chosen: `[T, k]`, indices of experts.

        Returns:
            `[T, k, out]`.
        """
        numbers = chosen.astype(self.numbers.dtype) + self.numbers[:, None] * stack.experts
        rows = (x[:, None, None] if x.ndim == 2 else x[:, :, None]).astype(stack.inner.dtype)
        inner = _gathered(rows, stack.inner.swapaxes(-1, -2), numbers)
        return _gathered(inner, stack.outer, numbers).squeeze(-2).astype(x.dtype)


def _gathered(x: mx.array, matrices: mx.array, numbers: mx.array) -> mx.array:
    """Multiply `[T, k or 1, 1, in]` by matrices `[n, in, out]` chosen by `[T, k]`."""
    if x.dtype in current_device().operations.gather_mm_dtypes:
        return mx.gather_mm(x, matrices, rhs_indices=numbers)
    return x @ matrices[numbers]


class _AdaptedOperations:
    """The device's operations, with low-rank products added where a matrix has adapters.

    A fused operation over such a matrix is computed as single products. Everything else is
    delegated to the device.
    """

    def __init__(
        self, base: Operations, stacks: Mapping[int, _Stack], choices: dict[int, _Choice]
    ) -> None:
        self._base = base
        self._stacks = stacks
        self._choices = choices

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)

    def linear(self, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        return self._added(x, weight, self._base.linear(x, weight, bias))

    def packed_linear(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        return self._added(x, weight.codes, self._base.packed_linear(x, weight, bias))

    def product(self, x: mx.array, matrix: Matrix) -> mx.array:
        weight = matrix.weight
        array = weight if isinstance(weight, mx.array) else weight.codes
        return self._added(x, array, self._base.product(x, matrix))

    def products(self, x: mx.array, matrices: Sequence[Matrix]) -> list[mx.array]:
        if not any(map(self._adapts, matrices)):
            return self._base.products(x, matrices)
        return [self.product(x, each) for each in matrices]

    def gated_mlp(self, x: mx.array, mlp: GatedMatrices) -> mx.array:
        if not any(map(self._adapts, (mlp.gate, mlp.up, mlp.down))):
            return self._base.gated_mlp(x, mlp)
        return Operations.gated_mlp(cast(Operations, self), x, mlp)

    def heads(
        self, x: mx.array, parts: Sequence[HeadPart], eps: float, rotate: Rotate | None
    ) -> list[mx.array]:
        if not any(part.matrix is not None and self._adapts(part.matrix) for part in parts):
            return self._base.heads(x, parts, eps, rotate=rotate)
        return Operations.heads(cast(Operations, self), x, parts, eps=eps, rotate=rotate)

    def experts(
        self, x: mx.array, chosen: mx.array, weights: mx.array, experts: GatedExperts | PlainExperts
    ) -> mx.array:
        if not any(id(each.array) in self._stacks for each in experts.matrices):
            return self._base.experts(x, chosen, weights, experts=experts)
        up = self.expert_product(x, chosen, experts.up)
        if isinstance(experts, PlainExperts):
            inner = self._base.activate(experts.activation, up)
        else:
            gate = self.expert_product(x, chosen, experts.gate)
            inner = self._base.gated(experts.gating, gate, up)
        return self._base.weighted_sum(self.expert_product(inner, chosen, experts.down), weights)

    def expert_product(self, x: mx.array, chosen: mx.array, matrices: ExpertMatrices) -> mx.array:
        y = self._base.expert_product(x, chosen, matrices)
        stack = self._stacks.get(id(matrices.array))
        return y if stack is None else y + self._of(len(x)).expert_product(x, chosen, stack)

    def _of(self, rows: int) -> _Choice:
        """Return the choice for so many rows; a mixture may take each row several times."""
        if rows not in self._choices:
            step = max(each for each in self._choices if rows % each == 0)
            self._choices[rows] = self._choices[step].repeated(rows // step)
        return self._choices[rows]

    def _adapts(self, matrix: Matrix) -> bool:
        weight = matrix.weight
        return id(weight if isinstance(weight, mx.array) else weight.codes) in self._stacks

    def _added(self, x: mx.array, weight: mx.array, y: mx.array) -> mx.array:
        stack = self._stacks.get(id(weight))
        if stack is None:
            return y
        return self._of(len(x)).add_product(y, x, stack, operations=self._base)
