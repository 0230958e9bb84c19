"""Compiles the CPU kernels into the extension `_cpu`, against the MLX that is installed.

Run by the build of the package (`hatch_build.py`), or by hand: `python -m quire.device.cpu.build`.
Imports nothing of Quire, so that the build of the package can run it.
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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
"""No contraction: which products and sums are fused is spelled out in the source, since a row's
bits must not depend on the compiler's choice in one of several loops."""

_AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx2", "-mfma", "-mf16c"]
_VNNI = [*_AVX512, "-mavx512vnni", "-mavx512vbmi"]
_X86_FLAGS = {
    "isa_amx.cpp": [*_VNNI, "-mavx512bf16"],
    "isa_vnni.cpp": _VNNI,
    "isa_avx512.cpp": _AVX512,
    "isa_avx2.cpp": ["-mavx2", "-mfma", "-mf16c", "-mbmi2"],
    # For processors older than AVX2, on which nobody serves; it took a quarter of the build.
    "isa_baseline.cpp": ["-O2"],
}


def sources_digest() -> str:
    """Changes with the sources: an extension that was built from others is not used."""
    return digest_of(each for each in SOURCES.iterdir() if each.suffix in (".cpp", ".h", ".inc"))


def digest_of(files: Iterable[Path]) -> str:
    """Changes with the contents of files."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class CannotBuild(Exception):
    """The kernels cannot be compiled here; the message says what is missing."""


def build(target: Path = TARGET) -> Path:
    """Compiles the extension to `target`; about two minutes of processor time.

    Raises:
        CannotBuild: there is no compiler, MLX or nanobind, or the compiler fails.
    """
    by_file = _X86_FLAGS if platform.machine() == "x86_64" else {}
    return compile_extension(
        target, sorted(SOURCES.glob("*.cpp")), FLAGS, sources_digest(), by_file
    )


def compile_extension(
    target: Path,
    sources: Sequence[Path],
    flags: Sequence[str],
    digest: str,
    by_file: Mapping[str, list[str]],
) -> Path:
    """Compiles sources into an extension that takes MLX's arrays.

    Args:
        digest: what the extension says it was built from.
        by_file: further flags of a source, by its name.

    Raises:
        CannotBuild: see `build`.
    """
    if not sys.platform.startswith("linux"):
        raise CannotBuild("the extensions are for Linux")
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
    built_from = f'-DQUIRE_SOURCES="{digest}"'
    given = [*flags, "-DNB_DOMAIN=mlx", built_from, *(f"-I{folder}" for folder in includes)]
    every = [*sources, nanobind / "src" / "nb_combined.cpp"]
    with tempfile.TemporaryDirectory() as folder:

        def compiled(source: Path) -> str:
            out = f"{folder}/{source.stem}.o"
            own = by_file.get(source.name, [])
            _run([compiler, *given, *own, "-c", str(source), "-o", out])
            return out

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            objects = list(pool.map(compiled, every))
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
    except CannotBuild as error:
        sys.exit(str(error))
