"""Compiles emulated kernels, once for all runs of the tests: libraries are kept between runs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from secrets import token_hex

_SOURCES = Path(__file__).parent
_KEPT = _SOURCES.parents[1] / "build" / "emulated"
_MOST_KEPT = 5000
"""Files; a full run of the tests makes about 1,500, of 25 kB each."""
_FLAGS = ["-std=c++17", "-O1", "-fPIC", "-U_FORTIFY_SOURCE", f"-I{_SOURCES}"]
_FLAGS += ["-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-variable"]
_FLAGS += ["-fno-threadsafe-statics"]  # whose guards are in the C++ library
_LIBRARIES = ["-nostdlib", "-fno-use-linker-plugin", "-lgcc"]
"""Options that leave out libraries, because linking them takes as long as some kernels. Functions
of C's are found in this process.
"""
_LIBM = ctypes.CDLL("libm.so.6", ctypes.RTLD_GLOBAL) if sys.platform == "linux" else None


@cache
def compiled(
    source: str, flags: tuple[str, ...], parts: tuple[str, ...]
) -> ctypes._NamedFuncPointer:
    """Return a kernel's function `run`.

    Args:
        parts: names of sources beside this module that do not depend on the kernel. They are
            compiled apart, and linked to it.

    Raises:
        RuntimeError: the source does not compile.
    """
    objects = [_made(".o", (_SOURCES / each).read_text(), [*flags, "-O3", "-c"]) for each in parts]
    library = _made(".so", source, [*flags, "-shared"], objects)
    run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    return run


def _made(suffix: str, source: str, flags: Sequence[str], objects: Sequence[Path] = ()) -> Path:
    """Return the file that the compiler makes of a source, perhaps in an earlier run."""
    made_of = [_surroundings(), source, *flags, *(each.name for each in objects)]
    name = hashlib.sha256("\0".join(made_of).encode()).hexdigest()[:32]
    path = _KEPT / f"{name}{suffix}"
    try:
        os.utime(path)
    except FileNotFoundError:
        _compile(path, source, flags, objects)
    return path


def _compile(path: Path, source: str, flags: Sequence[str], objects: Sequence[Path]) -> None:
    _forget_oldest(path.parent)
    new = path.with_name(f"{path.name}.{token_hex(4)}")  # others may be compiling the same
    linked: list[str | Path] = [*objects, *_LIBRARIES] if objects else []
    done = subprocess.run(
        ["g++", *_FLAGS, *flags, "-o", new, "-x", "c++", "-", "-x", "none", *linked],
        input=source,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    new.rename(path)


@cache
def _forget_oldest(folder: Path) -> None:
    """Delete the files that were not used for longest. Others may be deleting the same."""
    folder.mkdir(parents=True, exist_ok=True)
    ages = []
    for each in folder.iterdir():
        with suppress(FileNotFoundError):
            ages.append((each.stat().st_mtime, each))
    for _, each in sorted(ages)[:-_MOST_KEPT]:
        each.unlink(missing_ok=True)


@cache
def _surroundings() -> str:
    """Return all that a library depends on beside its source and flags."""
    compiler = subprocess.run(["g++", "-v"], capture_output=True, text=True, check=True).stderr
    return "\0".join([compiler, *(each.read_text() for each in sorted(_SOURCES.glob("*.h")))])
