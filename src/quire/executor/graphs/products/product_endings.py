"""Generates what a product of one row computes of what follows it.

Up to a norm: each thread has one element of the product's row. It adds the residual, or whatever
element-wise nodes say, and multiplies by the norm's weight. The norm's factor needs the whole row.
So the row is written without it, beside sums of squares, and the products that read it scale their
sums. Up to attention: a thread block has elements of both halves of a head, which turn together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire.device.cuda.row_layout import RowLayout
from quire.executor.graphs.rows.accesses import Access
from quire.executor.graphs.rows.regions import Argument, RowGenerator
from quire.executor.graphs.rows.row_body import Term
from quire.executor.graphs.source import C_TYPES, NotGenerated
from quire.program.passes import NORMS
from quire.program.values import Node, Program


@dataclass(frozen=True)
class ProductEnding:
    """Lines of C that follow each element of a product of one row, in `skinny_gemm.cuh`.

    Attributes:
        parameters: what they read and write.
        before: lines that load what no kernel of the step writes.
        loads: lines that load the rest.
        elements: lines for element `n` of the row of matrix number `matrix`, which is `product`, in
            the threads that have one: where `ends`.
        head_rows: see HEAD_ROWS there.
    """

    parameters: tuple[str, ...]
    before: str
    loads: str
    elements: str
    head_rows: int = 0

    @property
    def defines(self) -> Mapping[str, object]:
        lines = {"BEFORE": self.before, "LOADS": self.loads, "ELEMENTS": self.elements}
        named = {f"ENDING_{name}": text for name, text in lines.items()}
        return {"ENDS": 1, "HEAD_ROWS": self.head_rows, **named}


@dataclass(frozen=True)
class NormEnding:
    """An ending up to a norm.

    Attributes:
        arguments: of the ending; behind them come sums of squares, and the row in each layout.
        normed: value of the norm's output.
        eps: of the norm.
    """

    ending: ProductEnding
    arguments: tuple[Argument, ...]
    normed: int
    eps: float


def norm_ending(
    program: Program, region: Node, product: int, *, layouts: Sequence[RowLayout | None]
) -> NormEnding:
    """Return what a product's kernel computes of the region of rows that reads the product.

    Args:
        layouts: in which the row is written that the norm has not scaled: digits, None for plain.

    Raises:
        NotGenerated: the region is not element-wise up to one RMS norm of whole rows, or somebody
            within it reads the norm.
    """
    return _EndingGenerator(program, region, product).ending(layouts)


def heads_ending(dim: int, kv_heads: int, block_size: int) -> ProductEnding:
    """Return what the product of queries, keys and values computes behind them: it rotates pairs of
    elements from both halves of a head, and stores keys and values in plain blocks.

    Parameters: block and offset of the row, cosines, sines, destinations of queries, keys, values.
    """
    half, row = dim // 2, kv_heads * block_size
    written = [f"T* {name}" for name in ("queries", "keys", "values")]
    lines = [
        "const float other = __shfl_xor_sync(0xffffffffu, product, 16);",
        "if (turns) product = threadIdx.x < 16 ? product * cosine - other * sine",
        ": other * sine + product * cosine;",
        f"const size_t place = (slot + n / {dim} * {block_size}) * {dim} + n % {dim};",
        "*(matrix == 0 ? queries + n : (matrix == 1 ? keys : values) + place) = (T)product;",
    ]
    loads = [
        "const bool turns = ends && matrix < 2;",
        f"const float cosine = turns ? cosines[n % {half}] : 0.f;",
        f"const float sine = turns ? sines[n % {half}] : 0.f;",
    ]
    return ProductEnding(
        parameters=(
            *("const int* slot_block", "const int* slot_offset"),
            *("const float* cosines", "const float* sines", *written),
        ),
        before=f"const size_t slot = (size_t)*slot_block * {row} + *slot_offset;",
        loads=" ".join(loads),
        elements=" ".join(lines),
        head_rows=dim,
    )


class _EndingGenerator(RowGenerator):
    """Writes a region's computation for one element of a row."""

    def __init__(self, program: Program, region: Node, product: int) -> None:
        super().__init__(program, region, None, polls=0)
        self._product = product

    def _read(self, root: int, access: Access) -> Term:
        if root != self._product:
            return super()._read(root, access)
        if not access.is_whole:
            raise NotGenerated("elements of a product change their places")
        return Term("product", 0)

    def ending(self, layouts: Sequence[RowLayout | None]) -> NormEnding:
        norms = [each for each in self._computed.values() if each.kind in NORMS]
        if len(norms) != 1 or norms[0].kind != "rms_norm" or self._cut.part != self._rows.width:
            raise NotGenerated("no RMS norm of whole rows")
        (norm,) = norms
        (normed,) = norm.outputs
        if "bias" in norm.roles or norm.weight("bias") is not None:
            raise NotGenerated("a norm with a bias")
        x, weight = self._term(norm.inputs[0]), self._weight(norm, "weight")
        outputs = [id for id in self._region.outputs if id != normed]
        terms = [self._term(id) for id in outputs]
        if any(self._sums) or normed not in self._region.outputs:
            raise NotGenerated("what follows a norm reads it")
        lines = [f"const {each.type} {each.name} = {each.text};" for each in self._statements]
        parameters = [f"const {C_TYPES[e.dtype]}* in{e.number}" for e in self._leaves.values()]
        for number, (id, term) in enumerate(zip(outputs, terms, strict=True)):
            parameters.append(f"{C_TYPES[self._program.values[id].dtype]}* out{number}")
            lines.append(f"if (ends) put(out{number}[n], {term.name});")
            self._arguments.append(Argument(id))
        unscaled = x.name if weight is None else f"{x.name} * {weight.name}"
        parameters.append("float* squares_to")
        lines.append(f"store_squares(squares_to, n, {x.name}, ends);")
        for layout in layouts:
            parameters.append("T* unscaled" if layout is None else "uint4* digits")
            if layout is None:
                lines.append(f"if (ends) put(unscaled[n], {unscaled});")
            else:
                lines.append(f"store_own_digits(digits, n, {unscaled}, ends);")
        ending = ProductEnding(
            tuple(parameters),
            before=self._loads(fixed=True),
            loads=self._loads(fixed=False),
            elements=" ".join(lines),
        )
        eps = norm.attributes["eps"]
        return NormEnding(ending, tuple(self._arguments), normed=normed, eps=eps)

    def _loads(self, *, fixed: bool) -> str:
        """Return the lines that load the elements which kernels of the step write, or do not."""
        lines = list[str]()
        for leaf in self._leaves.values():
            if leaf.fixed == fixed:
                at = leaf.access.index("n", "n", self._rows.width)
                value = f"ends ? number(in{leaf.number}[{at}]) : 0"
                lines.append(f"const auto a{leaf.number} = {value};")
        return " ".join(lines)
