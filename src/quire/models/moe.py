"""Mixture of experts: each row passes through a few of many gated MLPs.

The experts' matrices are stacked, `[experts, out, in]`, so that one gathered product serves all
rows. Routers differ between families and live there.
"""

from __future__ import annotations

import re
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from quire.models.base import Module
from quire.models.layers import GATES

# From this many (row, expert) pairs on, sorting them by expert pays: rows of one expert are
# multiplied together instead of one at a time.
_SORT_FROM = 64

_COPIED_BYTES = 256 << 20


class ExpertLinear(Module):
    """One matrix an expert, `[experts, out, in]`."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = mx.zeros((experts, outputs, inputs))

    def __call__(self, x: mx.array, experts: mx.array, sorted_experts: bool) -> mx.array:
        """`[..., 1, in]` and expert indices `[...]`, broadcast together -> `[..., 1, out]`."""
        if self._needs_copies():
            return self._by_copies(x, experts)
        return mx.gather_mm(
            x,
            self.weight.swapaxes(-1, -2),
            rhs_indices=experts,
            sorted_indices=sorted_experts,
        )

    def _needs_copies(self) -> bool:
        """Where MLX 0.32.4's `gather_mm` does not serve. Packed experts don't use it.

        On CUDA it gave wrong results inside `Experts` from 66 pairs of row and expert on (H100,
        float32; equal to 3e-7 below that). On a CPU it takes float32 only.
        """
        if mx.default_device() == mx.gpu:
            return bool(mx.cuda.is_available())
        return self.weight.dtype != mx.float32

    def _by_copies(self, x: mx.array, experts: mx.array) -> mx.array:
        """The same product from gathered copies of the matrices, so many at once as fit a bound."""
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
        return PackedExpertLinear(experts, inputs, outputs, group_size, bits, mode)


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
        return mx.gather_qmm(
            x,
            self.weight,
            self.scales,
            self.biases if self._affine else None,
            rhs_indices=experts,
            transpose=True,
            sorted_indices=sorted_experts,
            **self._packing,
        )


class Experts(Module):
    """Gated MLPs, `count` of them."""

    def __init__(self, count: int, hidden: int, intermediate: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(count, hidden, intermediate)
        self.up_proj = ExpertLinear(count, hidden, intermediate)
        self.down_proj = ExpertLinear(count, intermediate, hidden)
        self._gate = GATES[activation]

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """The weighted sum of the chosen experts' outputs.

        Args:
            x: `[T, hidden]`.
            chosen: `[T, k]`, indices of experts.
            weights: `[T, k]`.

        Returns:
            `[T, hidden]` in the dtype of `x`.
        """
        rows, k = chosen.shape
        if rows * k < _SORT_FROM:
            y = self._mlp(x[:, None, None], chosen, False)  # [T, k, 1, hidden]
        else:
            flat = chosen.flatten()
            order = mx.argsort(flat)
            y = self._mlp(x[order // k][:, None], flat[order], True)  # [T * k, 1, hidden]
            y = y[mx.argsort(order)].reshape(rows, k, 1, -1)
        mixed = weights.astype(x.dtype)[:, None] @ y.squeeze(-2)  # [T, 1, k] @ [T, k, hidden]
        return mixed.squeeze(1)

    def _mlp(self, x: mx.array, experts: mx.array, sorted_experts: bool) -> mx.array:
        gate = self.gate_proj(x, experts, sorted_experts)
        up = self.up_proj(x, experts, sorted_experts)
        y: mx.array = self.down_proj(self._gate(gate, up), experts, sorted_experts)
        return y


class SparseMoE(Module):
    """Experts behind a softmax router; with `normalise`, the chosen ones' weights sum to one."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        experts: int,
        k: int,
        activation: str,
        *,
        normalise: bool,
    ) -> None:
        super().__init__()
        self._k, self._normalise = k, normalise
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, intermediate, activation)

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        scores = self.gate(x).astype(mx.float32)
        chosen, own = choose(scores, self._k)
        if self._normalise:
            # A softmax over all, cut to the chosen and scaled to one, is one over the chosen.
            weights = mx.softmax(own, axis=-1)
        else:
            weights = mx.exp(own - mx.logsumexp(scores, axis=-1, keepdims=True))
        return self.experts(x, chosen, weights)


def choose(scores: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """The k highest of `[T, experts]`: (indices `[T, k]`, scores `[T, k]`), in no order."""
    indices = mx.argpartition(-scores, kth=k - 1, axis=-1)[:, :k]
    return indices, mx.take_along_axis(scores, indices, axis=-1)


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
        elif name.endswith(".experts.down_proj"):
            stacked[f"{name}.weight"] = array
        else:
            name = name.replace(".experts.switch_glu.", ".experts.")
            stacked[name.replace(".switch_mlp.", ".experts.")] = array
    for name, parts in numbered.items():
        stacked[name] = mx.stack([parts[number] for number in sorted(parts)])
    return stacked
