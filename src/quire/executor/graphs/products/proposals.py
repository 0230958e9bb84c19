"""Chooses among cuBLASLt's proposals for the products of a step by the time that they take."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from quire.device.cuda.cublas import LibraryProduct
from quire.device.cuda.driver import DriverError, Graph, Launch
from quire.device.cuda.timing import graph_microseconds
from quire.device.verified import Check, Verification, kept_choice
from quire.executor.graphs.recorder import Address, Kernel

log = logging.getLogger("quire.engine")

_LAUNCHES = 4
"""Products of a timed graph. Their matrices are those of as many layers, so that few are in the L2
cache.
"""
_ROUNDS, _REPEATS = 4, 2
"""How often the proposals are timed in turns, and launches of a graph each time. The least counts.
"""
_GAIN = 0.98
"""A proposal behind the first one is used if it takes at most this share of the first one's time.
"""
_ONE = 1, 1, 1

Weights = Sequence[tuple[int, ...]]
"""Addresses of the matrix, and of the bias if there is one, of each product of a shape."""


@dataclass(frozen=True, slots=True)
class Proposals:
    """Chooses proposals once for a shape, a version of the library and a card.

    Attributes:
        version: of the library.
        address: returns the device address of an array.
    """

    version: int
    address: Address

    def chosen(self, kernels: Sequence[Kernel]) -> list[Kernel]:
        """Return the kernels of a step, with the quickest proposal for each of the library's
        products.
        """
        weights = defaultdict[LibraryProduct, list[tuple[int, ...]]](list)
        for each in kernels:
            if isinstance(each.source, LibraryProduct):
                _, weight, _, *bias = each.arguments
                weights[each.source].append((weight, *bias))
        quickest = {each: self._quickest(each, of) for each, of in weights.items()}
        return [
            replace(each, source=quickest[each.source])
            if isinstance(each.source, LibraryProduct)
            else each
            for each in kernels
        ]

    def _quickest(self, product: LibraryProduct, weights: Weights) -> LibraryProduct:
        verification = Verification(Check.QUICKEST_PROPOSAL, (self.version, product))
        choose: Callable[[], int] = partial(self._timed, product, weights[:_LAUNCHES])
        return replace(product, proposal=kept_choice(verification, choose))

    def _timed(self, product: LibraryProduct, weights: Weights) -> int:
        """Return the number of the quickest proposal; 0 if timing fails."""
        x = mx.random.normal((product.rows, product.inputs), key=mx.random.key(0))
        x, y = x.astype(mx.bfloat16), mx.zeros((product.rows, product.outputs), mx.bfloat16)
        mx.eval(x, y)
        mx.synchronize()
        given = self.address(x), self.address(y)
        try:
            graphs = [_graph(each, weights, *given) for each in product.proposals()]
            turns = graphs * _ROUNDS
            times = [graph_microseconds(each, _REPEATS) / len(weights) for each in turns]
        except DriverError as error:
            log.info("cuBLASLt's proposals for %s cannot be timed: %s", product, error)
            return 0
        least = [min(times[number :: len(graphs)]) for number in range(len(graphs))]
        log.debug("cuBLASLt's proposals for %s take %s us", product, least)
        best = min(range(len(least)), key=least.__getitem__)
        return best if least[best] <= _GAIN * least[0] else 0


def _graph(product: LibraryProduct, weights: Weights, x: int, y: int) -> Graph:
    """Return a graph of products of the same rows, one behind the other."""
    return Graph(
        [
            Launch(
                product,
                _ONE,
                1,
                shared=0,
                arguments=(x, weight, y, *bias),
                after=(number - 1,) if number else (),
            )
            for number, (weight, *bias) in enumerate(weights)
        ]
    )
