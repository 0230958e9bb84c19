"""Turns an encoder's program for one number of items into a program of `T` rows.

Kernels treat rows, whose number is the first size of every value. An encoder's program has other
first sizes, too, where patches are read, grouped and merged: those nodes keep fixed sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from quire.program.folding import simplified
from quire.program.passes import PRODUCTS, Uses, prepared_in_pieces, split_experts
from quire.program.values import FUSED, ROWS, Node, Program, Value, bound


@dataclass(frozen=True, eq=False)
class RowProgram:
    """A program of T rows.

    Attributes:
        rows: the only number that T can be; 0 if the program multiplies no rows.
        tables: constants with a row for each of the T rows, by the names of the fields that they
            have become.
    """

    program: Program
    rows: int
    tables: Mapping[str, mx.array]

    @staticmethod
    def of(program: Program, items: int) -> Generator[None, None, RowProgram]:
        """Make an encoder's program for a number of items ready to be recorded, in pieces.

        T stands for the number of rows that most products multiply.
        """
        fixed = simplified(_for_items(program, items))
        yield
        counts = Counter(
            fixed.values[each.inputs[0]].shape[0] for each in fixed.nodes if _by_row(fixed, each)
        )
        ((rows, _),) = counts.most_common(1) or [(0, 0)]
        assert isinstance(rows, int), "sizes are fixed"
        uses = Uses(fixed)
        tables = {
            f"table.{id}": id
            for id in fixed.constants
            if rows and _is_table(fixed, uses, id, rows=rows)
        }
        values = {
            id: Value((ROWS, *each.shape[1:]), each.dtype)
            for id, each in fixed.values.items()
            if rows
            and each.shape[:1] == (rows,)
            and (id not in fixed.constants or id in tables.values())
        }
        constants = {id: each for id, each in fixed.constants.items() if id not in tables.values()}
        of_rows = replace(
            fixed,
            symbols=("T",),
            fields={**fixed.fields, **tables},
            constants=constants,
            values={**fixed.values, **values},
        )
        arrays = {name: fixed.constants[id].array for name, id in tables.items()}
        ready = yield from prepared_in_pieces(split_experts(of_rows))
        return RowProgram(ready, rows, arrays)

    def has_rows(self, node: Node) -> bool:
        """Return whether all that a node reads and computes has T rows. Only elements and norms may
        read constants.
        """
        program = self.program
        nodes = node.arguments if node.kind == FUSED else (node,)
        products = [each for each in nodes if each.kind in PRODUCTS]
        found = {id for each in (node, *nodes) for id in (*each.inputs, *each.outputs)}
        elements = node.kind == FUSED and node.attributes["what"] == "rows"
        if not elements and found & program.constants.keys():
            return False
        first = (program.values[id].shape[:1] for id in found - program.constants.keys())
        return all(each == (ROWS,) for each in first) and all(
            _by_row(program, each) for each in products
        )


def _for_items(program: Program, items: int) -> Program:
    """Return a program for a fixed number of items, without symbols."""
    sizes = dict.fromkeys(program.symbols, items)
    nodes = [replace(each, arguments=bound(each.arguments, sizes)) for each in program.nodes]
    values = {
        id: Value(bound(each.shape, sizes), each.dtype) for id, each in program.values.items()
    }
    return replace(program, symbols=(), values=values, nodes=tuple(nodes))


def _by_row(program: Program, node: Node) -> bool:
    """Return whether a node multiplies rows `[n, width]` by a weight."""
    if node.kind not in PRODUCTS or len(node.inputs) != 1:
        return False
    return len(program.values[node.inputs[0]].shape) == 2


def _is_table(program: Program, uses: Uses, constant: int, rows: int) -> bool:
    """Return whether a constant has a row for each row of what is computed with it."""
    shape = program.values[constant].shape
    if len(shape) < 2 or shape[0] != rows:
        return False
    for reader in uses.readers(constant):
        made = [program.values[id].shape for id in reader.outputs]
        alike = all(len(each) == len(shape) for each in made) or reader.kind == "rotate"
        if not alike or any(each[:1] != (rows,) for each in made):
            return False
    return True
