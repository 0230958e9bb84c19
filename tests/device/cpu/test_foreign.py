"""The kernels for arm64 under an emulator: near sums in float64, and this machine's to the bit."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.device.cpu import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def results(program: Path, compiler: str, emulator: Sequence[str] = ()) -> list[str]:
    """The kernels' name, and a digest of the bits of each result."""
    sources = [Path(__file__).with_name("driver.cpp"), build.SOURCES / "isa_baseline.cpp"]
    compile_it = [compiler, *build.FLAGS, f"-I{build.SOURCES}", "-static", "-o", str(program)]
    subprocess.run([*compile_it, *map(str, sources)], check=True)
    ran = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR) and shutil.which("g++")),
    reason=f"needs {COMPILER}, {EMULATOR} and g++",
)
def test_neon(tmp_path: Path) -> None:
    name, *neon = results(tmp_path / "neon", COMPILER, [EMULATOR])
    own, *here = results(tmp_path / "here", "g++")
    assert (name, own) == ("neon", "scalar")
    assert len(neon) >= 20
    assert neon == here
