"""Products of plain matrices by cuBLASLt, which MLX's CUDA packages install, for CUDA graphs."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quire.device.cuda.driver import DriverError, LibraryFunction

_FLOAT32_SUMS = 68  # CUBLAS_COMPUTE_32F
_FLOAT32, _BFLOAT16 = 0, 14  # CUDA_R_32F, CUDA_R_16BF
_TRANSPOSE_A = 3  # CUBLASLT_MATMUL_DESC_TRANSA
_TRANSPOSED = 1  # CUBLAS_OP_T
_EPILOGUE, _BIAS_ADDRESS = 7, 8  # CUBLASLT_MATMUL_DESC_*: EPILOGUE, BIAS_POINTER
_ADDS_BIAS = 4  # CUBLASLT_EPILOGUE_BIAS
_WORKSPACE_BYTES, _REDUCTIONS = 1, 3  # CUBLASLT_MATMUL_PREF_*: MAX_WORKSPACE_BYTES, ..._SCHEME_MASK
_ALIGNMENTS = (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES to ..._D_BYTES
ALIGNMENT = 16
"""Bytes to which addresses of operands are aligned."""
_MOST_PROPOSALS = 6
"""Algorithms that the library is asked for. It orders them by the time that it expects."""


class _Algorithm(ctypes.Structure):
    """The library's cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class LibraryProduct(LibraryFunction):
    """The product of `rows` rows with a matrix in bfloat16: arguments are x `[rows, inputs]`, the
    matrix `[outputs, inputs]`, y `[rows, outputs]` and, with `biased`, what is added `[outputs]`.

    The library's proposals are always the same for a shape, a version and a card. No parts of a sum
    are added up in memory, so that no workspace is needed and bits do not vary.

    Attributes:
        proposal: number of the library's proposal that computes it.
    """

    rows: int
    inputs: int
    outputs: int
    biased: bool = False
    proposal: int = 0

    def proposals(self) -> list[LibraryProduct]:
        """Return the product by each of the library's proposals.

        Raises:
            DriverError: the library has none.
        """
        return [replace(self, proposal=number) for number in range(len(self._plan.proposals))]

    @property
    def _plan(self) -> _Plan:
        """The descriptions that all proposals share."""
        return _plan(replace(self, proposal=0))

    @property
    def is_supported(self) -> bool:
        """Whether the library has an algorithm for it."""
        try:
            return bool(self._plan.proposals)
        except DriverError:
            return False

    def enqueue(self, stream: int, arguments: tuple[int, ...]) -> None:
        x, weight, y, *bias = map(ctypes.c_void_p, arguments)
        self._plan.enqueue(
            stream, x, weight=weight, y=y, bias=bias[0] if self.biased else None, by=self.proposal
        )


@dataclass(frozen=True, slots=True)
class Library:
    """cuBLASLt, where it computes products of graphs.

    Attributes:
        version: by which it chooses algorithms.
        least_rows: rows of the smallest graph whose products it computes.
    """

    version: int
    least_rows: int

    def serves(self, max_rows: int) -> bool:
        """Whether it computes products of graphs of `max_rows` rows."""
        return max_rows >= self.least_rows


class _Plan:
    """The library's descriptions of a product, and its proposals. Kept until the process ends.

    Attributes:
        proposals: algorithms, of which the library expects the first to be the quickest.

    Raises:
        DriverError: the library has no algorithm for it.
    """

    def __init__(self, product: LibraryProduct) -> None:
        rows, inputs, outputs = product.rows, product.inputs, product.outputs
        self._description = _created("MatmulDesc", _FLOAT32_SUMS, _FLOAT32)
        _set("MatmulDesc", self._description, _TRANSPOSE_A, value=ctypes.c_int32(_TRANSPOSED))
        if product.biased:
            epilogue = ctypes.c_uint32(_ADDS_BIAS)
            _set("MatmulDesc", self._description, _EPILOGUE, value=epilogue)
        # The library counts columns first: for it these arrays are W^T, x^T and y^T = W x^T.
        self._weight = _layout(inputs, outputs)
        self._x, self._y = _layout(inputs, rows), _layout(outputs, rows)
        preference = _created("MatmulPreference")
        _set("MatmulPreference", preference, _WORKSPACE_BYTES, value=ctypes.c_uint64(0))
        _set("MatmulPreference", preference, _REDUCTIONS, value=ctypes.c_uint32(0))
        for each in _ALIGNMENTS:
            _set("MatmulPreference", preference, each, value=ctypes.c_uint32(ALIGNMENT))
        found, count = (_Algorithm * _MOST_PROPOSALS)(), ctypes.c_int()
        described = self._description, self._weight, self._x, self._y, self._y, preference
        wanted = _MOST_PROPOSALS, found, ctypes.byref(count)
        _call("MatmulAlgoGetHeuristic", _handle(), *described, *wanted)
        self.proposals = [each for each in found[: count.value] if not each.state]
        if not self.proposals:
            raise DriverError(f"cuBLASLt has no algorithm for {product}")

    def enqueue(
        self,
        stream: int,
        x: ctypes.c_void_p,
        *,
        weight: ctypes.c_void_p,
        y: ctypes.c_void_p,
        bias: ctypes.c_void_p | None,
        by: int,
    ) -> None:
        """Launch the kernels of proposal number `by`."""
        if bias is not None:
            _set("MatmulDesc", self._description, _BIAS_ADDRESS, value=bias)
        one, zero = (ctypes.byref(ctypes.c_float(each)) for each in (1, 0))
        left, right = (weight, self._weight), (x, self._x)
        sums, result = (y, self._y), (y, self._y)
        algorithm, workspace = ctypes.byref(self.proposals[by]), (None, ctypes.c_size_t(0))
        scaled = (one, *left, *right, zero, *sums, *result)
        on = ctypes.c_void_p(stream)
        _call("Matmul", _handle(), self._description, *scaled, algorithm, *workspace, on)


@cache
def _plan(product: LibraryProduct) -> _Plan:
    return _Plan(product)


def library_version() -> int | None:
    """Return the version of cuBLASLt, which decides about algorithms; None if it is missing."""
    try:
        return int(_library().cublasLtGetVersion())
    except DriverError:
        return None


def _layout(rows: int, columns: int) -> ctypes.c_void_p:
    """Describe a matrix in bfloat16 whose columns lie one behind the other."""
    sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
    return _created("MatrixLayout", _BFLOAT16, *sizes)


def _created(kind: str, *arguments: Any) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _call(f"{kind}Create", ctypes.byref(made), *arguments)
    return made


def _set(kind: str, of: ctypes.c_void_p, attribute: int, *, value: Any) -> None:
    size = ctypes.c_size_t(ctypes.sizeof(value))
    _call(f"{kind}SetAttribute", of, attribute, ctypes.byref(value), size)


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status:
        raise DriverError(f"cublasLt{name}: status {status}")


@cache
def _handle() -> ctypes.c_void_p:
    """Return a handle of the library for MLX's context, which is current in this thread."""
    return _created("")


@cache
def _library() -> Any:
    """Return the library, which MLX has loaded.

    Raises:
        DriverError: it cannot be found.
    """
    for version in (13, 12):
        try:
            return ctypes.CDLL(f"libcublasLt.so.{version}")
        except OSError:
            continue
    raise DriverError("libcublasLt cannot be found")
