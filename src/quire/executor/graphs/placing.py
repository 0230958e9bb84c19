"""Places a step's rows behind the right drafts of the running step, on the device.

The host then launches a step before it has read how many drafts of the step before are right. It
writes the inputs for the rows' latest places; a kernel moves them back and finds the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx

from quire.cache.specs import KVGroup
from quire.device.cuda.driver import Compiler, Graph
from quire.executor.following import GIVEN, Following, Kept
from quire.executor.graphs import device_memory
from quire.executor.graphs.few_rows import may_list
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.recorder import Address, Kernel, launches
from quire.executor.graphs.source import own_text, written_source
from quire.scheduler.plan import ScheduledSequence

_PARAMETERS = (
    *("const int* rows", "int* memory", "const int* sampled", "const int* guesses"),
    "int* found",
)
_MOST_SAMPLED = 1 << 12
"""Most tokens and guesses of a step that another one follows."""


class RowPlacing:
    """The graph that places the rows of steps with one layout of inputs.

    Attributes:
        most_rows: rows of the largest step.

    Args:
        groups: KV groups. Each keeps keys of tokens.
        inputs: of graphs of few rows.
        address: returns the device address of an array.
    """

    def __init__(
        self,
        groups: Sequence[KVGroup],
        inputs: InputLayout,
        block_size: int,
        address: Address,
        compiler: Compiler,
    ) -> None:
        self._inputs, self._compiler = inputs, compiler
        self.most_rows = inputs.max_rows
        self._sampled, self._guesses = (
            device_memory.unwritten((_MOST_SAMPLED,), mx.int32) for _ in range(2)
        )
        self._found = device_memory.unwritten((2, inputs.max_rows), mx.int32)
        own = self._sampled, self._guesses, self._found
        self._targets = address(self._sampled), address(self._guesses)
        self._kernel = Kernel(
            _source(groups, inputs, block_size),
            grid=(1, 1, 1),
            block=inputs.max_rows,
            shared=0,
            arguments=(inputs.rows, inputs.tokens, *map(address, own)),
        )

    def serves(self, rows: Sequence[ScheduledSequence], before: Kept) -> bool:
        """Return whether the kernel places the rows of a step, and is compiled.

        Args:
            before: the step that they follow.
        """
        most = before.tokens.array.size
        if before.guesses is not None:
            most = max(most, before.guesses.array.size)
        few = sum(each.count for each in rows) <= self.most_rows and most <= _MOST_SAMPLED
        return few and may_list(rows) and self._compiler.start([self._kernel.source])

    @cached_property
    def graph(self) -> Graph:
        """The graph, which runs before that of the step."""
        return Graph(launches([self._kernel], self._compiler.functions([self._kernel.source])))

    def given(self, following: Following) -> dict[int, mx.array]:
        """Return what the graph reads of the step before, by the address that it reads it from."""
        before = following.before
        arrays = [before.tokens, *([] if before.guesses is None else [before.guesses])]
        return {at: each.array for at, each in zip(self._targets, arrays, strict=False)}

    def found(self, rows: int, output: mx.array) -> tuple[mx.array, mx.array]:
        """Return by how many tokens each row begins earlier, and its token, both int32 `[T]`.

        Args:
            output: the output of the step.
        """
        (found,) = mx.depends([self._found], [output])
        return found[0, :rows], found[1, :rows]


def places_rows(groups: Sequence[KVGroup]) -> bool:
    """Return whether the kernel places rows of a model with such KV groups."""
    specs = [group.spec.attention for group in groups]
    return all(spec is not None and spec.moves for spec in specs)


def _source(groups: Sequence[KVGroup], inputs: InputLayout, block_size: int) -> str:
    places = []
    for group in groups:
        at = inputs.group(group.index)
        places.append(tuple(map(inputs.index, (at.blocks, at.offsets, at.visible, at.tiles))))
    listed = ", ".join("{" + ", ".join(map(str, each)) + "}" for each in places)
    defines = {
        "BEHIND": inputs.index(inputs.behind),
        "POSITIONS": inputs.index(inputs.positions),
        "TABLE": inputs.index(inputs.table),
        "BLOCK": block_size,
        "GIVEN": f"({GIVEN + 1} - 1)",  # C has no literal of it
        "MAX_ROWS": inputs.max_rows,
        "GROUPS": len(places),
        "PLACES": listed,
    }
    body = own_text("place_rows.cuh")
    return written_source(_PARAMETERS, body, inputs.max_rows, defines=defines)
