"""Compiles the CPU kernels into the extension `_cpu`, against the installed MLX.

The package's build runs it (`hatch_build.py`), or by hand: `python -m quire.device.cpu.build`. It
imports nothing of Quire, so that the package's build can run it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent
TARGET = SOURCES / f"_cpu{sysconfig.get_config_var('EXT_SUFFIX')}"

FLAGS = [
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-DNDEBUG",
]
"""Compiler flags. Contraction is off, so that fused products and sums, which the source spells out,
do not depend on the compiler.
"""

_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
_VNNI = [*_AVX512, "-mavx512vnni", "-mavx512vbmi"]
_INSTRUCTION_SETS = {
    "x86_64": {
        # For processors older than AVX2, on which nobody serves; it took a quarter of the build.
        "baseline": ["-O2"],
        "avx2": _AVX2,
        "avxvnni": [*_AVX2, "-mavxvnni"],
        "avx512": _AVX512,
        "vnni": _VNNI,
        "amx": [*_VNNI, "-mavx512bf16"],
    },
    "aarch64": {
        "baseline": [],
        "dotprod": ["-march=armv8.2-a+dotprod"],
        "i8mm": ["-march=armv8.2-a+dotprod+i8mm"],
    },
}
"""Compiler flags of `isa_NAME.cpp` by machine, oldest set first: of an inline function that several
units contain, the linker keeps the first.
"""
_X86_NEEDS = {
    "amx": "amx_int8",
    "vnni": "avx512_vnni",
    "avx512": "avx512f",
    "avxvnni": "avx_vnni",
    "avx2": "avx2",
}
"""x86-64: the /proc/cpuinfo flag that each instruction set needs, fastest set first."""
_ARM_NEEDS = {"i8mm": "i8mm", "dotprod": "asimddp"}
"""arm64: the /proc/cpuinfo flag that each instruction set needs, fastest set first."""
_BUILT_ON = {
    "amx": "vnni",
    "vnni": "avx512",
    "avxvnni": "avx2",
    "i8mm": "baseline",
    "dotprod": "baseline",
}
"""Instruction set whose kernels another one reuses for everything but its products."""
_OMITTED = "-DQUIRE_OMITTED"
"""Define that turns the source of an instruction set that is not built into one without kernels."""
_NANOBIND_FLAGS = [
    *("-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"),
    "-fno-strict-aliasing",  # as in nanobind's own build: it reads objects as other types
]


@dataclass(frozen=True, slots=True)
class Unit:
    """Sources that are compiled as one, with their own flags."""

    sources: Sequence[Path]
    flags: Sequence[str] = ()


def sources_digest() -> str:
    """Return a digest of the sources. An extension built from other sources is not used."""
    return digest_of(each for each in SOURCES.iterdir() if each.suffix in (".cpp", ".h", ".inc"))


def digest_of(files: Iterable[Path]) -> str:
    """Return a digest of files' contents."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


VARIABLE = "QUIRE_BUILD_KERNELS"
"""Environment variable that chooses what is compiled; see `asked`."""
_FORMER_VARIABLE = "QUIRE_KERNELS"
_ALL, _FOR_TESTS, OFF = "all", "tests", "off"


def asked() -> str:
    """Return what `QUIRE_BUILD_KERNELS` asks for.

    Returns:
        "all": the instruction sets of the machine's architecture, as wheels need them, in minutes
        of processor time. "tests": those that this processor can run, compiled quickly rather than
        well. "off": none. An empty string: the fastest of this processor.

    Raises:
        ValueError: the value is none of these, or `QUIRE_KERNELS` has a value that it had for
            builds until version 0.2.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", _ALL, _FOR_TESTS, OFF):
        raise ValueError(f"{VARIABLE}: must be all, tests or off, not {value!r}")
    former = os.environ.get(_FORMER_VARIABLE)
    if not value and former in (_ALL, _FOR_TESTS):
        raise ValueError(
            f"{_FORMER_VARIABLE} no longer chooses what is compiled: set {VARIABLE}={former}"
        )
    return value


class CannotBuild(Exception):
    """Raised if the kernels cannot be compiled here; the message says what is missing."""


def build(target: Path = TARGET, shared: Path | None = None) -> Path:
    """Compile the extension to `target`.

    Args:
        shared: see `compile_extension`.

    Raises:
        CannotBuild: kernels are switched off, there is no compiler, MLX or nanobind, or the
            compiler fails.
        ValueError: see `asked`.
    """
    choice = asked()
    if choice == OFF:
        raise CannotBuild(f"{VARIABLE}=off")
    units = chosen_units(choice)
    optimised = ["-O1"] if choice == _FOR_TESTS else []
    # The others include MLX's headers, which take longer to read than they do.
    others = sorted(set(SOURCES.glob("*.cpp")) - {each.sources[0] for each in units})
    units.insert(0, Unit(others, [_OMITTED, *optimised]))
    return compile_extension(target, units, FLAGS, digest=sources_digest(), shared=shared)


def chosen_units(choice: str) -> list[Unit]:
    """Return the instruction sets to compile for a choice, which `asked` explains."""
    if choice == _ALL:
        return instruction_sets()
    if choice == _FOR_TESTS:
        return [_for_a_test(unit) for unit in only(sets_that_run(), instruction_sets())]
    return only(sets_of_this_processor(), instruction_sets())


def instruction_sets(machine: str = platform.machine()) -> list[Unit]:
    """Return the sources of each instruction set of a machine; other sources add nothing there."""
    sets = _INSTRUCTION_SETS.get(machine, {"baseline": []})
    return [Unit([SOURCES / f"isa_{name}.cpp"], flags) for name, flags in sets.items()]


def sets_of_this_processor(machine: str = platform.machine(), features: str = "") -> list[str]:
    """Return the fastest instruction set that a processor has, and those that it is built on.

    Args:
        features: the text of /proc/cpuinfo; empty reads this machine's.
    """
    chain = sets_that_run(machine, features)[:1]
    while chain[-1] in _BUILT_ON:
        chain.append(_BUILT_ON[chain[-1]])
    return chain


def sets_that_run(machine: str = platform.machine(), features: str = "") -> list[str]:
    """Return all instruction sets that a processor has, fastest first.

    Args:
        features: see `sets_of_this_processor`.
    """
    has = (features or Path("/proc/cpuinfo").read_text()).split()
    needs = {"x86_64": _X86_NEEDS, "aarch64": _ARM_NEEDS}.get(machine, {})
    return [*(name for name, feature in needs.items() if feature in has), "baseline"]


def only(names: Sequence[str], units: Sequence[Unit]) -> list[Unit]:
    """Return the units of some instruction sets."""
    return [unit for unit in units if _set_of(unit) in names]


def _for_a_test(unit: Unit) -> Unit:
    """Return a unit that takes little time to compile, for which tests wait.

    Nearly all tests use this processor's own sets: with AVX-512, -O1 takes half of -O2's time and
    a third of -O3's.
    """
    own = _set_of(unit) in sets_of_this_processor()
    return replace(unit, flags=[*unit.flags, "-O1" if own else "-O0"])


def _set_of(unit: Unit) -> str:
    return unit.sources[0].stem.removeprefix("isa_")


def compile_extension(
    target: Path, units: Sequence[Unit], flags: Sequence[str], digest: str, shared: Path | None
) -> Path:
    """Compile sources into an extension that takes MLX's arrays.

    Args:
        flags: of all units.
        digest: digest of the sources, which the extension reports.
        shared: folder that caches nanobind's part, which is the same for all extensions; None
            compiles it again.

    Raises:
        CannotBuild: see `build`.
    """
    if not sys.platform.startswith("linux"):
        raise CannotBuild("the compiled extensions support Linux only")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise CannotBuild("no C++ compiler (g++, clang++ or $CXX)")
    mlx, nanobind = _folder("mlx"), _folder("nanobind")
    includes = [
        mlx / "include",
        nanobind / "include",
        nanobind / "ext" / "robin_map" / "include",
        Path(sysconfig.get_path("include")),
    ]
    common = ["-DNB_DOMAIN=mlx", *(f"-I{folder}" for folder in includes)]
    with tempfile.TemporaryDirectory() as folder:
        binding = Path(shared or folder, "nanobind.o")
        commands: list[list[str]] = []
        if not binding.exists():
            source = nanobind / "src" / "nb_combined.cpp"
            commands.append([*_NANOBIND_FLAGS, "-c", str(source), "-o", str(binding)])
        objects = [str(binding)]
        for number, unit in enumerate(units):
            source = Path(folder, f"{number}.cpp")
            source.write_text("".join(f'#include "{each}"\n' for each in unit.sources))
            objects.append(f"{folder}/{number}.o")
            built_from = f'-DQUIRE_SOURCES="{digest}"'
            own = [*flags, built_from, *unit.flags]
            commands.append([*own, "-c", str(source), "-o", objects[-1]])
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            # The last take longest.
            list(pool.map(lambda own: _run([compiler, *common, *own]), reversed(commands)))
        library = f"{folder}/{target.name}"
        _run([compiler, "-shared", *objects, f"-L{mlx / 'lib'}", "-lmlx", "-o", library])
        shutil.copyfile(library, target)
    return target


def _folder(package: str) -> Path:
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise CannotBuild(f"{package} is not installed")
    return Path(next(iter(found.submodule_search_locations)))


def _run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CannotBuild(f"{command[0]} failed:\n{result.stderr[-2000:]}")


if __name__ == "__main__":
    try:
        print(build())
    except (CannotBuild, ValueError) as error:
        sys.exit(str(error))
