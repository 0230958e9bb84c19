"""The gated delta rule by a kernel. MLX 0.32.4 launches some 16 for each token on CUDA."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cache, partial

import mlx.core as mx

from quire.device import recurrence
from quire.device.gpu_kernels import Kernel, cuda_kernel, kernel_text
from quire.device.recurrence import DeltaGates
from quire.device.verified import Check, SoundKernels, Verification, disagreement

log = logging.getLogger("quire.device")

THREADS = 128
_WARPS, _LANES = THREADS // 32, 8
"""Warps of a thread block, and lanes that share rows of a state."""
RESIDENT = 3
"""Thread blocks that a multiprocessor must be able to run at once: a thread has 168 registers. With
two or four a step takes as long (benchmarks/results/gpu-runs.md).
"""
_MOST_KEYS = 256
_FEW_ROWS = 16
"""Most rows of a step whose states are divided among as many thread blocks as possible."""
_TOLERANCE = 2e-2
_TOKENS = 5
"""Tokens of a sequence in the comparison with MLX."""


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Compile-time constants of `delta_rule.cuh`.

    Attributes:
        heads: of values; consecutive ones share a key head.
        by_channel: whether each column of a state forgets by itself.
        eps: added to the squared lengths of queries and keys.
        most_correction, most_forgotten: see `DeltaGates`.
        own: rows of a state that eight lanes share, see `own_values`.
        deferred: updates of a state that may wait beside it, see `recurrence.WAITING`.
        convolved: whether the kernel convolves the rows that it reads.
    """

    heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    by_channel: bool
    eps: float
    most_correction: float
    most_forgotten: float | None
    own: int = 1
    deferred: int = 0
    convolved: bool = False

    @property
    def served(self) -> bool:
        """Whether the kernel supports the shape."""
        fits = self.key_dim % 4 == 0 and self.key_dim <= _MOST_KEYS
        return fits and self.value_dim % self._of_warp == 0

    @property
    def convolves(self) -> bool:
        """Whether each thread block can convolve what it reads, four channels a thread."""
        rows = _WARPS * self._of_warp
        fits = 2 * self.key_dim + rows <= 4 * THREADS
        return fits and self.value_dim % rows == 0 and not self.by_channel

    @property
    def channels(self) -> int:
        """Width of the rows of queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def blocks(self) -> int:
        """Thread blocks of a sequence."""
        return self.heads * self._parts

    @property
    def _parts(self) -> int:
        return -(-self.value_dim // (_WARPS * self._of_warp))

    @property
    def _of_warp(self) -> int:
        return 32 // _LANES * self.own

    def defines(self, mixed_row: int, steps_row: int, betas_row: int) -> str:
        """Return the lines that define the constants.

        Args:
            mixed_row, steps_row, betas_row: elements from one row of an operand to the next.
        """
        numbers = {
            "HEADS": self.heads,
            "KEY_HEADS": self.key_heads,
            "VALUE_DIM": self.value_dim,
            "KEY_DIM": self.key_dim,
            "WARPS": _WARPS,
            "OWN": self.own,
            "DEFERRED": self.deferred,
            "CONVOLVED": int(self.convolved),
            "PARTS": self._parts,
            "MIXED_ROW": mixed_row,
            "STEPS_ROW": steps_row,
            "BETAS_ROW": betas_row,
            "BY_CHANNEL": int(self.by_channel),
            "BOUNDED": int(self.most_forgotten is not None),
            "MOST_FORGOTTEN": f"({self.most_forgotten or 0.0!r}f)",
            "MOST_CORRECTION": f"{self.most_correction!r}f",
            "UNIT_EPS": f"{self.eps!r}f",
        }
        return "".join(f"#define {name} {number}\n" for name, number in numbers.items())


def own_values(value_dim: int, rows: int) -> int:
    """Return how many rows of a state eight lanes share.

    More of them take fewer instructions, and fewer thread blocks
    (benchmarks/results/gpu-runs.md).
    """
    return next((n for n in (4, 2) if rows > _FEW_ROWS and value_dim % (32 // _LANES * n) == 0), 1)


class DeltaRules:
    """Advances states by the kernel. Each rule is compared with MLX once, and left to MLX if the
    kernel differs.
    """

    def __init__(self) -> None:
        self._sound = SoundKernels(log, "The delta rule", "MLX advances states")

    def advance(
        self, mixed: mx.array, gates: DeltaGates, state: mx.array, key_heads: int, eps: float
    ) -> tuple[mx.array, mx.array] | None:
        """Compute `Operations.gated_delta`. Return None if the kernel does not support the case."""
        heads, value_dim, key_dim = state.shape[1:]
        rule = DeltaRule(
            heads,
            key_heads,
            value_dim,
            key_dim=key_dim,
            by_channel=gates.steps.ndim == 4,
            eps=eps,
            most_correction=gates.most_correction,
            most_forgotten=gates.most_forgotten,
            own=own_values(value_dim, mixed.shape[0] * mixed.shape[1]),
        )
        types = tuple(each.dtype for each in (mixed, *_arrays(gates), state))
        kind, check = (rule, types), partial(difference_of, rule, types)
        verification = Verification(Check.RECURRENCES_AGREE, kind)
        if rule.served and self._sound.holds(kind, check, verification):
            return _advanced(rule, mixed, gates, state=state)
        return None


def _arrays(gates: DeltaGates) -> tuple[mx.array, ...]:
    return gates.steps, gates.betas, gates.log_rates, gates.step_biases


def _advanced(
    rule: DeltaRule, mixed: mx.array, gates: DeltaGates, state: mx.array
) -> tuple[mx.array, mx.array]:
    n, t, _ = mixed.shape
    y, after = _kernel(rule)(
        inputs=[mixed, *_arrays(gates), state],
        grid=(rule.blocks * THREADS, n, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(n, t, rule.heads, rule.value_dim), state.shape],
        output_dtypes=[mixed.dtype, state.dtype],
    )
    return y, after


@cache
def _kernel(rule: DeltaRule) -> Kernel:
    steps = rule.heads * (rule.key_dim if rule.by_channel else 1)
    header = [
        "#define HALF\n",
        kernel_text(__package__, "rows.cuh"),
        "__device__ __forceinline__ void wait_for_others() {}\n",
        rule.defines(rule.channels, steps, betas_row=rule.heads),
    ]
    body = [
        "const int count = mixed_shape[1], slot = blockIdx.y, first = slot * count;",
        "auto* to = after;",
        kernel_text(__package__, "delta_rule.cuh"),
        "keep(slot);",
    ]
    return cuda_kernel(
        f"quire_delta_rule_{rule}",
        ["mixed", "steps", "betas", "log_rates", "step_biases", "state"],
        ["y", "after"],
        body="\n".join(body),
        header="".join(header),
    )


# -- held against MLX's ----------------------------------------------------------------------------


def difference_of(rule: DeltaRule, types: tuple[mx.Dtype, ...]) -> str | None:
    """Return how the kernel differs from MLX on two random sequences; None if it agrees.

    Args:
        types: of mixed rows, the gates' arrays and the state.
    """
    heads, lead = rule.heads, (2, _TOKENS)
    columns = (heads, rule.key_dim) if rule.by_channel else (heads,)
    shapes: list[tuple[int, ...]] = [
        (*lead, 2 * rule.key_heads * rule.key_dim + heads * rule.value_dim)
    ]
    shapes += [(*lead, *columns), (*lead, heads), (heads,), columns]
    shapes += [(2, heads, rule.value_dim, rule.key_dim)]
    keys = mx.random.split(mx.random.key(0), len(shapes))
    mixed, steps, betas, log_rates, step_biases, state = (
        mx.random.normal(shape, key=key).astype(dtype)
        for shape, key, dtype in zip(shapes, keys, types, strict=True)
    )
    own = DeltaGates(
        steps,
        betas,
        log_rates,
        step_biases=step_biases.reshape(-1),
        most_correction=rule.most_correction,
        most_forgotten=rule.most_forgotten,
    )
    found = _advanced(rule, mixed, own, state=state)
    wide = replace(own, steps=own.steps.astype(mx.float32), betas=own.betas.astype(mx.float32))
    expected = recurrence.delta_rule(
        mixed.astype(mx.float32), wide, state, key_heads=rule.key_heads, eps=rule.eps
    )
    for name, got, exact in zip(("results", "states"), found, expected, strict=True):
        if problem := disagreement(got, exact, _TOLERANCE):
            return f"{name}: {problem}"
    return None
