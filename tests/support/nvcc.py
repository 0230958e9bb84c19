"""Compiles CUDA sources without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def assert_compiles(text: str, folder: Path) -> None:
    """For Hopper, with nothing spilled from registers. Skips the test where there is no nvcc."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc")
    path = folder / "kernels.cu"
    path.write_text(text)
    command = [nvcc, "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-o", folder / "k.cubin", path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    spilled = [line for line in done.stderr.splitlines() if "spill stores" in line]
    assert all(" 0 bytes spill stores" in line for line in spilled), done.stderr
