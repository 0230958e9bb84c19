"""The only object that knows which device MLX runs on. All decisions by device ask it."""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from types import MappingProxyType
from typing import ParamSpec, TypeVar

import mlx.core as mx
import psutil

from quire.device.blas import OpenBLASOperations, choose_blas
from quire.device.cpu.heap import keep_large_blocks
from quire.device.cpu.kernels import CPUKernels, NoKernels, load_kernels
from quire.device.cpu.operations import KernelOperations
from quire.device.cuda.driver import maps_memory
from quire.device.cuda.extension import find_extension
from quire.device.cuda.host_copy import PinnedCopy
from quire.device.cuda.operations import CUDAOperations
from quire.device.growing_memory import GrowingMemory
from quire.device.host_copy import HostCopy
from quire.device.machine import device_model, device_number
from quire.device.metal.operations import MetalOperations
from quire.device.operations import Operations, UnfusedOperations
from quire.device.weights import FP4, FP8

log = logging.getLogger("quire.device")

P = ParamSpec("P")
T = TypeVar("T")

_CPU_CACHE = 64 << 20
_GPU_CACHE = 2 << 30
_LEAST_AHEAD = 64 << 20
"""Bytes that results of queued operations may take at least. Waiting for each operation trebles
the processor time of small steps."""


class Device(ABC):
    """Properties and memory of MLX's default device.

    Attributes:
        name: name and architecture, for people.
        fuses: whether MLX has fused kernels for attention, norms and rotation. Where it has none it
            spells them out, in more operations than their callers need.
        compiles: whether `mx.compile` costs no request its time. For a CPU MLX writes C++ and runs
            `g++`, one to five seconds for each kernel, in the step that needs it first.
        compiles_steps: whether the graph of a step is built by `mx.compile` where its shapes were
            seen before, because Python builds it and nothing else runs its layers.
        keeps_compiled: whether all that is compiled is there at the next start.
        default_dtype: of weights whose type nobody asked for; None is the checkpoint's.
        replaced_dtypes: types in which weights are stored instead of the checkpoint's, if nobody
            asked for a type.
        weights_by_columns: whether matrices are multiplied faster when each of their columns lies
            in one run of memory.
        joins_products: whether matrices that multiply the same rows are stored as one.
        joins_codes: whether those in codes are, too.
        shares_cores: whether steps compute on the cores that the server needs, too.
        starts_with_first_layer: whether launching a whole step takes nearly as long as the step.
            Then its first layer is launched alone, and the rest once what waits has gone out.
        code_rows: rows up to which multiplying by codes beats decoding them first.
        slow_code_bits: codes of these sizes are read so slowly that writing them as bytes pays.
        weight_code_bits: bits in which the affine codes of weights are stored, by those that the
            checkpoint has; others stay as they are.
        read_modes: those of `DECODED_MODES` in which products read codes; others are decoded for
            each product.
        dequantizes_fast: whether `mx.dequantize` is faster than shifts and masks of whole words.
        kernel_language: language of kernels that `mx.fast` compiles: "cuda", "metal" or none.
        gathered_bytes: bytes of keys and values that one operation may gather where no kernel reads
            them in place.
        deferred_updates: updates of a delta net's state that may wait beside it.
        kv_share: of the memory that is free once weights are loaded, what KV blocks take unasked.
        kv_first: of the memory for KV blocks, what a pool that is copied to grow takes when it is
            first used.
    """

    fuses: bool
    compiles: bool
    compiles_steps: bool
    keeps_compiled: bool
    default_dtype: mx.Dtype | None
    replaced_dtypes: Mapping[mx.Dtype, mx.Dtype] = MappingProxyType({})
    weights_by_columns: bool
    joins_products: bool
    joins_codes: bool = True
    shares_cores: bool
    starts_with_first_layer: bool
    code_rows: int
    slow_code_bits: frozenset[int]
    weight_code_bits: Mapping[int, int] = MappingProxyType({})
    read_modes: frozenset[str] = frozenset()
    dequantizes_fast: bool
    kernel_language: str
    gathered_bytes: int
    deferred_updates = 0
    kv_share: float
    kv_first = 0.0

    def __init__(self) -> None:
        self.operations = Operations()
        """Operations that models compute with; `choose_products` may replace them."""
        self.kernels: CPUKernels | None = None
        """The compiled CPU kernels, while they are in use."""

    @property
    def name(self) -> str:
        return device_model()

    # -- products ------------------------------------------------------------------------------

    @abstractmethod
    def choose_products(
        self, blas: str, kernels: str = "auto", threads: int = 0, activation_bits: int = 16
    ) -> None:
        """Choose the library of matrix products of this process. Call it before loading weights.

        Args:
            blas, kernels, threads, activation_bits: see `EngineConfig`.

        Raises:
            ModelError: the kernels are asked for instructions that this processor has not.
        """

    def times_transposed(self, x: mx.array, y: mx.array) -> mx.array:
        """`[..., M, K]` times the transpose of `[..., N, K]`: `[..., M, N]`."""
        return x @ y.swapaxes(-1, -2)

    @contextmanager
    def computing_by(self, operations: Operations) -> Iterator[None]:
        """Use other operations within the context; they may call the device's own."""
        own, self.operations = self.operations, operations
        try:
            yield
        finally:
            self.operations = own

    # -- compiled operations -------------------------------------------------------------------

    def fused(self, function: Callable[P, T]) -> Callable[P, T]:
        """Elementwise operations as one kernel, whatever the shapes, where the device compiles.

        Elsewhere `function` itself: spelled in few operations the same arithmetic is as fast for
        many rows.
        """
        if not self.compiles:
            return function
        compiled: Callable[P, T] = mx.compile(function, shapeless=True)
        return compiled

    # -- memory --------------------------------------------------------------------------------

    def host_copy(self, array: mx.array) -> HostCopy:
        """Return an int32 array that the host will read as soon as it is computed."""
        return HostCopy(array)

    def growing_memory(self) -> GrowingMemory | None:
        """Return new memory for arrays of KV pools; None if arrays must be copied to grow."""
        return None

    @abstractmethod
    def free_memory(self) -> int:
        """Return the bytes that the device could still give to arrays."""

    @abstractmethod
    def weight_memory(self) -> int:
        """Return the bytes that weights may take, before any are loaded."""

    def memory(self) -> dict[str, int]:
        """Return the bytes that this process holds, by what: arrays, the most that these ever were,
        freed buffers that MLX keeps, all that the system counts as the process's; and what is free.
        """
        return {
            "arrays": mx.get_active_memory(),
            "arrays_peak": mx.get_peak_memory(),
            "buffers": mx.get_cache_memory(),
            "process": int(psutil.Process().memory_info().rss),
            "free": self.free_memory(),
        }

    @abstractmethod
    def settle(self, weights: Sequence[mx.array]) -> None:
        """Move evaluated weights to memory that is read fastest, where the device has such. The
        arrays stay the same objects.
        """

    def bound_steps(self, kv_memory: int) -> None:
        """Let MLX queue operations ahead only while arrays stay near what there is now and
        `kv_memory`; beyond that each waits for the one before, whose memory it can use.
        """
        ahead = max(kv_memory // 32, _LEAST_AHEAD)
        mx.set_memory_limit(mx.get_active_memory() + kv_memory + ahead)

    @abstractmethod
    def bound_caches(self) -> None:
        """Limit MLX's cache of freed buffers, which counts as memory.

        Steps differ in shape, so the cache would grow without limit.
        """


class CPU(Device):
    """MLX's CPU backend, with compiled kernels, or else OpenBLAS's products, where they exist."""

    fuses = False
    compiles = False
    compiles_steps = False
    keeps_compiled = False
    default_dtype = mx.float32  # there is no faster type
    joins_products = False
    shares_cores = True
    starts_with_first_layer = True
    # A token gets the same codes however it is read, with MLX's own products to the bit, if they
    # are always multiplied alike. That is also 2 to 3 times as fast. OpenBLAS would multiply many
    # decoded rows faster, but more cases of the parity matrix turned a code then.
    code_rows = sys.maxsize
    slow_code_bits = frozenset({2, 3, 5, 6})  # 2 to 8 times as long as 8 bits
    dequantizes_fast = False  # MLX's shifts and masks code by code: 2 to 10 times as long
    kernel_language = ""
    gathered_bytes = 1 << 20  # what a core's cache holds
    kv_share = 0.25

    def __init__(self) -> None:
        super().__init__()
        self.operations = UnfusedOperations()
        self.weights_by_columns = True  # for MLX's products; the kernels want rows

    def choose_products(
        self, blas: str, kernels: str = "auto", threads: int = 0, activation_bits: int = 16
    ) -> None:
        self.kernels = None
        self.operations = UnfusedOperations()
        choose_blas("mlx")
        if blas == "auto":
            try:
                self.kernels = load_kernels(threads, kernels, activation_bits)
            except NoKernels as error:
                log.warning("%s", error)
        if self.kernels is not None:
            self.operations = KernelOperations(self.kernels)
            log.info("CPU kernels: %s", self.kernels)
        elif blas != "mlx" and choose_blas("openblas", threads):
            self.operations = OpenBLASOperations()
        self.weights_by_columns = self.kernels is None
        self.read_modes = frozenset() if self.kernels is None else frozenset({FP8})

    def times_transposed(self, x: mx.array, y: mx.array) -> mx.array:
        # Laid out first: OpenBLAS multiplies small products by a transposed matrix in another order
        # than large ones (AVX-512), so a row's bits would depend on their number.
        return x @ mx.contiguous(y.swapaxes(-1, -2))

    def free_memory(self) -> int:
        return int(psutil.virtual_memory().available)

    def weight_memory(self) -> int:
        return self.free_memory()

    def settle(self, weights: Sequence[mx.array]) -> None:
        if self.kernels is not None:
            self.kernels.ops.move_to_large_pages(list(weights))

    def bound_caches(self) -> None:
        mx.set_cache_limit(_CPU_CACHE)
        keep_large_blocks()


class GPU(Device):
    """Traits that MLX's GPU backends have in common."""

    fuses = True
    compiles = True
    default_dtype = None
    weights_by_columns = False
    shares_cores = False
    starts_with_first_layer = False
    code_rows = 8
    slow_code_bits: frozenset[int] = frozenset()
    dequantizes_fast = True
    gathered_bytes = 256 << 20
    kv_share = 0.85

    def choose_products(
        self, blas: str, kernels: str = "auto", threads: int = 0, activation_bits: int = 16
    ) -> None:
        """Do nothing: there are only MLX's own products."""

    def settle(self, weights: Sequence[mx.array]) -> None:
        """Do nothing: a GPU's memory has large pages."""

    def bound_caches(self) -> None:
        mx.set_cache_limit(_GPU_CACHE)  # allocating is slow there, so they may be many


class CUDA(GPU):
    """NVIDIA GPUs."""

    replaced_dtypes = MappingProxyType({mx.float16: mx.bfloat16})  # the only type of graphs
    compiles_steps = False  # CUDA graphs run them
    joins_products = True
    joins_codes = False  # graphs join them by themselves
    code_rows = 0  # MLX 0.32.4 has kernels for some shapes of codes only, and fails for the others
    weight_code_bits = MappingProxyType({2: 4, 3: 4, 5: 8, 6: 8})  # tensor core kernels read these
    read_modes = frozenset({FP8, FP4})
    kernel_language = "cuda"
    keeps_compiled = True
    deferred_updates = 3
    kv_first = 0.125  # all graphs are made again when a pool moves, and nobody else has the memory

    def __init__(self) -> None:
        super().__init__()
        self.operations = CUDAOperations()
        self._extension = find_extension()

    def fused(self, function: Callable[P, T]) -> Callable[P, T]:
        return function  # MLX 0.32.4 compiles 5 s for each; graphs have kernels of their own

    def host_copy(self, array: mx.array) -> HostCopy:
        if self._extension is None:
            return super().host_copy(array)
        return PinnedCopy(array, self._extension)

    def growing_memory(self) -> GrowingMemory | None:
        if self._extension is None or not maps_memory():
            return None
        return self._extension.GrowingMemory()

    def memory(self) -> dict[str, int]:
        found = super().memory()
        if self._extension is not None:
            mapped, before = self._extension.mapped_bytes()
            most = max(found["arrays_peak"], found["arrays"])
            found["arrays"] += mapped
            found["arrays_peak"] = max(before, mapped + most)
        return found

    def free_memory(self) -> int:
        return device_number("free_memory")

    def weight_memory(self) -> int:
        return self.free_memory()


class Metal(GPU):
    """Apple silicon."""

    compiles_steps = True
    joins_products = True
    kernel_language = "metal"
    keeps_compiled = False

    def __init__(self) -> None:
        super().__init__()
        self.operations = MetalOperations()

    def free_memory(self) -> int:
        return self._working_set() - mx.get_active_memory()

    def weight_memory(self) -> int:
        return min(self._working_set(), device_number("memory_size"))

    def bound_caches(self) -> None:
        super().bound_caches()
        mx.set_wired_limit(self._working_set())

    def _working_set(self) -> int:
        return device_number("max_recommended_working_set_size")


def gpu_backends() -> list[str]:
    """Return the GPU backends that this MLX can use here: "metal", "cuda" or none."""
    return [name for name in ("metal", "cuda") if getattr(mx, name).is_available()]


class TracingDevice(CPU):
    """Stands for the device while a model is traced. Traces do not depend on the device."""

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.operations = operations


_tracing: list[TracingDevice] = []
"""Whether a model is being traced. Only the thread that owns MLX uses it."""


@contextmanager
def traced_by(operations: Operations) -> Iterator[None]:
    """Use these operations in place of the device's within the context, and record primitives for a
    CPU.
    """
    _tracing.append(TracingDevice(operations))
    try:
        with mx.stream(mx.cpu):
            yield
    finally:
        _tracing.pop()


def current_device() -> Device:
    """Return MLX's default device, always the same object; a stand-in while a model is traced."""
    return _tracing[-1] if _tracing else _default_device()


@cache
def _default_device() -> Device:
    if mx.default_device() == mx.cpu:
        return CPU()
    return Metal() if mx.metal.is_available() else CUDA()


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Return `Device.fused` for functions of a module: the device is asked at the first call."""

    @cache
    def by(device: Device) -> Callable[P, T]:
        return device.fused(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        device = current_device()
        traced = isinstance(device, TracingDevice)
        return function(*args, **kwargs) if traced else by(device)(*args, **kwargs)

    return call


def open_device(
    blas: str, kernels: str = "auto", threads: int = 0, activation_bits: int = 16
) -> Device:
    """Return the device made ready to serve: products chosen, caches bounded. Call it before any
    weights.

    Args:
        blas, kernels, threads, activation_bits: see `EngineConfig`.

    Raises:
        ModelError: the kernels are asked for instructions that this processor has not.
    """
    device = current_device()
    device.bound_caches()
    device.choose_products(blas, kernels, threads, activation_bits=activation_bits)
    return device
