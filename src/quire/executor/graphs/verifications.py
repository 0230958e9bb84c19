"""Remembers which graphs compute the same as the model."""

from __future__ import annotations

from collections.abc import Callable

from quire.core.kv_format import KVFormat
from quire.device.ranks import Part, agreed
from quire.device.verified import Verification, verified_kernels
from quire.executor.graphs.graph_cache import MAX_ROWS

_SHORT_CONTEXT = 1 << 12
"""Most tokens of a context with which a graph is verified once."""
_STANDINGS = False, None, True
"""Results of a graph's verification, the worst first: it differs, is not verified, agrees."""


class Verifications:
    """Whether graphs compute the same as the model, by KV format and row count.

    Args:
        serves: whether the kernels support a format.
        described: describes the graphs of a format and row count, for other starts.
        part: the rank. All ranks run a step as a graph, or none does.

    Attributes:
        found: results, from this run or an earlier one.
    """

    def __init__(
        self,
        serves: Callable[[KVFormat], bool],
        described: Callable[[KVFormat, int], Verification],
        part: Part,
    ) -> None:
        self._serves, self._described, self._part = serves, described, part
        self.found: dict[tuple[KVFormat, int], bool] = {}
        self._unknown: set[tuple[KVFormat, int]] = set()
        """Formats and row counts that no earlier run has verified."""
        self._compared: set[tuple[KVFormat, int]] = set()
        """Formats and row counts that the ranks have compared their results of."""

    def add(self, format: KVFormat, max_rows: int, *, agrees: bool) -> None:
        """Keep a result; of graphs that agree, for other starts, too."""
        self.found[format, max_rows] = agrees
        if agrees:
            verified_kernels().add(self._described(format, max_rows))

    def own(self, format: KVFormat, max_rows: int) -> bool | None:
        """Return this rank's result; None if there is none."""
        key = format, max_rows
        if key not in self.found and key not in self._unknown:
            if verified_kernels().holds(self._described(format, max_rows)):
                self.found[key] = True
            else:
                self._unknown.add(key)  # asked once: planning asks at each step
        return self.found.get(key)

    def of_all(self, format: KVFormat, max_rows: int) -> bool | None:
        """Return the worst of the ranks' results; False if one of them does not serve the format.

        The first call of a format and row count compares them, at the same step on each rank.
        """
        key = format, max_rows
        if key not in self._compared:
            own = self.own(format, max_rows) if self._serves(format) else False
            worst = _STANDINGS[agreed(_STANDINGS.index(own), self._part)]
            self._compared.add(key)
            self.found.pop(key, None)
            if worst is None:
                self._unknown.add(key)
            else:
                self.found[key] = worst
        return self.found.get(key)


class LongContexts:
    """The long contexts that graphs of many rows over codes have been verified with.

    Such a step decodes as many blocks as its contexts have, and the step that a graph is verified
    in may have short ones. So it is verified again each time the longest context has doubled.
    """

    def __init__(self) -> None:
        self._seen: set[tuple[KVFormat, int, int]] = set()

    def first(self, format: KVFormat, max_rows: int, longest: int) -> bool:
        """Return whether a graph computes its first step of a context as long as this step's.

        Args:
            longest: tokens of the step's longest context.
        """
        coded = max_rows > MAX_ROWS and format.scheme != "plain"
        key = format, max_rows, longest.bit_length()
        if not coded or longest <= _SHORT_CONTEXT or key in self._seen:
            return False
        self._seen.add(key)
        return True
