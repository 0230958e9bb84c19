"""Mixture of experts: each row passes through a few of many gated MLPs.

The experts' matrices are stacked, `[experts, out, in]`, so that one gathered product serves all
rows. Routers are in `routers`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn

from quire.core.errors import ModelError
from quire.device.activations import Gating
from quire.device.collectives import summed
from quire.device.device import current_device
from quire.device.mixture import Router
from quire.device.ranks import WHOLE, Part
from quire.device.weights import (
    DECODED_MODES,
    ExpertMatrices,
    GatedExperts,
    PackedWeight,
    Packing,
    PlainExperts,
)
from quire.models.base import Module
from quire.models.layers.feed_forward import MLP, width_cuts
from quire.models.layers.norm import RMSNorm
from quire.models.shares import Cut, Cuts, Run, Split, inputs, rows, within


class ExpertLinear(Module):
    """A linear layer with a matrix per expert, `[experts, out, in]`, and perhaps biases `[experts,
    out]`.
    """

    def __init__(self, experts: int, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = mx.zeros((experts, outputs, inputs))
        if bias:
            self.bias = mx.zeros((experts, outputs))

    @property
    def matrices(self) -> ExpertMatrices:
        """The weights in the form that the device's operations take."""
        return ExpertMatrices(self.weight, self.get("bias"))

    def to_quantized(self, group_size: int, bits: int, mode: str) -> PackedExpertLinear:
        """Return the packed twin; `nn.quantize` looks for this method."""
        experts, outputs, inputs = self.weight.shape
        packed = PackedExpertLinear(
            experts, inputs, outputs, group_size=group_size, bits=bits, mode=mode
        )
        if "bias" in self:
            packed.bias = self.bias
        return packed


class PackedExpertLinear(Module):
    """A quantised `ExpertLinear`. Created empty: its tensors come from a checkpoint.

    Attributes:
        bits: bits of a code.
        tiled: see `PackedWeight`.
    """

    tiled = False

    def __init__(
        self, experts: int, inputs: int, outputs: int, group_size: int, bits: int, mode: str
    ) -> None:
        super().__init__()
        self._packing: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
        self.bits = bits
        groups = (experts, outputs, inputs // group_size)
        self.weight = mx.zeros((experts, outputs, inputs * bits // 32), dtype=mx.uint32)
        wide = mode in ("affine", *DECODED_MODES)
        self.scales = mx.zeros(groups, dtype=mx.float32 if wide else mx.uint8)
        if mode == "affine":
            self.biases = mx.zeros(groups)

    @property
    def packing(self) -> Packing:
        """How the codes are packed."""
        return Packing(**self._packing)

    @property
    def matrices(self) -> ExpertMatrices:
        """The weights in the form that the device's operations take."""
        weight = PackedWeight(
            self.weight, self.scales, self.get("biases"), packing=self.packing, tiled=self.tiled
        )
        return ExpertMatrices(weight, self.get("bias"))


class Experts(Module):
    """The experts of a mixture, `count` gated MLPs."""

    def __init__(
        self, count: int, hidden: int, intermediate: int, gating: Gating, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = ExpertLinear(count, hidden, intermediate, bias=bias)
        self.up_proj = ExpertLinear(count, hidden, intermediate, bias=bias)
        self.down_proj = ExpertLinear(count, intermediate, hidden, bias=bias)
        self._gating = gating

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        gate, up, down = (each.matrices for each in (self.gate_proj, self.up_proj, self.down_proj))
        experts = GatedExperts(gate, up, down, gating=self._gating)
        return current_device().operations.experts(x, chosen, weights, experts=experts)


class UngatedExperts(Module):
    """The experts of a mixture without gates, `count` times `down(act(up(x)))`."""

    def __init__(self, count: int, hidden: int, intermediate: int, activation: str) -> None:
        super().__init__()
        self.up_proj = ExpertLinear(count, hidden, intermediate)
        self.down_proj = ExpertLinear(count, intermediate, hidden)
        self._activation = activation

    def __call__(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        experts = PlainExperts(self.up_proj.matrices, self.down_proj.matrices, self._activation)
        return current_device().operations.experts(x, chosen, weights, experts=experts)


@dataclass(frozen=True)
class Mixture:
    """Description of a mixture of experts, perhaps with a shared expert for every row.

    Attributes:
        width: inner width of an expert.
        shared_width: inner width of the shared expert; 0 means none.
        shared_gate: whether the shared expert's output has a gate.
        shared_scale: factor of the shared expert's output.
        bias: whether the router and the experts' matrices have biases.
        clamp: alpha and limit of gpt-oss's gate, if it replaces the usual one.
        limit, shared_limit: bounds of both factors of the gates of the experts and of the shared
            one, see `Gating`; 0 means none.
        inner_limit: whether `limit` bounds what the experts' activation is applied to.
        softcaps: see `Gating`; of the shared expert, too.
        weighted_input: whether the experts' inputs are weighted, instead of their outputs.
        gated: whether experts have gates, including the shared one.
        latent_dim: width of the experts' inputs and outputs, if projections reduce rows to it; else
            0.
        latent_bias: whether these projections and the shared expert have biases.
        latent_norm: epsilon of a norm of what the experts make of reduced rows; None means no norm.
        identities: number of further experts, behind the others, whose output is their input.
        own: this rank's experts, if each rank has whole ones; None means all.
        part: the rank whose share this is. The outputs of the ranks are summed.

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
    inner_limit: bool = False
    softcaps: tuple[float, float] = (0.0, 0.0)
    weighted_input: bool = False
    gated: bool = True
    latent_dim: int = 0
    latent_bias: bool = False
    latent_norm: float | None = None
    identities: int = 0
    own: range | None = None
    part: Part = WHOLE

    def __post_init__(self) -> None:
        if self.router.k > self.experts:
            raise ModelError(
                f"config.json: num_experts_per_tok = {self.router.k}, where a layer has "
                f"{self.experts} experts"
            )

    def module(self, hidden_size: int) -> Module:
        return SparseMoE(self, hidden_size)

    def share(self, split: Split) -> tuple[Self, Cuts]:
        """Divide each expert's width, or the experts if there are too few groups of packed weights.
        All ranks choose the same experts.
        """
        own, width = None, self.width
        if split.divides(width) or self.experts % split.part.size:
            width, run = split.width(width)
            cuts = within("experts", expert_cuts(run))
        else:
            own = split.part.within(self.experts)
            whole = rows((self.experts, 1))
            cuts = within("experts", dict.fromkeys(("gate_proj", "up_proj", "down_proj"), whole))
        if self.latent_bias:
            cuts["fc2_latent_proj"] = inputs()
        shared_width = 0
        if self.shared_width:
            shared_width, run = split.width(self.shared_width)
            cuts |= within("shared_expert", width_cuts(run))
        part = split.part
        return replace(self, width=width, shared_width=shared_width, own=own, part=part), cuts

    def stacked(self, size: int) -> Module:
        """Return the experts, with inputs and outputs of `size` values."""
        count = self.experts if self.own is None else len(self.own)
        if not self.gated:
            return UngatedExperts(count, size, self.width, activation=self.activation)
        return Experts(count, size, self.width, gating=self._gating(), bias=self.bias)

    def _gating(self) -> Gating:
        if self.clamp is not None:
            alpha, limit = self.clamp
            return Gating(self.activation, limit, alpha)
        return Gating(self.activation, self.limit, inner=self.inner_limit, softcaps=self.softcaps)


class SparseMoE(Module):
    """Computes a `Mixture`."""

    def __init__(self, kind: Mixture, hidden_size: int) -> None:
        super().__init__()
        self._kind = kind
        routed = kind.experts + kind.identities
        self.gate = nn.Linear(hidden_size, routed, bias=kind.bias)
        if kind.router.corrected:
            self.e_score_correction_bias = mx.zeros(routed)
        latent = kind.latent_dim or hidden_size
        if kind.latent_dim:
            self.fc1_latent_proj = nn.Linear(hidden_size, latent, bias=kind.latent_bias)
            self.fc2_latent_proj = nn.Linear(latent, hidden_size, bias=kind.latent_bias)
        if kind.latent_norm is not None:
            self.latent_norm = RMSNorm(latent, eps=kind.latent_norm)
        self.experts = kind.stacked(latent)
        if kind.shared_width:
            shared = MLP(
                kind.shared_width,
                kind.activation,
                kind.gated,
                bias=kind.latent_bias,
                limit=kind.shared_limit,
                softcaps=kind.softcaps,
            )
            self.shared_expert = shared.module(hidden_size)
        if kind.shared_gate:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """`[T, hidden]` -> `[T, hidden]`."""
        logits = self.gate(x).astype(mx.float32)
        correction = self.get("e_score_correction_bias")
        inner = self.fc1_latent_proj(x) if self._kind.latent_dim else x
        operations, router = current_device().operations, self._kind.router
        chosen, weights = operations.route(logits, correction, per_expert=None, router=router)
        kept = self._kept(chosen, weights) if self._kind.identities else None
        own = self._kind.own
        if own is not None or kept is not None:
            own = range(self._kind.experts) if own is None else own
            chosen, weights = _of_own(own, chosen, weights)
        if self._kind.weighted_input:
            y = self._of_weighted(inner, chosen, weights)
        else:
            y = self.experts(inner, chosen, weights)
        if self._kind.latent_norm is not None:
            # Each rank has the whole latent behind its norm, and adds its share of the projection.
            y = self._shared_out(self.latent_norm(summed(y, self._kind.part)))
        if self._kind.latent_dim:
            y = self.fc2_latent_proj(y)
        if kept is not None:
            y = y + x * kept.astype(x.dtype)
        if not self._kind.shared_width:
            return y
        shared: mx.array = self.shared_expert(x)
        if self._kind.shared_gate:
            shared = mx.sigmoid(self.shared_expert_gate(x)) * shared
        return y + (shared if self._kind.shared_scale == 1 else shared * self._kind.shared_scale)

    def _kept(self, chosen: mx.array, weights: mx.array) -> mx.array:
        """Return this rank's share of the weights of identities: `[T, 1]`."""
        kept = mx.where(chosen >= self._kind.experts, weights, 0).sum(axis=-1, keepdims=True)
        return self._shared_out(kept)

    def _shared_out(self, x: mx.array) -> mx.array:
        """Return what each rank contributes to a sum that is to be `x`, which all of them have."""
        ranks = self._kind.part.size
        return x if ranks == 1 else x / ranks

    def _of_weighted(self, x: mx.array, chosen: mx.array, weights: mx.array) -> mx.array:
        """Return the sum of the selected experts' outputs for weighted rows: `[T, hidden]`."""
        weighted = x[:, None] * weights.astype(x.dtype)[..., None]  # [T, k, hidden]
        rows, chosen = weighted.flatten(0, 1), chosen.reshape(-1, 1)
        y: mx.array = self.experts(rows, chosen, mx.ones(chosen.shape))
        return y.reshape(weighted.shape).sum(axis=1)


def _of_own(own: range, chosen: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
    """Return chosen experts by their numbers on this rank. Others become the first one, without
    weight.
    """
    number = chosen.astype(mx.int32) - own.start
    here = (number >= 0) & (number < len(own))
    return mx.where(here, number, 0).astype(chosen.dtype), mx.where(here, weights, 0)


def expert_cuts(run: Run) -> Cuts:
    """Return the cuts of stacked experts by the values between their products."""
    own = Cut((run,), axis=1)
    return {"gate_proj": own, "up_proj": own, "down_proj": inputs(run)}


_NUMBERED = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.(\w+)")


def stack_experts(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Convert every layout of experts in checkpoints to `*.experts.{gate,up,down}_proj.*`.

    Supported are Hugging Face's layouts, with one tensor per expert (`experts.7.up_proj.weight`) or
    stacked with gate and up fused (`experts.gate_up_proj`), and MLX's (`switch_mlp.`,
    `experts.switch_glu.`).
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
