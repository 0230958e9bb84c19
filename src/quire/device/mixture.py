"""Mixtures of experts in MLX's operations, for devices without kernels for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx

from quire.device.activations import Gating
from quire.device.weights import (
    DECODED_MODES,
    ExpertMatrices,
    GatedExperts,
    PackedWeight,
    PlainExperts,
)

# From this many (row, expert) pairs on, sorting them by expert pays: rows of one expert are
# multiplied together instead of one at a time.
_SORT_FROM = 64

_COPIED_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Routing:
    """Choice of a row's `k` best experts by probabilities, as kernels know it.

    Attributes:
        sigmoid: whether each expert has a probability of its own; else all share one softmax.
        normalise: whether the weights of the chosen experts are normalised to sum to one.
        scale: factor of the weights.
        softcap: softcap of the logits, by a hyperbolic tangent; 0 means none.
        groups, best_groups: number of groups of experts, and of the best groups that a row may use.
            A group's score is the sum of its `counted` best experts.
    """

    k: int
    sigmoid: bool
    normalise: bool
    scale: float = 1.0
    softcap: float = 0.0
    groups: int = 1
    best_groups: int = 1
    counted: int = 1


class Router(Protocol):
    """A rule that assigns rows to experts: a frozen dataclass."""

    @property
    def k(self) -> int:
        """Number of experts of a row."""
        ...

    @property
    def corrected(self) -> bool:
        """Whether a learned bias affects the choice."""
        ...

    @property
    def routing(self) -> Routing | None:
        """The rule as kernels know it; None if it is another one."""
        ...

    def route(self, logits: mx.array, correction: mx.array | None) -> tuple[mx.array, mx.array]:
        """Map float32 logits `[T, experts]` to (indices `[T, k]`, weights `[T, k]`)."""
        ...


class ElementwiseOperations(Protocol):
    """The part of a device's operations that is applied between the products of experts."""

    @property
    def gather_mm_dtypes(self) -> Sequence[mx.Dtype]:
        """Matrix types for which `mx.gather_mm` gives correct results."""
        ...

    def activate(self, name: str, x: mx.array) -> mx.array: ...

    def gated(self, gating: Gating, x: mx.array, y: mx.array) -> mx.array: ...


def outputs(
    operations: ElementwiseOperations,
    x: mx.array,
    chosen: mx.array,
    experts: GatedExperts | PlainExperts,
) -> mx.array:
    """Compute `Operations.expert_outputs` in MLX's operations."""
    rows, k = chosen.shape
    if rows * k < _SORT_FROM:
        y = _outputs(operations, x[:, None, None], chosen, experts=experts, ordered=False)
    else:
        flat = chosen.flatten()
        order = mx.argsort(flat).astype(mx.int32)
        y = _outputs(operations, x[order // k][:, None], flat[order], experts=experts, ordered=True)
        y = y[mx.argsort(order).astype(mx.int32)].reshape(rows, k, 1, -1)
    return y.squeeze(-2)


def mixed(y: mx.array, weights: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return the weighted sum `[T, hidden]` of experts' outputs `[T, k, hidden]`."""
    return (weights.astype(dtype)[:, None] @ y).squeeze(1)


def _outputs(
    operations: ElementwiseOperations,
    x: mx.array,
    chosen: mx.array,
    experts: GatedExperts | PlainExperts,
    *,
    ordered: bool,
) -> mx.array:
    """Compute `[..., 1, hidden]` by experts `[...]`, broadcast together: `[..., 1, hidden]`."""
    up = product(operations, x, chosen, matrices=experts.up, ordered=ordered)
    if isinstance(experts, PlainExperts):
        inner = operations.activate(experts.activation, up)
    else:
        gate = product(operations, x, chosen, matrices=experts.gate, ordered=ordered)
        inner = operations.gated(experts.gating, gate, up)
    return product(operations, inner, chosen, matrices=experts.down, ordered=ordered)


def product(
    operations: ElementwiseOperations,
    x: mx.array,
    chosen: mx.array,
    matrices: ExpertMatrices,
    *,
    ordered: bool,
) -> mx.array:
    """Multiply `[..., 1, in]` by matrices of experts `[...]`, broadcast together: `[..., 1,
    out]`.
    """
    weight = matrices.weight
    if isinstance(weight, PackedWeight) and weight.packing.mode in DECODED_MODES:
        y = _by_numbers(operations, x, chosen, weight=weight, ordered=ordered)
    elif isinstance(weight, PackedWeight):
        weight, packing = weight.by_rows(), weight.packing
        y = mx.gather_qmm(
            x,
            weight.codes,
            weight.scales,
            weight.biases,
            rhs_indices=chosen,
            transpose=True,
            group_size=packing.group_size,
            bits=packing.bits,
            mode=packing.mode,
            sorted_indices=ordered,
        )
    else:
        y = _by_floats(operations, x, chosen, weight=weight, ordered=ordered)
    return y if matrices.bias is None else y + matrices.bias[chosen][..., None, :]


def _by_floats(
    operations: ElementwiseOperations,
    x: mx.array,
    chosen: mx.array,
    weight: mx.array,
    *,
    ordered: bool,
) -> mx.array:
    if weight.dtype in operations.gather_mm_dtypes:
        return mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=chosen, sorted_indices=ordered)
    return _by_copies(x, chosen, weight.shape, matrices=lambda numbers: weight[numbers])


def _by_numbers(
    operations: ElementwiseOperations,
    x: mx.array,
    chosen: mx.array,
    weight: PackedWeight,
    *,
    ordered: bool,
) -> mx.array:
    """Return the product by codes that MLX does not multiply by: all experts are decoded, or
    those of few rows.
    """
    experts, outputs, _ = weight.codes.shape
    if chosen.size >= experts and x.dtype in operations.gather_mm_dtypes:
        numbers = weight.unpacked(x.dtype)
        return _by_floats(operations, x, chosen, weight=numbers, ordered=ordered)
    shape = experts, outputs, x.shape[-1]
    return _by_copies(x, chosen, shape, matrices=lambda own: weight.rows(own).unpacked(x.dtype))


def _by_copies(
    x: mx.array,
    chosen: mx.array,
    shape: Sequence[int],
    matrices: Callable[[mx.array], mx.array],
) -> mx.array:
    """Return the product by gathered copies of the matrices, in portions of bounded size.

    Args:
        shape: of the matrices, `[experts, out, in]`.
        matrices: copies those of some experts.
    """
    rows = mx.broadcast_to(x, (*chosen.shape, 1, x.shape[-1])).reshape(-1, 1, x.shape[-1])
    flat = chosen.flatten()
    tile = max(1, _COPIED_BYTES // (shape[-1] * shape[-2] * x.itemsize))
    parts = [
        rows[at : at + tile] @ matrices(flat[at : at + tile]).swapaxes(-1, -2)
        for at in range(0, rows.shape[0], tile)
    ]
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
    return y.reshape(*chosen.shape, 1, -1)
