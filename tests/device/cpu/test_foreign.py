"""The kernels compiled for arm64 and run under an emulator, held against sums in float64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from quire.device.cpu import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR)),
    reason=f"needs {COMPILER} and {EMULATOR}",
)
def test_neon(tmp_path: Path) -> None:
    program = tmp_path / "driver"
    sources = [Path(__file__).with_name("driver.cpp"), build.SOURCES / "isa_baseline.cpp"]
    compile_it = [COMPILER, *build.FLAGS, f"-I{build.SOURCES}", "-static", "-o", str(program)]
    subprocess.run([*compile_it, *map(str, sources)], check=True)
    ran = subprocess.run([EMULATOR, str(program)], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "neon\n"), ran.stdout + ran.stderr
