"""Compiles `launch.cpp` into the extension `_cuda`, against the MLX that is installed.

Run by the build of the package (`hatch_build.py`), or by hand:
`python -m quire.device.cuda.build`. CUDA's toolkit is not needed, nor a GPU.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from quire.device.cpu.build import CannotBuild, compile_extension, digest_of

SOURCES = Path(__file__).parent
TARGET = SOURCES / f"_cuda{sysconfig.get_config_var('EXT_SUFFIX')}"
_FLAGS = ["-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-DNDEBUG"]


def sources_digest() -> str:
    """Changes with the source: an extension that was built from another is not used."""
    return digest_of([SOURCES / "launch.cpp"])


def build(target: Path = TARGET) -> Path:
    """Compiles the extension to `target`; some seconds.

    Raises:
        CannotBuild: as for the CPU kernels.
    """
    return compile_extension(target, [SOURCES / "launch.cpp"], _FLAGS, sources_digest(), {})


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuild as error:
        sys.exit(str(error))
