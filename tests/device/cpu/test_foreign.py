"""Kernels without MLX: near sums in float64, and bits that do not depend on the instruction set.

Those for arm64 run under an emulator. Those for AVX-512, VNNI and AMX run on any processor that has
AVX2, with functions in place of these instructions.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.device.cpu import build

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
HERE = Path(__file__).parent
PACKED = ("affine", "mxfp4", "nvfp4")
"""Storages that are multiplied in integers."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Digests = dict[str, dict[str, str]]


def results(
    folder: Path,
    compiler: str,
    machine: str,
    emulator: Sequence[str] = (),
    emulated: bool = False,
) -> Digests:
    """Return digests of the bits of each result, by what was computed, of each instruction set.

    Args:
        emulated: whether what this processor may lack is emulated by the functions of `emulated.h`.
    """
    folder.mkdir()
    units = build.instruction_sets(machine)
    sets = {each.sources[0] for each in units}
    others = set(build.SOURCES.glob("isa_*.cpp")) - sets  # empty on this machine
    if emulated:
        units = [emulated_unit(folder, each) for each in units]
    driver = [HERE / "driver.cpp", build.SOURCES / "instruction_sets.cpp"]
    units += [build.Unit([each]) for each in (*others, *driver)]
    objects = []
    for number, unit in enumerate(units):
        objects.append(str(folder / f"{number}.o"))
        flags = [*build.FLAGS, "-O1", f"-I{build.SOURCES}", *unit.flags]
        command = [compiler, *flags, "-c", str(unit.sources[0]), "-o", objects[-1]]
        subprocess.run(command, check=True)
    program = str(folder / "driver")
    subprocess.run([compiler, "-static", *objects, "-o", program], check=True)
    ran = subprocess.run([*emulator, program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    digests: Digests = defaultdict(dict)
    for line in ran.stdout.splitlines():
        name, result = line.split(": ", 1)
        what, digest = result.rsplit(" ", 1)
        digests[name][f"{what} {len(digests[name])}"] = digest
    return digests


def emulated_unit(folder: Path, unit: build.Unit) -> build.Unit:
    """Return a unit that needs no more than AVX2, but is compiled as if it had its own flags.

    GCC's headers must not see the macros that say so: they are defined after them.
    """
    beyond = [each for each in unit.flags if each.startswith(("-mavx512", "-mavxvnni"))]
    if not beyond:
        return unit
    sources = folder / "sources"
    if not sources.exists():
        shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("*.so", "*.py"))
        shutil.copy(HERE / "emulated_amx_instructions.h", sources / "amx_instructions.h")
    name = unit.sources[0].name
    macros = folder / f"{name}.h"
    macros.write_text("".join(f"#define __{each[2:].upper()}__ 1\n" for each in beyond))
    flags = [each for each in unit.flags if each not in beyond]
    for header in (HERE / "emulated.h", macros):
        flags += ["-include", str(header)]
    flags += ["-Wno-psabi", "-Wno-ignored-attributes"]
    return build.Unit([sources / name], flags)


def packed(digests: dict[str, str]) -> list[tuple[str, str]]:
    found = [item for item in digests.items() if item[0].startswith(PACKED)]
    assert len(found) == 80  # 40 packings, rows of 16 and of 8 bits
    return found


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_packed_products_have_the_same_bits_in_every_instruction_set(tmp_path: Path) -> None:
    digests = results(tmp_path / "here", "g++", platform.machine())
    first, *others = (packed(each) for each in digests.values())
    for other in others:
        assert other == first


@pytest.mark.skipif(
    not shutil.which("g++") or build.sets_of_this_processor() == ["baseline"],
    reason="needs g++ and a processor with AVX2",
)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates x86-64 by AVX2")
def test_emulated_instruction_sets_have_the_bits_of_the_portable_kernels(tmp_path: Path) -> None:
    digests = results(tmp_path / "here", "g++", "x86_64", emulated=True)
    assert list(digests) == ["amx", "vnni", "avx512", "avxvnni", "avx2", "scalar"]
    for name, each in digests.items():
        assert packed(each) == packed(digests["scalar"]), f"{name} has other bits"


@pytest.mark.skipif(
    not (shutil.which(COMPILER) and shutil.which(EMULATOR) and shutil.which("g++")),
    reason=f"needs {COMPILER}, {EMULATOR} and g++",
)
def test_arm64_has_the_bits_of_the_portable_kernels(tmp_path: Path) -> None:
    arm = results(tmp_path / "arm", COMPILER, "aarch64", [EMULATOR, "-cpu", "max"])
    here = results(tmp_path / "here", "g++", "portable")
    assert list(arm) == ["i8mm", "dotprod", "neon"]
    assert list(here) == ["scalar"]
    assert arm["neon"] == here["scalar"]
    assert packed(arm["i8mm"]) == packed(arm["dotprod"]) == packed(here["scalar"])
