"""The parts of CUDA's driver and run-time compiler that recording a graph of kernels needs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
_MAPS_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_SHARED_BY_ASKING = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_MOST_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED: a library may load kernels meanwhile
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_HOPPER = 90
"""The compute capability whose instructions for warpgroups no other one has."""
_SHARED = 48 << 10
"""Most bytes of shared memory that a kernel gets without a request."""
_HEADER = "cuda_bf16.h"
_NICE = 10
"""Niceness of threads that compile: steps and the server come first."""


class DriverError(Exception):
    """Raised if a call of the driver or the compiler fails; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Card:
    """The properties of a GPU on which the tiling of kernels depends.

    Attributes:
        shared: the most bytes of shared memory of a thread block.
        warpgroups: whether it has Hopper's instructions for groups of four warps (wgmma).
    """

    multiprocessors: int
    shared: int
    warpgroups: bool = False


class LibraryFunction(ABC):
    """A call of a library that launches kernels. A graph holds them as a child graph.

    Equal functions launch the same kernels.
    """

    @abstractmethod
    def enqueue(self, stream: int, arguments: tuple[int, ...]) -> None:
        """Launch the kernels.

        Args:
            stream: handle of a stream, which may be capturing.
            arguments: addresses.

        Raises:
            DriverError: the library refuses.
        """


Source = str | LibraryFunction
"""The source of a kernel, or what a library launches in its place."""
Function = int | LibraryFunction
"""A compiled kernel's handle, or what a library launches in its place."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel launch in a graph. All its arguments are addresses.

    Attributes:
        function: from `Compiler`. Of a library only `arguments` and `after` count.
        grid, block: number of thread blocks, and threads of each.
        shared: bytes of dynamic shared memory.
        after: numbers of the launches that must be done before.
    """

    function: Function
    grid: tuple[int, int, int]
    block: int
    shared: int
    arguments: tuple[int, ...]
    after: tuple[int, ...]


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )


class Graph:
    """A CUDA graph of launches.

    Args:
        kept: arrays that kernels read, kept alive as long as the graph.
    """

    def __init__(self, launches: Sequence[Launch], kept: Sequence[mx.array] = ()) -> None:
        self._kept = kept
        graph, self._exec = ctypes.c_void_p(), ctypes.c_void_p()
        driver_call("cuGraphCreate", ctypes.byref(graph), 0)
        try:
            nodes = [_added(graph, launch) for launch in launches]
            _depend(graph, nodes, launches)
            flags = ctypes.c_ulonglong(0)
            driver_call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), graph, flags)
        finally:
            driver_call("cuGraphDestroy", graph)

    @property
    def handle(self) -> int:
        """Handle by which the graph is launched."""
        return self._exec.value or 0

    def __del__(self) -> None:
        if self._exec:
            _driver().cuGraphExecDestroy(self._exec)


def _added(graph: ctypes.c_void_p, launch: Launch) -> int:
    """Add a launch to a graph and return its node."""
    if isinstance(launch.function, LibraryFunction):
        return _added_child(graph, launch.function, launch.arguments)
    values = (ctypes.c_uint64 * len(launch.arguments))(*launch.arguments)
    places = (ctypes.c_void_p * len(values))(
        *(ctypes.addressof(values) + 8 * number for number in range(len(values)))
    )
    if launch.shared > _SHARED:
        _allow(launch.function, launch.shared)
    node = ctypes.c_void_p()
    sizes = (*launch.grid, launch.block, 1, 1, launch.shared)
    described = _KernelNode(launch.function, *sizes, ctypes.addressof(places), None, None, None)
    no_others = ctypes.c_size_t(0)
    arguments = ctypes.byref(node), graph, None, no_others, ctypes.byref(described)
    driver_call("cuGraphAddKernelNode_v2", *arguments)
    assert node.value is not None, "the driver made no node"
    return node.value


def _added_child(
    graph: ctypes.c_void_p, function: LibraryFunction, arguments: tuple[int, ...]
) -> int:
    """Add the kernels that a library launches to a graph, as one node."""
    stream, child, node = _capturing_stream(), ctypes.c_void_p(), ctypes.c_void_p()
    driver_call("cuStreamBeginCapture_v2", stream, _RELAXED)
    try:
        function.enqueue(stream.value or 0, arguments)
    finally:
        ended = _driver().cuStreamEndCapture(stream, ctypes.byref(child))
    _check("cuStreamEndCapture", ended)
    try:
        no_others = ctypes.c_size_t(0)
        driver_call("cuGraphAddChildGraphNode", ctypes.byref(node), graph, None, no_others, child)
    finally:
        driver_call("cuGraphDestroy", child)
    assert node.value is not None, "the driver made no node"
    return node.value


@cache
def _capturing_stream() -> ctypes.c_void_p:
    """Return a stream that waits for no other and on which nothing ever runs."""
    stream = ctypes.c_void_p()
    driver_call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
    return stream


def _allow(function: int, shared: int) -> None:
    """Allow a function to be launched with `shared` bytes of shared memory.

    The limit is only ever raised, because other graphs may need more.
    """
    handle, allowed = ctypes.c_void_p(function), ctypes.c_int()
    driver_call("cuFuncGetAttribute", ctypes.byref(allowed), _MOST_SHARED, handle)
    if shared > allowed.value:
        driver_call("cuFuncSetAttribute", handle, _MOST_SHARED, shared)


class _Edge(ctypes.Structure):
    """The driver's struct CUgraphEdgeData."""

    _fields_ = (
        ("from_port", ctypes.c_ubyte),
        ("to_port", ctypes.c_ubyte),
        ("type", ctypes.c_ubyte),
        ("reserved", ctypes.c_ubyte * 5),
    )


def _depend(graph: ctypes.c_void_p, nodes: list[int], launches: Sequence[Launch]) -> None:
    """Add the dependencies of each launch.

    If a launch waits for exactly one other, and alone, it may start early: its kernel waits by
    itself (`griddepcontrol.wait`). None does in a graph that holds kernels of libraries: these do
    not wait by themselves, and on an H100 those behind a chain of such edges started before their
    inputs were written, although their own edges are full.
    """
    edges = [(before, number) for number, each in enumerate(launches) for before in each.after]
    if not edges:
        return
    following = Counter(before for before, _ in edges)
    early = _capability() >= 90 and all(isinstance(each.function, int) for each in launches)
    data = (_Edge * len(edges))()
    for edge, (before, number) in zip(data, edges, strict=True):
        if early and following[before] == 1 and len(launches[number].after) == 1:
            edge.from_port = edge.type = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC, its type
    sources, targets = (
        (ctypes.c_void_p * len(edges))(*(nodes[edge[end]] for edge in edges)) for end in (0, 1)
    )
    count = ctypes.c_size_t(len(edges))
    driver_call("cuGraphAddDependencies_v2", graph, sources, targets, data, count)


class Compiler:
    """Compiles kernels for this card, and caches them in memory and on disk.

    Args:
        folder: cache of compiled kernels; nobody else may write to it.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._functions: dict[str, int] = {}
        self._compiling: dict[str, Future[bytes]] = {}
        """Binaries, compiled or not, of sources whose functions are not loaded."""
        self._threads = ThreadPoolExecutor(os.cpu_count() or 1, initializer=_give_way)
        self._options = [
            f"--gpu-architecture=sm_{_capability()}{'a' * (_capability() == _HOPPER)}",
            "--std=c++17",
            *(f"-I{path}" for path in header_folders()),
        ]

    def start(self, sources: Iterable[Source]) -> bool:
        """Compile sources in the background. Return whether all are done, well or not."""
        done = True
        for text in sources:
            if isinstance(text, LibraryFunction) or text in self._functions:
                continue
            if text not in self._compiling:
                self._compiling[text] = self._started(text)
            done = done and self._compiling[text].done()
        return done

    def functions(self, sources: Sequence[Source]) -> list[Function]:
        """Return the function `kernel` of each source, when all are compiled; libraries' as they
        are.

        Raises:
            DriverError: a source does not compile, or its binary cannot be loaded.
        """
        self.start(sources)
        found = list[Function]()
        for each in sources:
            if isinstance(each, str) and each not in self._functions:
                self._functions[each] = _loaded(self._compiling.pop(each).result())
            found.append(self._functions[each] if isinstance(each, str) else each)
        return found

    def _started(self, text: str) -> Future[bytes]:
        """Return the binary of a source: from disk at once, else from the background."""
        path = self._path(text)
        if path is None or not path.exists():
            return self._threads.submit(self._in_background, text)
        found: Future[bytes] = Future()
        found.set_result(path.read_bytes())
        return found

    def _in_background(self, text: str) -> bytes:
        if not threading.main_thread().is_alive():
            raise CancelledError  # the process ends, and waits for its threads
        return self._binary(text)

    def binary(self, text: str) -> bytes:
        """Return the binary of a source, compiled by this thread if it is neither on disk nor
        started.

        Raises:
            DriverError: the source does not compile.
        """
        started = self._compiling.pop(text, None)
        return self._binary(text) if started is None else started.result()

    def _binary(self, text: str) -> bytes:
        path = self._path(text)
        if path is not None and path.exists():
            return path.read_bytes()
        binary, _ = compile_source(text, self._options)
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            whole = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            whole.write_bytes(binary)
            whole.replace(path)
        return binary

    def _path(self, text: str) -> Path | None:
        digest = hashlib.sha256("\n".join([*self._options, text]).encode()).hexdigest()[:32]
        return None if self._folder is None else self._folder / f"{digest}.cubin"


def _give_way() -> None:
    """Let the kernel prefer other threads to this one."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def compile_source(text: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Return a source's binary, and what the compiler said.

    Raises:
        DriverError: it does not compile.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    _check(
        "nvrtcCreateProgram",
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None),
    )
    try:
        given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        if failed:
            raise DriverError(f"a kernel does not compile: {log.value.decode()[:2000]}")
        _check("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, binary))
        return binary.raw, log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _loaded(binary: bytes) -> int:
    """Return the function of a compiled kernel. Its module stays loaded until the process ends."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver_call("cuModuleLoadData", ctypes.byref(module), binary)
    driver_call("cuModuleGetFunction", ctypes.byref(function), module, b"kernel")
    assert function.value is not None, "the driver found no function"
    return function.value


# -- the libraries ---------------------------------------------------------------------------------


@cache
def _driver() -> Any:
    """Return the driver, with MLX's context current in this thread."""
    driver = ctypes.CDLL("libcuda.so.1")
    mx.eval(mx.zeros(1) + 1)  # makes the context
    context = ctypes.c_void_p()
    _check("cuCtxGetCurrent", driver.cuCtxGetCurrent(ctypes.byref(context)))
    if not context.value:
        _check(
            "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        )
        _check("cuCtxSetCurrent", driver.cuCtxSetCurrent(context))
    return driver


@cache
def _nvrtc() -> Any:
    """Return the run-time compiler library that MLX has loaded."""
    for version in (13, 12):
        try:
            return ctypes.CDLL(f"libnvrtc.so.{version}")
        except OSError:
            continue
    raise DriverError(
        "libnvrtc cannot be found: install 'quire-serve[cuda12]' or 'quire-serve[cuda13]'"
    )


def driver_call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        DriverError: it returns an error.
    """
    _check(name, getattr(_driver(), name)(*arguments))


def _check(name: str, result: int) -> None:
    if result:
        raise DriverError(f"{name}: error {result}")


@cache
def card() -> Card:
    """Return the properties of the process's GPU."""
    shared = _attribute(_SHARED_BY_ASKING)
    return Card(_attribute(_MULTIPROCESSORS), shared, _capability() == _HOPPER)


def maps_memory() -> bool:
    """Return whether memory can be mapped to reserved addresses."""
    return bool(_attribute(_MAPS_MEMORY))


@cache
def _capability() -> int:
    return int(f"{_attribute(_MAJOR)}{_attribute(_MINOR)}")


def _attribute(number: int) -> int:
    """Return an integer attribute of the GPU."""
    value = ctypes.c_int()
    driver_call("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
    return value.value


@cache
def header_folders() -> tuple[Path, ...]:
    """Return the folders of CUDA's headers (toolkit or NVIDIA's packages) and of MLX's headers."""
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    folders = [Path(root, "include") for root in [*roots, "/usr/local/cuda"]]
    for path in sys.path:
        folders += sorted(Path(path, "nvidia").glob("*/include"))
    found = [folder for folder in folders if (folder / _HEADER).exists()][:1]
    if not found:
        raise DriverError(f"CUDA's headers ({_HEADER}) cannot be found: set CUDA_HOME")
    beside = [found[0] / "cccl"]
    beside += [Path(path, "mlx", "include", "cccl") for path in sys.path]
    return (*found, *(folder for folder in beside if folder.is_dir()))
