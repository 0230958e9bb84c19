"""What was found out about kernels on this machine, kept from one start to the next.

Lies beside the kernels that MLX keeps compiled, so that both are lost together.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from quire.device.machine import device_model
from quire.device.private import kernel_folder

_SOURCES = {".py", ".cuh", ".h", ".cpp", ".so"}


class Kept:
    """Facts, each an empty file named by its digest.

    Args:
        folder: that nobody else may write to; made when first needed. None keeps nothing.
        versions: of all that a fact depends on.
    """

    def __init__(self, folder: Path | None, versions: str) -> None:
        self._folder = folder
        self._versions = versions

    def holds(self, fact: str) -> bool:
        """Whether it was noted before."""
        path = self._path(fact)
        return path is not None and path.exists()

    def note(self, fact: str) -> None:
        """Keeps a fact. One that cannot be written is found out again at the next start."""
        path = self._path(fact)
        if path is None:
            return
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.touch()
        except OSError:
            return

    def _path(self, fact: str) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / hashlib.sha256(f"{self._versions}\n{fact}".encode()).hexdigest()[:32]


@cache
def kept() -> Kept:
    """Of this device, this MLX and these sources, in the process's private place."""
    folder = kernel_folder()
    if folder is None:
        return Kept(None, "")
    return Kept(folder / "kept", f"{device_model()} {version('mlx')} {_sources()}")


def _sources() -> str:
    digest = hashlib.sha256()
    package = Path(str(files("quire")))
    for path in sorted(package.rglob("*")):
        if path.suffix in _SOURCES:
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
