"""Compiles CUDA sources without a GPU, by the run-time compiler that engines use."""

from __future__ import annotations

import ctypes
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from quire.device.cuda.driver import DriverError, compile_source, header_folders

_OPTIONS = ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v"]


def assert_compiles(text: str, folder: Path, spilled: int = 0) -> int:
    """Compile a source for Hopper. Return the registers of a thread, of several kernels those of
    the largest. Skip the test where the compiler is not installed.

    Args:
        folder: gets the source.
        spilled: bytes that a thread may spill from its registers.
    """
    path = folder / "kernels.cu"
    path.write_text(text)
    if not _load_compiler():
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    try:
        _, log = compile_source(text, [*_OPTIONS, *(f"-I{each}" for each in header_folders())])
    except DriverError as error:
        pytest.fail(f"{path}: {error}")
    stores = [int(n) for n in re.findall(r"(\d+) bytes spill stores", log)]
    assert stores, log
    assert max(stores) <= spilled, f"{path}: {log}"
    return max(int(n) for n in re.findall(r"Used (\d+) registers", log))


@cache
def _load_compiler() -> bool:
    """Load the libraries of the package `nvidia-cuda-nvrtc`, which the driver then finds by name.
    Return whether they are installed.
    """
    names = "libnvrtc-builtins.so.*", "libnvrtc.so.[0-9]*"  # the first one is part of the second
    for name in names:
        found = [each for path in sys.path for each in Path(path).glob(f"nvidia/*/lib/{name}")]
        if not found:
            return False
        ctypes.CDLL(str(min(found)), mode=ctypes.RTLD_GLOBAL)
    return True
