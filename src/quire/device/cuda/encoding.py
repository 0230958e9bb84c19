"""Codes vectors, one warp each: affine codes, or a direction by a codebook."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod

import mlx.core as mx

from quire.device.coding import VectorCoding
from quire.device.gpu_kernels import Kernel, cuda_kernel, in_device_memory, kernel_text
from quire.device.verified import SoundKernels

log = logging.getLogger("quire.device")

_PACKAGE = "quire.device.cuda"
_THREADS = 128
LONGEST = 512
_TOLERANCE = 1.02
_OTHER_CODES = 0.01
"""Largest fraction of a codebook's codes that may differ from MLX's: elements at a bin's edge."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Compile-time constants of the kernels that code vectors; compare `VectorCoding`.

    Attributes:
        dim: elements of a vector before padding.
        scale: scale of the rotation; 0 without rotation.
    """

    dim: int
    size: int
    group: int
    bits: int
    refits: int
    reach: float
    scale: float
    codebook: bool

    @staticmethod
    def of(dim: int, coding: VectorCoding) -> Kind:
        return Kind(
            dim,
            coding.size,
            coding.group_size,
            bits=coding.bits,
            refits=coding.refits,
            reach=coding.reach,
            scale=0.0 if coding.rotation is None else coding.rotation.transform_scale,
            codebook=coding.edges is not None,
        )

    @property
    def constants(self) -> str:
        """The template arguments of `encode.cuh`, without `dim`."""
        levels = "true" if self.codebook else "false"
        return f"{self.size}, {self.group}, {self.bits}, {self.refits}, {levels}"


class Encoder:
    """Codes vectors. Each kind is checked once in a process; MLX's operations replace a
    wrong one.
    """

    def __init__(self) -> None:
        self._sound = SoundKernels(log, "Encoding of KV vectors", "MLX encodes them")
        self._plans: dict[tuple[tuple[int, mx.Dtype, VectorCoding], ...], _Plan | None] = {}

    def encode(
        self, vectors: Sequence[mx.array], codings: Sequence[VectorCoding]
    ) -> list[mx.array] | None:
        """Code vectors as `Operations.encode` does. Return None if no kernel supports the case."""
        key = tuple((x.shape[-1], x.dtype, of) for x, of in zip(vectors, codings, strict=True))
        if key not in self._plans:
            served = all(map(self._serves, vectors, codings))
            self._plans[key] = _Plan.of(vectors, codings) if served else None
        plan = self._plans[key]
        return None if plan is None or any(not x.size for x in vectors) else plan.coded(vectors)

    def _serves(self, x: mx.array, coding: VectorCoding) -> bool:
        """Return whether the kernel of a kind is right. Checks it at the first call."""
        fast = coding.rotation is None or coding.rotation.map.ndim == 1
        fits = coding.size <= LONGEST and coding.group_size % 32 == 0
        if not fast or not fits or x.dtype not in (mx.float32, mx.float16, mx.bfloat16):
            return False
        return self._sound.holds(Kind.of(x.shape[-1], coding), lambda: encoding_differs(coding))


@dataclass(frozen=True, slots=True)
class _Plan:
    """Arguments shared by launches for the same kinds of vectors.

    Attributes:
        tables: for each vector, its signs and edges, if any.
        parts: for each vector, the number of elements of its words, scales and biases.
    """

    kernel: Kernel
    tables: list[list[mx.array]]
    parts: list[list[int]]
    dtypes: list[mx.Dtype]

    @staticmethod
    def of(vectors: Sequence[mx.array], codings: Sequence[VectorCoding]) -> _Plan:
        tables: list[list[mx.array]] = []
        parts: list[list[int]] = []
        dtypes: list[mx.Dtype] = []
        for coding in codings:
            tables.append([coding.rotation.map] if coding.rotation else [])
            tables[-1] += [] if coding.edges is None else [coding.edges]
            groups = [coding.size // coding.group_size] * (2 if coding.edges is None else 1)
            parts.append([coding.size * coding.bits // 32, *groups])
            dtypes += [mx.uint32, *([mx.float16] * len(groups))]
        kinds = tuple(Kind.of(x.shape[-1], of) for x, of in zip(vectors, codings, strict=True))
        return _Plan(_kernel(kinds), tables, parts, dtypes=dtypes)

    def coded(self, vectors: Sequence[mx.array]) -> list[mx.array]:
        """Code all vectors by one launch; return their parts."""
        inputs: list[mx.array] = []
        shapes: list[tuple[int, ...]] = []
        counts: list[int] = []
        for x, tables, parts in zip(vectors, self.tables, self.parts, strict=True):
            *lead, _ = x.shape
            counts.append(prod(lead))
            inputs += [x, *tables]
            shapes += [(*lead, n) for n in parts]
        blocks = -(-max(counts) * 32 // _THREADS)
        return self.kernel(
            inputs=[*inputs, _numbers(tuple(counts))],
            grid=(blocks * _THREADS, len(counts), 1),
            threadgroup=(_THREADS, 1, 1),
            output_shapes=shapes,
            output_dtypes=self.dtypes,
        )


@lru_cache(maxsize=64)
def _numbers(counts: tuple[int, ...]) -> mx.array:
    return in_device_memory(mx.array(counts))


@cache
def _kernel(kinds: tuple[Kind, ...]) -> Kernel:
    inputs: list[str] = []
    outputs: list[str] = []
    calls: list[str] = []
    for n, kind in enumerate(kinds):
        signs = f"signs_{n}" if kind.scale else "nullptr"
        edges, biases = (f"edges_{n}", "nullptr") if kind.codebook else ("nullptr", f"biases_{n}")
        inputs += [name for name in (f"x_{n}", signs, edges) if name != "nullptr"]
        outputs += [name for name in (f"words_{n}", f"scales_{n}", biases) if name != "nullptr"]
        numbers = f"(float){kind.scale!r}, (float){kind.reach!r}"
        calls.append(
            f"if (blockIdx.y == {n}) encode<{kind.dim}, {kind.constants}>(x_{n}, count[{n}], "
            f"{signs}, {numbers}, {edges}, words_{n}, scales_{n}, {biases});"
        )
    header = f"#define THREADS {_THREADS}\n" + coding_text()
    return cuda_kernel(
        f"quire_encode_{kinds}",
        [*inputs, "count"],
        outputs,
        body="\n".join(calls),
        header=header,
    )


def coding_text() -> str:
    """Return the device functions that code vectors. The source must define `THREADS`."""
    return kernel_text(_PACKAGE, "coding.cuh") + kernel_text(_PACKAGE, "encode.cuh")


def encoding_differs(coding: VectorCoding) -> str | None:
    """Return by how much codes of random vectors exceed the expected error; None if they do not.

    Affine codes must be no worse than those that span a group's range.
    """
    x = mx.random.normal((9, coding.size), key=mx.random.key(0)) * 3 + 1
    rotated, rotation = x, coding.rotation
    if rotation is not None:
        rotated = mx.hadamard_transform(x * rotation.map, rotation.scale)
    if coding.edges is not None:
        return _other_codes(x, rotated, coding, edges=coding.edges)
    words, scales, biases = _Plan.of([x], [coding]).coded([x])
    group, bits = coding.group_size, coding.bits
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    read = mx.dequantize(words, scales, biases, group_size=group, bits=bits)
    own, usual = (
        float(mx.linalg.norm(each - rotated)) for each in (read, _by_range(rotated, group, bits))
    )
    # Written so that a NaN is too much.
    return (
        None
        if own <= _TOLERANCE * usual
        else f"an error of {own:.3g}, that of codes by the range is {usual:.3g}"
    )


def _by_range(x: mx.array, group: int, bits: int) -> mx.array:
    """Code and decode `[n, size]` by each group's range."""
    grouped = mx.unflatten(x, -1, (-1, group))
    low, high = grouped.min(axis=-1, keepdims=True), grouped.max(axis=-1, keepdims=True)
    scale = (high - low) / (2**bits - 1)
    read: mx.array = mx.round((grouped - low) / scale) * scale + low
    return read.reshape(x.shape)


def _other_codes(
    x: mx.array, turned: mx.array, coding: VectorCoding, edges: mx.array
) -> str | None:
    words, scales = _Plan.of([x], [coding]).coded([x])
    length = mx.linalg.norm(turned, axis=-1, keepdims=True)
    usual = (turned[..., None] > length[..., None] * edges).sum(axis=-1)
    ones = mx.ones((len(x), coding.size // 32))
    own = mx.dequantize(words, ones, 0 * ones, group_size=32, bits=coding.bits)
    share = float((own != usual).astype(mx.float32).mean())
    lengths = float(mx.abs(scales - length).max() / length.max())
    right = share <= _OTHER_CODES and lengths <= 1e-3
    return None if right else f"{share:.2%} of the codes are others, lengths are {lengths:.2g} off"
