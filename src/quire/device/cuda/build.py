"""Compiles `launch.cpp` into the extension `_cuda`, against the installed MLX.

The package's build runs it (`hatch_build.py`), or by hand: `python -m quire.device.cuda.build`. It
needs neither CUDA's toolkit nor a GPU.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from quire.device.cpu.build import CannotBuild, Unit, compile_extension, digest_of

SOURCES = Path(__file__).parent
TARGET = SOURCES / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]


def sources_digest() -> str:
    """Return a digest of the source. An extension built from another source is not used."""
    return digest_of([SOURCES / "launch.cpp"])


def build(target: Path = TARGET, shared: Path | None = None) -> Path:
    """Compile the extension to `target`. This takes some seconds.

    Args:
        shared: as for the CPU kernels.

    Raises:
        CannotBuild: as for the CPU kernels.
    """
    units = [Unit([SOURCES / "launch.cpp"])]
    return compile_extension(target, units, _FLAGS, digest=sources_digest(), shared=shared)


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuild as error:
        sys.exit(str(error))
