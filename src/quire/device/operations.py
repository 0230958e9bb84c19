"""The operations that models compute with weights. Each device overrides those that it does
better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import mlx.core as mx

from quire.device import activations, recurrence, rotation
from quire.device.activations import ElementOperations, Gating
from quire.device.bidirectional import BidirectionalOperations
from quire.device.draws import DrawingOperations
from quire.device.expert_operations import ExpertOperations
from quire.device.low_rank import LowRankOperations
from quire.device.mixture import Router
from quire.device.ranks import RankOperations
from quire.device.recurrence import DeltaGates
from quire.device.rotation import Rotate
from quire.device.weights import (
    DECODED_MODES,
    ExpertMatrices,
    GatedMatrices,
    HeadPart,
    Matrix,
    PackedWeight,
    Packing,
)


class Operations(
    ElementOperations,
    ExpertOperations,
    RankOperations,
    DrawingOperations,
    LowRankOperations,
    BidirectionalOperations,
):
    """The operations of models, in MLX. A device with better kernels overrides them."""

    index_type: mx.Dtype = mx.uint32
    """Type of expert indices that MLX's expert products take without conversion."""

    def reads_tiles(self, packing: Packing) -> bool:
        """Return whether `packed_linear` is fastest by weights in tiles."""
        return False

    def linear(self, x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
        """Multiply `[..., in]` by the transpose of `[out, in]` and add `[out]`: `[..., out]`."""
        return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)

    def packed_linear(self, x: mx.array, weight: PackedWeight, bias: mx.array | None) -> mx.array:
        """Compute `linear` by codes."""
        y = _by_codes(x, weight.by_rows())
        return y if bias is None else y + bias

    def product(self, x: mx.array, matrix: Matrix) -> mx.array:
        """Multiply rows by a matrix: `[..., in]` -> `[..., out]`."""
        weight = matrix.weight
        if isinstance(weight, mx.array):
            return self.linear(x, weight, matrix.bias)
        return self.packed_linear(x, weight, matrix.bias)

    def products(self, x: mx.array, matrices: Sequence[Matrix]) -> list[mx.array]:
        """Multiply the same rows `[..., in]` by several matrices: `[..., out]` each."""
        return [self.product(x, each) for each in matrices]

    def gated_mlp(self, x: mx.array, mlp: GatedMatrices) -> mx.array:
        """Compute a gated MLP: `[..., hidden]` -> `[..., hidden]`."""
        gate, up = self.products(x, (mlp.gate, mlp.up))
        return self.product(self.gated(mlp.gating, gate, up), mlp.down)

    def heads(
        self, x: mx.array, parts: Sequence[HeadPart], eps: float, rotate: Rotate | None
    ) -> list[mx.array]:
        """Return queries, keys and values of rows `[T, hidden]`, `[T, heads, dim]` each.

        Args:
            eps: epsilon of the norms.
            rotate: rotates by this step's positions; None if the layer does not rotate.
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

    def route(
        self,
        logits: mx.array,
        correction: mx.array | None,
        per_expert: mx.array | None,
        router: Router,
    ) -> tuple[mx.array, mx.array]:
        """Choose experts for each row.

        Args:
            logits: `[T, experts]` in float32.
            correction: `[experts]`, added to the scores for the choice alone.
            per_expert: `[experts]`, multiplies the weights of the chosen.

        Returns:
            Indices `[T, k]`, int32, and weights `[T, k]`, float32.
        """
        chosen, weights = router.route(logits, correction)
        return chosen, weights if per_expert is None else weights * per_expert[chosen]

    def by_head(self, x: mx.array, matrices: ExpertMatrices) -> mx.array:
        """Multiply each head by a matrix of its own: `[T, heads, in]` -> `[T, heads, out]`."""
        assert matrices.bias is None, "heads have no biases"
        weight, rows = matrices.weight, x.swapaxes(0, 1)
        if isinstance(weight, mx.array):
            return (rows @ weight.swapaxes(-1, -2)).swapaxes(0, 1)
        return _by_codes(rows, weight).swapaxes(0, 1)

    def embed(
        self, tokens: mx.array, table: mx.array | PackedWeight, dtype: mx.Dtype | None
    ) -> mx.array:
        """Look up rows of a table: `[T]` -> `[T, dim]`.

        Args:
            dtype: dtype of the rows; None means that of a table of numbers, or of the scales of
                affine codes. Other codes have one type.
        """
        if isinstance(table, mx.array):
            found = table[tokens]
            return found if dtype in (None, found.dtype) else found.astype(dtype)
        rows = table.rows(tokens)
        return rows.unpacked(dtype if rows.biases is not None else None)

    def layer_norm(
        self, x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float
    ) -> mx.array:
        """Centre and scale over the last axis (arXiv:1607.06450)."""
        return mx.fast.layer_norm(x, weight, bias, eps)

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        """Return `x / sqrt(mean(x^2) + eps) * weight` over the last axis (arXiv:1910.07467)."""
        return mx.fast.rms_norm(x, weight, eps)

    def add_rms_norm(
        self,
        x: mx.array,
        y: mx.array,
        weight: mx.array,
        eps: float,
        factor: mx.array | None = None,
    ) -> mx.array:
        """Return `(x + rms_norm(y, weight, eps)) * factor` of arrays of one shape; `factor` is
        `[1]`.
        """
        added = x + self.rms_norm(y, weight, eps)
        return added if factor is None else added * factor

    def rotation(self, cosines: mx.array, sines: mx.array, neighbours: bool) -> Rotate:
        """Rotate the first `2 * half` elements of heads by positions (RoPE, arXiv:2104.09864).

        Args:
            cosines, sines: of the angles, `[T, half]`, float32.
            neighbours: whether the two of a pair are neighbours, not half the elements apart.
        """
        return rotation.spelled_out(cosines, sines, neighbours, turn=_compiled_turn())

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
        return recurrence.delta_rule(mixed, gates, state, key_heads=key_heads, eps=eps)

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
        return recurrence.state_space(values, keys, queries, steps=steps, rates=rates, state=state)

    def of_rows(self, x: mx.array, numbers: mx.array) -> mx.array:
        """Return `x[r, numbers[r, j]]`: `[R, N, ...]` by `[R, n]` gives `[R, n, ...]`."""
        places = numbers.reshape(*numbers.shape, *(1 for _ in x.shape[2:]))
        return mx.take_along_axis(x, places, axis=1)

    def gated(self, gating: Gating, x: mx.array, y: mx.array) -> mx.array:
        """Join a gate `x` and a value `y` of one shape; see `Gating`."""
        return _compiled_gate(gating)(x, y)


def _by_codes(x: mx.array, weight: PackedWeight) -> mx.array:
    packing = weight.packing
    if packing.mode in DECODED_MODES:
        return x @ weight.unpacked(x.dtype).swapaxes(-1, -2)
    return mx.quantized_matmul(
        x,
        weight.codes,
        weight.scales,
        weight.biases,
        transpose=True,
        group_size=packing.group_size,
        bits=packing.bits,
        mode=packing.mode,
    )


@cache
def _compiled_turn() -> rotation.Turn:
    compiled: rotation.Turn = mx.compile(rotation.turn, shapeless=True)
    return compiled


@cache
def _compiled_gate(gating: Gating) -> Callable[[mx.array, mx.array], mx.array]:
    function = partial(activations.gated, gating, activations.COMPILED[gating.activation])
    compiled: Callable[[mx.array, mx.array], mx.array] = mx.compile(function, shapeless=True)
    return compiled


class SpelledOutOperations(Operations):
    """Operations for devices on which `mx.compile` delays requests."""

    def activate(self, name: str, x: mx.array) -> mx.array:
        return activations.SPELLED_OUT[name](x)

    def gated(self, gating: Gating, x: mx.array, y: mx.array) -> mx.array:
        return activations.gated(gating, activations.SPELLED_OUT[gating.activation], x, y=y)

    def rotation(self, cosines: mx.array, sines: mx.array, neighbours: bool) -> Rotate:
        return rotation.spelled_out(cosines, sines, neighbours, turn=rotation.turn)


class UnfusedOperations(SpelledOutOperations):
    """Operations for devices without fused kernels, such as CPUs.

    MLX's `mx.fast.rms_norm` takes more operations there. Here a norm takes seven; models with many
    small norms (Gemma) spend much of a step on them.
    """

    gather_mm_dtypes = (mx.float32,)
    score_bytes = 16 << 20

    def rms_norm(self, x: mx.array, weight: mx.array | None, eps: float) -> mx.array:
        share, epsilon = _constants(x.shape[-1], eps)
        wide = x.astype(mx.float32)
        scale = mx.rsqrt(mx.square(wide).sum(axis=-1, keepdims=True) * share + epsilon)
        y = (wide * scale).astype(x.dtype)
        return y if weight is None else y * weight


@cache
def _constants(dim: int, eps: float) -> tuple[mx.array, mx.array]:
    """Return numbers as arrays, because MLX would convert them in every call."""
    share, epsilon = mx.array(1.0 / dim), mx.array(eps)
    mx.eval(share, epsilon)
    return share, epsilon
