"""Launches the graphs of a step, with what the step gives them."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.core.kv_format import KVFormat
from quire.device.cuda.extension import Extension
from quire.executor.graphs.graph_cache import GraphCache
from quire.executor.graphs.input_numbers import step_numbers
from quire.executor.graphs.step_graphs import StepGraphs, StepLaunch
from quire.executor.inputs import FlatRows


class StepLaunching:
    """Launches the graphs of a model's steps over its pools.

    Args:
        cache: makes the graphs, for the same pools.
    """

    def __init__(
        self, cache: GraphCache, layout: KVLayout, pools: Pools, extension: Extension
    ) -> None:
        self._cache, self._layout, self._pools = cache, layout, pools
        self._extension = extension

    def use(self, pools: Pools) -> None:
        """Launch steps over other pools of the same model from now on, as the cache does."""
        self._pools = pools

    def launched(
        self, inputs: FlatRows, max_rows: int, wanted: Sequence[int] | None
    ) -> mx.array | None:
        """Launch a step's graphs of `max_rows` rows. Return their output; None if its inputs have
        no room.

        Args:
            wanted: rows that the graph's end computes; None for all.
        """
        graphs = self.graphs(max_rows, inputs.sequences[0].format)
        launch = None if graphs is None else self.prepared(inputs, max_rows, wanted)
        if graphs is None or launch is None:
            return None
        output, following = launch.run(graphs), inputs.following
        if following is not None and (placing := self._cache.placing) is not None:
            count = sum(each.count for each in inputs.sequences)
            following.placed(*placing.found(count, output))
        return output

    def prepared(
        self, inputs: FlatRows, max_rows: int, wanted: Sequence[int] | None = None
    ) -> StepLaunch | None:
        """Return what launches the graphs of a step; None if its inputs have no room.

        Args:
            wanted: rows that the graph's end computes; None for all.
        """
        layout, following = self._cache.inputs(max_rows), inputs.following
        given, tokens = self._cache.arrays_of(inputs, layout), inputs.known_tokens
        numbers = step_numbers(
            inputs.sequences,
            self._layout,
            layout,
            block_size=self._pools.block_size,
            max_rows=max_rows,
            media=inputs.media is not None,
            tokens=tokens,
            wanted=wanted,
            following=following,
        )
        if numbers is None:
            return None
        first = {
            "inputs": list(given.values()),
            "targets": list(given),
            "numbers": numbers.tobytes(),
            "numbers_target": layout.numbers if tokens is None else layout.tokens,
        }
        count = sum(each.count for each in inputs.sequences)
        rows = count if wanted is None else max(1, len(wanted))  # MLX computes no empty array
        placing = None if following is None else self._cache.placing
        return StepLaunch(
            self._extension,
            self._cache.output(max_rows)[0],
            rows,
            first=first,
            before=None if placing is None else placing.graph,
        )

    def graphs(self, max_rows: int, format: KVFormat) -> StepGraphs | None:
        """Return the graphs of a step. What is still to be written to the pools, such as copies of
        blocks whose beginning a prompt shares, is launched before.
        """
        graphs = self._cache.graph(max_rows, format)
        if graphs is None:
            mx.async_eval(*self._pools.arrays(range(len(self._layout.group))))
            graphs = self._cache.graph(max_rows, format)
        return graphs
