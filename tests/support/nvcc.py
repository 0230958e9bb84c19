"""Compiles CUDA sources without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest


def assert_compiles(text: str, folder: Path, spilled: int = 0) -> None:
    """Compile a source for Hopper. Skip the test where there is no nvcc.

    Args:
        spilled: bytes that a thread may spill from its registers.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    path = folder / "kernels.cu"
    path.write_text(text)
    command = [nvcc, "-arch=sm_90a", "-cubin", "-Xptxas", "-v", "-o", folder / "k.cubin", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    stores = [int(n) for n in re.findall(r"(\d+) bytes spill stores", done.stderr)]
    assert max(stores) <= spilled, done.stderr
