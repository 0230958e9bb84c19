"""Mixture of experts: each row passes through a few of many gated MLPs.

The experts' matrices are stacked, `[experts, out, in]`, so that one gathered product serves all
rows. Routers are in `routers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError
from quire.device.device import current_device
from quire.device.operations import ExpertMatrices, GatedExperts, PackedWeight, Packing
from quire.models.base import Module
from quire.models.feed_forward import MLP
from quire.models.layers import ACTIVATIONS, GATES, Gate, clamped_gate, limited_gate
from quire.models.routers import Router

# From this many (row, expert) pairs on, sorting them by expert pays: rows of one expert are
# multiplied together instead of one at a time.
_SORT_FROM = 64

_COPIED_BYTES = 256 << 20


class ExpertLinear(Module):
    """One matrix an expert, `[experts, out, in]`, and perhaps a bias, `[experts, out]`."""

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((experts, outputs, inputs))
        if bias:
            self.bias = mx.zeros((experts, outputs))

    def __call__(self, x: mx.array, experts: mx.array, sorted_experts: bool) -> mx.array:
        """`[..., 1, in]` and expert indices `[...]`, broadcast together -> `[..., 1, out]`."""
        if not current_device().gather_mm_serves(self.weight.dtype):
            return _biased(self._by_copies(x, experts), self, experts)
        y = mx.gather_mm(
            x,
            self.weight.swapaxes(-1, -2),
            rhs_indices=experts,
            sorted_indices=sorted_experts,
        )
        return _biased(y, self, experts)

    @property
    def matrices(self) -> ExpertMatrices:
        """As the device's operations take them."""
        return ExpertMatrices(self.weight, self.get("bias"))

    def _by_copies(self, x: mx.array, experts: mx.array) -> mx.array:
        """The same product from gathered copies of the matrices, so many at once as fit a bound.

        Packed experts need it nowhere.
        """
        shape = (*experts.shape, 1, x.shape[-1])
        rows = mx.broadcast_to(x, shape).reshape(-1, 1, x.shape[-1])
        flat = experts.flatten()
        tile = max(1, _COPIED_BYTES // (self.weight.nbytes // self.weight.shape[0]))
        parts = [
            rows[at : at + tile] @ self.weight[flat[at : at + tile]].swapaxes(-1, -2)
            for at in range(0, rows.shape[0], tile)
        ]
        y = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return y.reshape(*experts.shape, 1, -1)

    def to_quantized(self, group_size: int, bits: int, mode: str) -> PackedExpertLinear:
        """The packed twin; `nn.quantize` looks for this method."""
        experts, outputs, inputs = self.weight.shape
        packed = PackedExpertLinear(experts, inputs, outputs, group_size, bits, mode)
        if "bias" in self:
            packed.bias = self.bias
        return packed


def _biased(y: mx.array, layer: Module, experts: mx.array) -> mx.array:
    """`[..., 1, out]` with the bias of each row's expert, where there is one."""
    bias = layer.get("bias")
    return y if bias is None else y + bias[experts][..., None, :]


class PackedExpertLinear(Module):
    """`ExpertLinear` over codes and scales. Made empty: its tensors come from a checkpoint."""

    def __init__(
        self, experts: int, inputs: int, outputs: int, group_size: int, bits: int, mode: str
    ) -> None:
        super().__init__()
        self._packing: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
        groups = (experts, outputs, inputs // group_size)
        self.weight = mx.zeros((experts, outputs, inputs * bits // 32), dtype=mx.uint32)
        self._affine = mode == "affine"
        self.scales = mx.zeros(groups, dtype=mx.float32 if self._affine else mx.uint8)
        if self._affine:
            self.biases = mx.zeros(groups)

    def __call__(self, x: mx.array, experts: mx.array, sorted_experts: bool) -> mx.array:
        """`[..., 1, in]` and expert indices `[...]`, broadcast together -> `[..., 1, out]`."""
        y = mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases if self._affine else None,
            rhs_indices=experts,
            transpose=True,
            sorted_indices=sorted_experts,
            **self._packing,
        )
        return _biased(y, self, experts)

    @property
    def matrices(self) -> ExpertMatrices:
        """As the device's operations take them."""
        packing = Packing(**self._packing)
        weight = PackedWeight(self.weight, self.scales, self.get("biases"), packing)
        return ExpertMatrices(weight, self.get("bias"))


class Experts(Module):
    """Gated MLPs, `count` of them."""

    def __init__(
        self, count: int, hidden: int, intermediate: int, gate: Gate, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(count, hidden, intermediate, bias)
        self.up_proj = ExpertLinear(count, hidden, intermediate, bias)
        self.down_proj = ExpertLinear(count, intermediate, hidden, bias)
        self._gate = gate
        self._activation = next((name for name, known in GATES.items() if known is gate), None)

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """The weighted sum of the chosen experts' outputs.

        Args:
            x: `[T, hidden]`.
            chosen: `[T, k]`, indices of experts.
            weights: `[T, k]`.

        Returns:
            `[T, hidden]` in the dtype of `x`.
        """
        whole = GatedExperts(
            self.gate_proj.matrices,
            self.up_proj.matrices,
            self.down_proj.matrices,
            self._gate,
            self._activation,
        )
        y = current_device().operations.experts(x, chosen, whole)
        if y is not None:
            return (weights.astype(x.dtype)[:, None] @ y).squeeze(1)
        return _weighted_sum(self._mlp, x, chosen, weights)

    def _mlp(self, x: mx.array, experts: mx.array, sorted_experts: bool) -> mx.array:
        gate = self.gate_proj(x, experts, sorted_experts)
        up = self.up_proj(x, experts, sorted_experts)
        y: mx.array = self.down_proj(self._gate(gate, up), experts, sorted_experts)
        return y


class PlainExperts(Module):
    """`down(act(up(x)))`, `count` of them. Called as `Experts`."""

    def __init__(self, count: int, hidden: int, intermediate: int, activation: str) -> None:
        super().__init__()
        self.up_proj = ExpertLinear(count, hidden, intermediate)
        self.down_proj = ExpertLinear(count, intermediate, hidden)
        self._activation = ACTIVATIONS[activation]

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        return _weighted_sum(self._mlp, x, chosen, weights)

    def _mlp(self, x: mx.array, experts: mx.array, sorted_experts: bool) -> mx.array:
        wide = self._activation(self.up_proj(x, experts, sorted_experts))
        y: mx.array = self.down_proj(wide, experts, sorted_experts)
        return y


def _weighted_sum(
    mlp: Callable[[mx.array, mx.array, bool], mx.array],
    x: mx.array,
    chosen: mx.array,
    weights: mx.array,
) -> mx.array:
    """See `Experts.__call__`; `mlp` takes what `ExpertLinear` does."""
    rows, k = chosen.shape
    if rows * k < _SORT_FROM:
        y = mlp(x[:, None, None], chosen, False)  # [T, k, 1, hidden]
    else:
        flat = chosen.flatten()
        order = mx.argsort(flat).astype(mx.int32)
        y = mlp(x[order // k][:, None], flat[order], True)  # [T * k, 1, hidden]
        y = y[mx.argsort(order).astype(mx.int32)].reshape(rows, k, 1, -1)
    mixed = weights.astype(x.dtype)[:, None] @ y.squeeze(-2)  # [T, 1, k] @ [T, k, hidden]
    return mixed.squeeze(1)


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts, perhaps with one that every row passes through.

    Attributes:
        width: values between the layers of an expert.
        shared_width: the same of the shared expert; 0 is none.
        shared_gate: a gate weighs the shared expert's output.
        shared_scale: multiplies the shared expert's output.
        bias: the router and the experts' matrices have biases.
        clamp: alpha and limit of gpt-oss's gate, which then stands in for the activation's.
        limit, shared_limit: bound both factors of the experts' gates, and of the shared one's, see
            `limited_gate`; 0 leaves them.
        weighted_input: a row is weighted before its experts, not after.
        gated: experts have a gate, the shared one too.
        latent_dim: experts read and write so many values, which projections make of a row and turn
            into one again; 0 is the row itself.
        latent_bias: these projections have biases, and so has the shared expert.

    Raises:
        ModelError: a row would go to more experts than there are.
    """

    experts: int
    width: int
    activation: str
    router: Router
    shared_width: int = 0
    shared_gate: bool = False
    shared_scale: float = 1.0
    bias: bool = False
    clamp: tuple[float, float] | None = None
    limit: float = 0.0
    shared_limit: float = 0.0
    weighted_input: bool = False
    gated: bool = True
    latent_dim: int = 0
    latent_bias: bool = False

    def __post_init__(self) -> None:
        if self.router.k > self.experts:
            raise ModelError(
                f"config.json: num_experts_per_tok = {self.router.k}, where a layer has "
                f"{self.experts} experts"
            )

    def module(self, hidden_size: int) -> Module:
        return SparseMoE(self, hidden_size)

    def stacked(self, size: int) -> Module:
        """The experts, which read and write `size` values."""
        if not self.gated:
            return PlainExperts(self.experts, size, self.width, self.activation)
        return Experts(self.experts, size, self.width, self._gate(), self.bias)

    def _gate(self) -> Gate:
        if self.clamp is not None:
            return clamped_gate(*self.clamp)
        return limited_gate(self.activation, self.limit) if self.limit else GATES[self.activation]


class SparseMoE(Module):
    """Computes a `Mixture`."""

    def __init__(self, kind: Mixture, hidden_size: int) -> None:
        super().__init__()
        self._kind = kind
        self.gate = nn.Linear(hidden_size, kind.experts, bias=kind.bias)
        if kind.router.corrected:
            self.e_score_correction_bias = mx.zeros(kind.experts)
        latent = kind.latent_dim or hidden_size
        if kind.latent_dim:
            self.fc1_latent_proj = nn.Linear(hidden_size, latent, bias=kind.latent_bias)
            self.fc2_latent_proj = nn.Linear(latent, hidden_size, bias=kind.latent_bias)
        self.experts = kind.stacked(latent)
        if kind.shared_width:
            shared = MLP(
                kind.shared_width, kind.activation, kind.gated, kind.latent_bias, kind.shared_limit
            )
            self.shared_expert = shared.module(hidden_size)
        if kind.shared_gate:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        logits = self.gate(x).astype(mx.float32)
        correction = self.get("e_score_correction_bias")
        inner = self.fc1_latent_proj(x) if self._kind.latent_dim else x
        chosen, weights = self._kind.router.route(logits, correction)
        if self._kind.weighted_input:
            y = self._of_weighted(inner, chosen, weights)
        else:
            y = self.experts(inner, chosen, weights)
        if self._kind.latent_dim:
            y = self.fc2_latent_proj(y)
        if not self._kind.shared_width:
            return y
        shared: mx.array = self.shared_expert(x)
        if self._kind.shared_gate:
            shared = mx.sigmoid(self.shared_expert_gate(x)) * shared
        return y + (shared if self._kind.shared_scale == 1 else shared * self._kind.shared_scale)

    def _of_weighted(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """The sum of what the chosen experts make of weighted rows: `[T, hidden]`."""
        weighted = x[:, None] * weights.astype(x.dtype)[..., None]  # [T, k, hidden]
        rows, chosen = weighted.flatten(0, 1), chosen.reshape(-1, 1)
        y: mx.array = self.experts(rows, chosen, mx.ones(chosen.shape))
        return y.reshape(weighted.shape).sum(axis=1)


_NUMBERED = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")


def stack_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Brings every layout of experts that checkpoints use to `*.experts.{gate,up,down}_proj.*`.

    Known are Hugging Face's, one tensor an expert (`experts.7.up_proj.weight`) or stacked with
    gate and up in one (`experts.gate_up_proj`), and MLX's (`switch_mlp.`, `experts.switch_glu.`).
    """
    stacked: dict[str, mx.array] = {}
    numbered: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        if match := _NUMBERED.fullmatch(name):
            base, number, part, kind = match.groups()
            numbered.setdefault(f"{base}.{part}_proj.{kind}", {})[int(number)] = array
        elif name.endswith(".experts.gate_up_proj"):
            base = name.removesuffix(".gate_up_proj")
            gate, up = mx.split(array, 2, axis=1)
            stacked |= {f"{base}.gate_proj.weight": gate, f"{base}.up_proj.weight": up}
        elif name.endswith((".experts.up_proj", ".experts.down_proj")):
            stacked[f"{name}.weight"] = array
        else:
            name = name.replace(".experts.switch_glu.", ".experts.")
            stacked[name.replace(".switch_mlp.", ".experts.")] = array
    for name, parts in numbered.items():
        stacked[name] = mx.stack([parts[number] for number in sorted(parts)])
    return stacked
