"""Decides when the kernels of graphs are compiled, and which steps can have theirs."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum

from quire.core.kv_format import KVFormat
from quire.device.cuda.driver import DriverError
from quire.executor.graphs.graph_cache import GraphCache
from quire.executor.graphs.operands import UnsupportedNode


class Compiling(Enum):
    """When the kernels of graphs are compiled, and what steps do meanwhile."""

    AHEAD = "those of all row counts when a step needs the first; steps wait for their own"
    AT_USE = "when a step needs them, which waits"
    BEHIND = "from when a step needs them; steps run eagerly until they are there"


class KernelCompiling:
    """Starts the compilation of a model's graphs.

    Args:
        cache: records steps.
    """

    def __init__(self, cache: GraphCache, when: Compiling) -> None:
        self._cache, self.when = cache, when
        self._done: set[tuple[KVFormat, int]] = set()
        """Formats and row counts whose kernels are compiled, well or not."""

    def has(self, max_rows: int, format: KVFormat) -> bool:
        """Return whether a step can have its graph now. Where steps wait for kernels it always can;
        elsewhere they are compiled in the background from the first call on.
        """
        key = format, max_rows
        if self.when is not Compiling.BEHIND or key in self._done:
            return True
        with suppress(DriverError, RuntimeError, UnsupportedNode):  # raised again by its graph
            if not self._cache.start(max_rows, format):
                return False
        self._done.add(key)
        return True

    def start_all(self, most_rows: int, format: KVFormat) -> None:
        """Compile the kernels of all row counts in the background, if that is to be done ahead."""
        if self.when is Compiling.AHEAD:
            with suppress(DriverError, RuntimeError, UnsupportedNode):  # raised again by a graph
                for power in range(most_rows.bit_length()):
                    self._cache.start(1 << power, format)
