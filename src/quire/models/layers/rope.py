"""Rotary position embeddings, with the context extensions of published checkpoints.

A rotation is made for the positions of a step's rows, and rotates `[T, heads, head_dim]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from quire.core.errors import ModelError
from quire.core.values import require
from quire.device.device import current_device
from quire.device.rotation import Rotate as Rotate
from quire.models.arguments import check_types

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
AXIAL = ("axial", "axial_turns")
"""Rotation types of encoders, whose patches have positions of two axes."""

_NEEDED = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("factor", "short_factor", "long_factor", "original_max_position_embeddings"),
}
_BOUNDS = {
    "rope_theta": (1.0, math.inf),
    "factor": (0.0, math.inf),
    "beta_fast": (0.0, math.inf),
    "beta_slow": (0.0, math.inf),
    "alpha": (0.0, math.inf),
    "partial_rotary_factor": (0.0, 1.0),
    "original_max_position_embeddings": (1.0, math.inf),
}
"""Exclusive lower bound and inclusive upper bound of each parameter."""


def rope_type(values: dict[str, Any]) -> str:
    """Return the type that RoPE parameters name, by the new key or the old."""
    kind = values.get("rope_type") or values.get("type") or "default"
    if not isinstance(kind, str):
        raise ModelError(f"config.json: rope_type = {kind!r} is not a text")
    return kind


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """The keys of `rope_parameters` (transformers 5) or of `rope_theta` and `rope_scaling` (4).

    Attributes:
        rope_type: one of `KINDS`; for encoders also "axial": half of the pairs rotates by the first
            of two positions, the other half at the same speeds by the second; or "axial_turns": the
            two halves alternate over all speeds of a head.
        partial_rotary_factor: the share of a head's dimensions that is rotated.
        interleaved: whether neighbours form a pair, instead of an element of each half.
        factor: factor by which the context is extended.
        attention_factor: yarn and longrope: factor of the rotated vectors; None derives it from
            `factor`.
        short_factor, long_factor: longrope: divisor of each pair's speed for contexts as long as in
            training, and for longer ones.
        short_mscale, long_mscale: longrope: `attention_factor` in these two cases.
        longer: longrope: whether the context is longer than in training.
        alpha: dynamic: enlarges the base for all pairs, independent of length.
        mrope_section: numbers of pairs rotated by time, height and width, for positions of three
            axes (Qwen2-VL, arXiv:2409.12191).
        mrope_interleaved: whether the axes' pairs alternate, as in Qwen3-VL; else each axis has a
            section of consecutive pairs.
        mrope_time_last: whether sections are in the order height, width, time: pairs of the first
            two alternate, then follow those of time (ERNIE 4.5 VL).
    """

    rope_theta: float = 10000.0
    rope_type: str = "default"
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None
    longer: bool = False
    alpha: float | None = None
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = True
    mrope_time_last: bool = False

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RopeParameters:
        """Read one dictionary of RoPE parameters.

        Raises:
            ModelError: the type is not one of `KINDS`, a key that it needs is missing, or a value
                has the wrong type or is out of bounds.
        """
        kind = rope_type(values)
        require("rope_type", kind, KINDS)
        for name in _NEEDED.get(kind, ()):
            if values.get(name) is None:
                raise ModelError(f"config.json: rope_type {kind!r} needs {name!r}")
        known = {name: values[name] for name in cls.__slots__ if values.get(name) is not None}
        check_types(cls, known)
        for name in ("mrope_section", "short_factor", "long_factor"):
            known[name] = tuple(known.get(name, ()))
        for name, (above, most) in _BOUNDS.items():
            if name in known and not above < known[name] <= most:
                raise ModelError(f"config.json: {name} = {known[name]!r} is out of bounds")
        parameters = cls(**(known | {"rope_type": kind}))
        if parameters.low_freq_factor > parameters.high_freq_factor:
            raise ModelError("config.json: low_freq_factor is more than high_freq_factor")
        if 0 < len(parameters.mrope_section) < 3:
            section = list(parameters.mrope_section)
            raise ModelError(f"config.json: mrope_section = {section} is not of three positions")
        return parameters


class Rope:
    """Rotates queries and keys of one kind of layer. It has constants but no weights.

    Args:
        head_dim: size of a head.
        parameters: see `RopeParameters`.
    """

    def __init__(self, head_dim: int, parameters: RopeParameters) -> None:
        frequencies, self._gain = _frequencies(head_dim, parameters)
        self._dims = 2 * len(frequencies)
        self._interleaved = parameters.interleaved
        self._frequencies = mx.array(frequencies, dtype=mx.float32)
        # `mx.fast.rope` takes reciprocals; a pair that is not rotated has an infinite one.
        with np.errstate(divide="ignore"):
            self._periods = mx.array(1.0 / frequencies, dtype=mx.float32)
        axes = np.array(_axes(len(frequencies), parameters))
        self._by_axis = [
            (int(axis), mx.array(np.where(axes == axis, frequencies, 0), dtype=mx.float32))
            for axis in np.unique(axes)
        ]
        """The frequencies of the pairs that an axis rotates, 0 for other pairs, by axis."""
        mx.eval(self._frequencies, self._periods, *(each for _, each in self._by_axis))

    def __call__(self, positions: mx.array) -> Rotate:
        """Return the rotation for a step's positions, to be shared by all layers of this kind.

        GPUs have a fused kernel. On a CPU that kernel would recompute the angles in every call;
        sharing them between layers halves the time.

        Args:
            positions: `[T]`, integers, or `[axes, T]`: time, height and width; `[2, T]` if axial.
        """
        # The CUDA kernel of MLX 0.32.4 asks for too large a block when few pairs turn and rows are
        # many ("cudaGraphAddKernelNode ... invalid argument"; seen with 8 pairs and 130 rows).
        if current_device().fuses and self._dims >= 32 and positions.ndim == 1:
            return self._kernel(positions)
        return self._table(positions)

    def _kernel(self, positions: mx.array) -> Rotate:
        dims, periods, gain = self._dims, self._periods, self._gain

        def rotate(x: mx.array) -> mx.array:
            # The T rows form a batch of one-token sequences: [T, heads, 1, head_dim].
            y = mx.fast.rope(
                mx.expand_dims(x, 2),
                dims,
                traditional=self._interleaved,
                base=None,
                scale=1.0,
                offset=positions,
                freqs=periods,
            ).squeeze(2)
            if gain == 1.0:
                return y
            if dims == x.shape[-1]:
                return y * gain
            return mx.concatenate([y[..., :dims] * gain, y[..., dims:]], axis=-1)

        return rotate

    def _table(self, positions: mx.array) -> Rotate:
        if positions.ndim == 1:
            angles = positions.astype(mx.float32)[:, None] * self._frequencies  # [T, dims / 2]
        else:
            # A sum, not a gather: so a fused kernel computes it.
            columns = positions.T.astype(mx.float32)
            parts = [
                columns[:, axis : axis + 1] * frequencies for axis, frequencies in self._by_axis
            ]
            angles = sum(parts[1:], parts[0])
        cos, sin = mx.cos(angles), mx.sin(angles)
        if self._gain != 1:
            cos, sin = cos * self._gain, sin * self._gain
        return current_device().operations.rotation(cos, sin, self._interleaved)


def still(x: mx.array) -> mx.array:
    """Return the vectors as they are: the `Rotate` of layers without a rotation."""
    return x


def _axes(pairs: int, p: RopeParameters) -> list[int]:
    """Return the position axis that rotates each pair."""
    section = p.mrope_section
    if p.rope_type in AXIAL:
        return [0] * (pairs // 2) + [1] * (pairs - pairs // 2)
    if section and not p.mrope_interleaved:
        if sum(section) != pairs or (p.mrope_time_last and section[0] != section[1]):
            raise ModelError(
                f"config.json: mrope_section {list(section)} is not of the {pairs} pairs of a head"
            )
        if p.mrope_time_last:
            return [1, 2] * section[0] + [0] * section[2]
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    axes = [0] * pairs  # height and width take every third pair
    for axis in (1, 2) if section else ():
        for pair in range(axis, min(3 * section[axis], pairs), 3):
            axes[pair] = axis
    return axes


def _frequencies(head_dim: int, p: RopeParameters) -> tuple[np.ndarray, float]:
    """Return the angle per position of each rotated pair, `[dims / 2]`, and the factor of the
    result.

    Sources: RoFormer (arXiv:2104.09864), Llama 3.1's reference code, YaRN (arXiv:2309.00071),
    LongRoPE (arXiv:2402.13753), Gemma 4 (proportional: pairs span the whole head, and the last ones
    are not rotated).
    """
    if p.rope_type == "proportional":
        rotated = int(p.partial_rotary_factor * head_dim // 2)
        moving = p.rope_theta ** -(2.0 * np.arange(rotated) / head_dim) / p.factor
        return np.concatenate([moving, np.zeros(head_dim // 2 - rotated)]), 1.0
    if p.rope_type in AXIAL:
        if head_dim < 4 or head_dim % 4:
            raise ModelError(f"config.json: a head's {head_dim} dimensions: no pairs on two axes")
        half = p.rope_theta ** -(np.arange(0, head_dim // 2, 2) / (head_dim // 2))
        turns = 1.0 if p.rope_type == "axial" else p.rope_theta ** (-2.0 / head_dim)
        return np.concatenate([half, half * turns]), 1.0
    dims = int(head_dim * p.partial_rotary_factor)
    if dims < 2 or dims % 2:
        raise ModelError(f"config.json: {dims} of a head's {head_dim} dimensions are no pairs")
    theta = p.rope_theta * (1.0 if p.alpha is None else p.alpha ** (dims / (dims - 2)))
    plain = theta ** -(np.arange(0, dims, 2) / dims)
    if p.rope_type == "linear":
        return plain / p.factor, 1.0
    if p.rope_type == "llama3":
        return _llama3(plain, p), 1.0
    if p.rope_type == "yarn":
        return _yarn(plain, dims, p), _yarn_gain(p)
    if p.rope_type == "longrope":
        return _longrope(plain, p)
    # "dynamic" grows with a sequence past the context of training, which is the limit here.
    return plain, 1.0


def _longrope(plain: np.ndarray, p: RopeParameters) -> tuple[np.ndarray, float]:
    """Divide each pair's speed by its own factor.

    The published code switches factors once a sequence exceeds the trained context, and recomputes
    all keys. Here the factors of the longest context are always used, so that a token's key does
    not depend on later tokens.
    """
    factors = p.long_factor if p.longer else p.short_factor
    if len(factors) != len(plain):
        raise ModelError(
            f"config.json: longrope has {len(factors)} factors for {len(plain)} pairs of a head"
        )
    gain = p.long_mscale if p.longer else p.short_mscale
    if gain is None:
        gain = p.attention_factor
    if gain is None:
        stretch = math.log(p.factor) / math.log(p.original_max_position_embeddings)
        gain = math.sqrt(1 + stretch) if p.factor > 1 else 1.0
    return plain / np.array(factors), gain


def _llama3(plain: np.ndarray, p: RopeParameters) -> np.ndarray:
    """Slow down slow pairs by `factor`, keep fast ones, and blend pairs between.

    There are none between if both bounds are equal, as in Llama 4 Scout.
    """
    turns = p.original_max_position_embeddings * plain / (2 * math.pi)  # over the old context
    between = p.high_freq_factor - p.low_freq_factor
    above = turns - p.low_freq_factor
    kept = np.clip(above / between, 0.0, 1.0) if between else np.where(above >= 0, 1.0, 0.0)
    blended: np.ndarray = plain * (kept + (1.0 - kept) / p.factor)
    return blended


def _yarn(plain: np.ndarray, dims: int, p: RopeParameters) -> np.ndarray:
    """Interpolate pairs with few turns over the trained context, and keep pairs with many."""

    def pair_with(turns: float) -> float:
        wavelength = p.original_max_position_embeddings / (turns * 2 * math.pi)
        return dims * math.log(wavelength) / (2 * math.log(p.rope_theta))

    low, high = pair_with(p.beta_fast), pair_with(p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001  # a ramp needs a width
    stretched = np.clip((np.arange(dims // 2) - low) / (high - low), 0.0, 1.0)
    blended: np.ndarray = plain * (1.0 - stretched + stretched / p.factor)
    return blended


def _yarn_gain(p: RopeParameters) -> float:
    if p.attention_factor is not None:
        return p.attention_factor

    def gain(mscale: float) -> float:
        return 1.0 if p.factor <= 1 else 0.1 * mscale * math.log(p.factor) + 1.0

    if p.mscale and p.mscale_all_dim:
        return gain(p.mscale) / gain(p.mscale_all_dim)
    return gain(1.0)
