"""Compiles CUDA sources without a GPU, by the run-time compiler that engines use."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire.device.cuda import driver

_OPTIONS = ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v"]


def assert_compiles(text: str, folder: Path, spilled: int = 0) -> None:
    """Compile a source for Hopper. Skip the test where the compiler is not installed.

    Args:
        folder: gets the source.
        spilled: bytes that a thread may spill from its registers.
    """
    path = folder / "kernels.cu"
    path.write_text(text)
    status, log = _compiled(text)
    assert not status, f"{path}: {log}"
    stores = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert stores, log
    assert max(stores) <= spilled, f"{path}: {log}"


def _compiled(text: str) -> tuple[int, str]:
    """Return the compiler's status, 0 if all went well, and what it said."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernels.cu", 0, None, None)
    try:
        options = [*_OPTIONS, *(f"-I{each}" for each in driver._header_folders())]
        given = (ctypes.c_char_p * len(options))(*(each.encode() for each in options))
        status = nvrtc.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        return int(status), log.value.decode()
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@cache
def _nvrtc() -> Any:
    """Return the library of the package `nvidia-cuda-nvrtc`; skip the test without it."""
    found = list(_libraries())
    if not found:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    return [ctypes.CDLL(str(each), mode=ctypes.RTLD_GLOBAL) for each in found][-1]


def _libraries() -> Iterator[Path]:
    """Yield the compiler's libraries: its built-in functions, then the compiler."""
    for name in ("libnvrtc-builtins.so.*", "libnvrtc.so.[0-9]*"):
        places = (each for path in sys.path for each in Path(path).glob(f"nvidia/*/lib/{name}"))
        yield from sorted(places)[:1]
