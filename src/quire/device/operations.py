"""What a model computes with weights, as a device does it best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

from quire.device import activations, recurrence
from quire.device.cache_operations import CacheOperations
from quire.device.recurrence import DeltaGates


@dataclass(frozen=True, slots=True)
class Packing:
    """How codes are packed, in MLX's terms.

    Attributes:
        mode: "affine", "mxfp4", "mxfp8" or "nvfp4".
    """

    group_size: int
    bits: int
    mode: str


TILE = 16
"""Outputs of a matrix whose codes lie together."""


def in_tiles(matrix: mx.array) -> mx.array:
    """`[out, n]` with the memory of `[out / TILE, n, TILE]`."""
    rows, width = matrix.shape
    return mx.contiguous(matrix.reshape(-1, TILE, width).swapaxes(1, 2)).reshape(rows, width)


def untiled(matrix: mx.array) -> mx.array:
    """Undoes `in_tiles`."""
    rows, width = matrix.shape
    return matrix.reshape(-1, width, TILE).swapaxes(1, 2).reshape(rows, width)


def _rows(matrix: mx.array, numbers: mx.array, tiled: bool) -> mx.array:
    if not tiled:
        return matrix[numbers]
    tiles = matrix.reshape(-1, matrix.shape[-1], TILE)
    return tiles[numbers // TILE, :, numbers % TILE]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Codes `[..., out, in * bits / 32]` with their scales, and biases where the mode is affine.

    Attributes:
        tiled: each array's memory is in the order of `[out / TILE, -, TILE]`: what belongs to
            `TILE` neighbouring outputs lies together, as some kernels read it.
    """

    codes: mx.array
    scales: mx.array
    biases: mx.array | None
    packing: Packing
    tiled: bool = False

    def by_rows(self) -> PackedWeight:
        """The same weight, not in tiles."""
        return self._relaid(untiled) if self.tiled else self

    def rows(self, numbers: mx.array) -> PackedWeight:
        """The rows `[T]` of a matrix."""
        return self._relaid(lambda array: _rows(array, numbers, self.tiled))

    def span(self, first: int, last: int) -> PackedWeight:
        """The rows from `first` to before `last` of a matrix that is not in tiles."""
        return self._relaid(lambda array: array[first:last])

    def _relaid(self, lay: Callable[[mx.array], mx.array]) -> PackedWeight:
        biases = None if self.biases is None else lay(self.biases)
        return PackedWeight(lay(self.codes), lay(self.scales), biases, self.packing)

    def unpacked(self, dtype: mx.Dtype | None = None) -> mx.array:
        """`[..., out, in]`.

        Args:
            dtype: the scales' unless said otherwise.
        """
        if self.tiled:
            return self.by_rows().unpacked(dtype)
        scales, biases = self.scales, self.biases
        if biases is not None and dtype is not None:
            scales, biases = scales.astype(dtype), biases.astype(dtype)
        return mx.dequantize(
            self.codes,
            scales,
            biases,
            group_size=self.packing.group_size,
            bits=self.packing.bits,
            mode=self.packing.mode,
            dtype=dtype,
        )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Matrix:
    """What a linear layer multiplies by, made once a layer: a key of what kernels make of it.

    Attributes:
        weight: `[out, in]`, or codes.
        bias: `[out]`.
    """

    weight: mx.array | PackedWeight
    bias: mx.array | None


@dataclass(frozen=True, slots=True)
class GatedMatrices:
    """`down(activation(gate(x)) * up(x))`, the activation by its name."""

    gate: Matrix
    up: Matrix
    down: Matrix
    activation: str


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HeadPart:
    """How a layer makes its queries, its keys or its values; made once a layer.

    Attributes:
        matrix: whose product is cut into heads; None takes the product of the part before.
        norm: weight `[dim]` of the RMS norm of each head, if it has one.
        normed: whether heads are normalised.
        rotated: whether they are rotated then, where the layer rotates.
    """

    matrix: Matrix | None
    heads: int
    norm: mx.array | None = None
    normed: bool = False
    rotated: bool = False


Rotate = Callable[[mx.array], mx.array]
"""Rotates `[T, heads, dim]`, each row by its position."""


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """A matrix an expert, `[experts, out, in]` or codes, and perhaps a bias, `[experts, out]`."""

    weight: mx.array | PackedWeight
    bias: mx.array | None


@dataclass(frozen=True, slots=True)
class GatedExperts:
    """`down(gating(gate(x), up(x)))` of each expert.

    Attributes:
        activation: the name of what `gating` applies to its first operand; None has none.
    """

    gate: ExpertMatrices
    up: ExpertMatrices
    down: ExpertMatrices
    gating: Callable[[mx.array, mx.array], mx.array]
    activation: str | None


class Operations(CacheOperations):
    """What models compute, in MLX's operations. A device with better kernels overrides them."""

    def reads_tiles(self, packing: Packing) -> bool:
        """Whether `packed_linear` is fastest by weights in tiles."""
        return False

    def linear(self, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        """`[..., in]` times the transpose of `[out, in]`, plus `[out]`: `[..., out]`."""
        return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)

    def packed_linear(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        """The same by codes."""
        weight, packing = weight.by_rows(), weight.packing
        y = mx.quantized_matmul(
            x,
            weight.codes,
            weight.scales,
            weight.biases,
            transpose=True,
            group_size=packing.group_size,
            bits=packing.bits,
            mode=packing.mode,
        )
        return y if bias is None else y + bias

    def product(self, x: mx.array, matrix: Matrix) -> mx.array:
        """`[..., in]` -> `[..., out]`."""
        weight = matrix.weight
        if isinstance(weight, mx.array):
            return self.linear(x, weight, matrix.bias)
        return self.packed_linear(x, weight, matrix.bias)

    def gated_mlp(self, x: mx.array, mlp: GatedMatrices) -> mx.array | None:
        """`[..., hidden]` -> `[..., hidden]`; None where there is no kernel that does so."""
        return None

    def heads(
        self, x: mx.array, parts: Sequence[HeadPart], eps: float, rotate: Rotate | None
    ) -> list[mx.array]:
        """Queries, keys and values of rows `[T, hidden]`, `[T, heads, dim]` each.

        Args:
            eps: of the norms.
            rotate: by the positions of this step; None where the layer does not rotate.
        """
        found: list[mx.array] = []
        y = x
        for part in parts:
            if part.matrix is not None:
                y = self.product(x, part.matrix)
            own = y.reshape(len(x), part.heads, -1)
            if part.normed:
                own = self.rms_norm(own, part.norm, eps)
            found.append(rotate(own) if rotate is not None and part.rotated else own)
        return found

    def experts(self, x: mx.array, chosen: mx.array, mlp: GatedExperts) -> mx.array | None:
        """Each row by the gated MLPs of its experts.

        Args:
            x: `[T, hidden]`.
            chosen: `[T, k]`.

        Returns:
            `[T, k, hidden]`; None where there is no kernel that does so.
        """
        return None

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (arXiv:1910.07467)."""
        return mx.fast.rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: mx.array,
        y: mx.array,
        weight: mx.array,
        eps: float,
        factor: mx.array | None = None,
    ) -> mx.array:
        """`(x + rms_norm(y, weight, eps)) * factor` of arrays of one shape; `factor` is `[1]`."""
        added = x + self.rms_norm(y, weight, eps)
        return added if factor is None else added * factor

    rotates = False
    """Whether there is a kernel behind `rotate`."""

    def rotation(self, cosines: mx.array, sines: mx.array, neighbours: bool) -> Rotate:
        """Rotary position embedding (arXiv:2104.09864) of the first `2 * half` elements of heads.

        Args:
            cosines, sines: of the angles, `[T, half]`, float32.
            neighbours: whether the two of a pair are neighbours, not half the elements apart.
        """
        raise NotImplementedError("see `rotates`")

    def activate(self, name: str, x: mx.array) -> mx.array:
        """Apply an activation by its name, see `activations.COMPILED`."""
        return activations.COMPILED[name](x)

    def causal_conv(
        self, window: mx.array, taps: mx.array, bias: mx.array | None, silu: bool
    ) -> mx.array:
        """Apply one filter per channel over the last tokens, then SiLU if `silu`.

        Args:
            window: `[n, kernel - 1 + t, channels]`.
            taps: `[channels, kernel]`.
            bias: `[channels]`.

        Returns:
            `[n, t, channels]`.
        """
        out = recurrence.causal_conv(window, taps, bias)
        return self.activate("silu", out) if silu else out

    def gated_delta(
        self, mixed: mx.array, gates: DeltaGates, state: mx.array, key_heads: int, eps: float
    ) -> tuple[mx.array, mx.array]:
        """Run the gated delta rule (arXiv:2412.06464) token by token.

        Args:
            mixed: `[n, t, channels]`: queries and keys, `key_heads` each, not yet of unit length,
                and values; a key head serves consecutive value heads.
            state: `[n, value_heads, value_dim, key_dim]`, float32.
            eps: added to the squared lengths of queries and keys.

        Returns:
            `[n, t, value_heads, value_dim]`, read by queries of length `key_dim ** -0.5`, and the
            state after the last token.
        """
        return recurrence.delta_rule(mixed, gates, state, key_heads, eps)

    def state_space(
        self,
        values: mx.array,
        keys: mx.array,
        queries: mx.array,
        steps: mx.array,
        rates: mx.array,
        state: mx.array,
    ) -> tuple[mx.array, mx.array]:
        """For each token: decay the state, add the value at the key, read it at the query.

        Args:
            values: `[n, t, heads, head_dim]`.
            keys, queries: `[n, t, groups, state_dim]`; a group serves consecutive heads.
            steps: `[n, t, heads]`, at least 0; the state keeps `exp(rates * steps)`.
            rates: `[heads]`, or `[heads, state_dim]` with heads of one value; below 0.
            state: `[n, heads, head_dim, state_dim]`. All are float32.

        Returns:
            `[n, t, heads, head_dim]` and the state after the last token.
        """
        return recurrence.state_space(values, keys, queries, steps, rates, state)

    def of_rows(self, x: mx.array, numbers: mx.array) -> mx.array:
        """`x[r, numbers[r, j]]`: of `[R, N, ...]` by `[R, n]`, `[R, n, ...]`."""
        places = numbers.reshape(*numbers.shape, *(1 for _ in x.shape[2:]))
        return mx.take_along_axis(x, places, axis=1)

    def gate(self, name: str, x: mx.array, y: mx.array) -> mx.array | None:
        """`activation(x) * y` for an activation by its name; None where there is no such kernel."""
        return None


class UnfusedOperations(Operations):
    """Where MLX has no fused kernels: on a CPU it spells `mx.fast.rms_norm` out in ten operations.

    Here they are seven: models with many small norms (Gemma) spend a good part of a step there.
    """

    def activate(self, name: str, x: mx.array) -> mx.array:
        return activations.SPELLED_OUT[name](x)

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        share, epsilon = _constants(x.shape[-1], eps)
        wide = x.astype(mx.float32)
        scale = mx.rsqrt(mx.square(wide).sum(axis=-1, keepdims=True) * share + epsilon)
        y = (wide * scale).astype(x.dtype)
        return y if weight is None else y * weight


@cache
def _constants(dim: int, eps: float) -> tuple[mx.array, mx.array]:
    """As arrays, because MLX makes one of a number in every call."""
    share, epsilon = mx.array(1.0 / dim), mx.array(eps)
    mx.eval(share, epsilon)
    return share, epsilon
