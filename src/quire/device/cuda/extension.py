"""The extension that launches recorded graphs: `launch.cpp`, compiled by `build`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from typing import Protocol, cast

import mlx.core as mx

from quire.device.cuda.build import sources_digest
from quire.device.growing_memory import GrowingMemory


class Copy(Protocol):
    """A copy of an array on the host."""

    def read(self) -> bytes:
        """Wait until the array is computed, and return its bytes."""
        ...


class Extension(Protocol):
    """The functions of the compiled module, with the argument names of `launch.cpp`."""

    GrowingMemory: type[GrowingMemory]

    def pointer(self, array: mx.array) -> int:
        """Return the device address of an array; 0 before it is computed."""
        ...

    def renew(self, array: mx.array) -> None:
        """Let the next write to an array in growing memory happen in place, whatever reads it.

        The reads must be inputs of what is written.
        """
        ...

    def mapped_bytes(self) -> tuple[int, int]:
        """Return the bytes of all growing memory, and the most that they and MLX's arrays ever were
        together until the former last changed. MLX's peak begins anew with each change.
        """
        ...

    def host_copy(self, array: mx.array) -> tuple[mx.array, Copy]:
        """Return the array, and its copy on the host, which is made when the array is computed."""
        ...

    def replay(
        self,
        graph: int,
        inputs: Sequence[mx.array],
        targets: Sequence[int],
        workspace: mx.array,
        rows: int,
        numbers: bytes = b"",
        numbers_target: int = 0,
    ) -> mx.array:
        """Run the graph, and return the first `rows` rows of `workspace` `[rows, n]`.

        Args:
            targets: addresses that the inputs are copied to first.
            numbers: integers that are copied to `numbers_target` first.
        """
        ...


class NoExtension(Exception):
    """Raised if the extension is missing or was built for something else; the message says
    which.
    """


def load_extension() -> Extension:
    """Return the extension.

    Raises:
        NoExtension: there is no extension for this MLX and these sources.
    """
    try:
        extension = importlib.import_module("quire.device.cuda._cuda")
    except ImportError as error:
        raise NoExtension(f"the extension for CUDA graphs is missing ({error})") from error
    if (mlx := version("mlx")) != extension.MLX_VERSION:
        raise NoExtension(f"the extension was built for MLX {extension.MLX_VERSION}, this is {mlx}")
    if sources_digest() != extension.SOURCES:
        raise NoExtension("the extension was built from other sources")
    return cast(Extension, extension)


@cache
def find_extension() -> Extension | None:
    """Return the extension; None if there is none for this MLX and these sources."""
    try:
        return load_extension()
    except NoExtension:
        return None
