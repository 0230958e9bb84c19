"""Generates the CUDA kernel of a region of rows: elements, gates and norms.

The threads of a group share a part of a row: the elements that a norm covers, or any number without
a norm. Values stay in registers. The kernel runs in phases, which are loops over a thread's
elements: a norm sums in one phase and is read in the next. All sums of a phase are reduced
together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from quire.device.cuda.inboxes import Inboxes
from quire.device.cuda.row_layout import RowLayout
from quire.device.gpu_kernels import kernel_text
from quire.executor.graphs.ranks.rank_sums import PIECE, rank_constants, summing_functions
from quire.executor.graphs.rows.accesses import Access, Rows
from quire.executor.graphs.rows.arithmetic import SUPPORTED, expression, register_type, rounded
from quire.executor.graphs.rows.row_body import Body, Cut, Leaf, Statement, Stored, Term
from quire.executor.graphs.source import (
    C_TYPES,
    NotGenerated,
    generated_source,
    literal,
    literal_of,
)
from quire.program.passes import NORMS
from quire.program.primitives import VIEWS
from quire.program.values import Node, Program


@dataclass(frozen=True)
class Argument:
    """An address that a kernel takes.

    Attributes:
        source: id of a value or constant, or a weight.
        offset: bytes from the source's first element.
    """

    source: int | mx.array
    offset: int = 0


@dataclass(frozen=True)
class RowKernel:
    """A generated CUDA kernel, with programmatic dependent launch.

    Attributes:
        text: the source of `kernel`. Its first argument is the number of rows; `arguments` follow.
        threads: threads of a thread block.
        grid: returns the number of thread blocks for up to a number of rows.
        layouts: for values whose rows it also writes in another layout, that layout.
    """

    text: str
    arguments: tuple[Argument, ...]
    threads: int
    grid: Callable[[int], tuple[int, int, int]]
    layouts: Mapping[int, RowLayout] = field(default_factory=dict)


@dataclass(frozen=True)
class LaidOutRows:
    """Values that a kernel also writes in another layout.

    Attributes:
        layouts: layout of each value.
        offsets: bytes from each value's first element to its rows in that layout.
    """

    layouts: Mapping[int, RowLayout]
    offsets: Mapping[int, int]


def row_kernel(
    program: Program,
    node: Node,
    inboxes: Inboxes | None = None,
    polls: int = 0,
    more: LaidOutRows | None = None,
) -> RowKernel:
    """Generate the kernel of a region, or of a single view, element-wise operation or norm.

    Args:
        inboxes: to which products send the rows of a sum of ranks; None without such a sum.
        polls: after how many looks a thread no longer waits for these; 0 waits without end.
        more: outputs whose rows are wanted in another layout, too. The kernel says which of
            them it writes.

    Raises:
        NotGenerated: the node contains an operation that row kernels do not support.
    """
    return RowGenerator(program, node.fused, inboxes, polls=polls).kernel(more)


class RowGenerator:
    """Collects a region's computation, output by output, and writes the kernel."""

    def __init__(self, program: Program, region: Node, inboxes: Inboxes | None, polls: int) -> None:
        self._program, self._region = program, region
        self._inboxes, self._polls = inboxes, polls
        self._rows = Rows(program, region, region.outputs[0])
        nodes = [each for each in region.arguments if each.kind not in VIEWS]
        self._computed = {each.outputs[0]: each for each in nodes}
        norms = {program.values[n.outputs[0]].shape[-1] for n in nodes if n.kind in NORMS}
        if len(norms) > 1:
            raise NotGenerated(f"norms over {', '.join(map(str, norms))} elements")
        width = next(iter(norms), None)
        assert width is None or isinstance(width, int), "norms are over a fixed number"
        self._cut = Cut.of(self._rows.width, width)
        self._arguments: list[Argument] = []
        self._leaves: dict[object, Leaf] = {}
        self._terms: dict[int, Term] = {}
        self._statements: list[Statement] = []
        self._sums: list[list[tuple[str, str]]] = []
        """By phase: the name of a statistic, and what it is of its sum."""

    def kernel(self, more: LaidOutRows | None) -> RowKernel:
        stored, layouts = list[Stored](), {} if more is None else more.layouts
        for number, id in enumerate(self._region.outputs):
            term, dtype = self._term(id), self._program.values[id].dtype
            width = self._rows.width
            writes = dtype == mx.bfloat16 and self._cut.has_groups
            layout = layouts.get(id) if writes else None
            access = Access(0, width, ((width, 1),))
            stored.append(Stored(number, term, dtype, access=access, layout=layout))
        self._arguments += map(Argument, self._region.outputs)
        leaves = tuple(self._leaves.values())
        lines = Body(self._cut, leaves, self._statements, sums=self._sums).lines(stored)
        parameters = [f"const {C_TYPES[leaf.dtype]}* in{leaf.number}" for leaf in leaves]
        parameters += [f"{C_TYPES[each.dtype]}* out{each.number}" for each in stored]
        cut, constants, functions = self._cut, dict(self._cut.constants), ""
        if self._inboxes is not None:
            self._arguments.append(Argument(self._inboxes.table))
            parameters.append("const long long* inboxes")
            constants |= {**rank_constants(self._inboxes), "POLLS": self._polls}
            functions = summing_functions()
        written = {self._region.outputs[n.number]: n.layout for n in stored if n.layout is not None}
        if more is not None and written:
            self._arguments += [Argument(id, more.offsets[id]) for id in written]
            parameters += [each.parameter for each in stored if each.layout is not None]
            for layout in sorted(set(written.values()), key=lambda each: each.value):
                functions += kernel_text("quire.device.cuda", f"{layout.value}.cuh")
        threads = cut.lanes * cut.groups
        text = generated_source(
            parameters, lines, threads, constants=constants, functions=functions
        )
        return RowKernel(
            text,
            tuple(self._arguments),
            threads=threads,
            grid=cut.grid,
            layouts=written,
        )

    # -- values ----------------------------------------------------------------------------------

    def _term(self, id: int) -> Term:
        root = self._rows.root(id)
        if (node := self._computed.get(root)) is None:
            return self._read(root, self._rows.access(id))
        if root != id and not self._rows.access(id).is_whole:
            raise NotGenerated("elements of a computed value change their places")
        if root not in self._terms:
            self._terms[root] = self._made(node)
        return self._terms[root]

    def _read(self, root: int, access: Access) -> Term:
        constant = self._program.constants.get(root)
        if constant is not None and constant.array.size == 1 and not constant.name:
            return Term(literal_of(constant.array), 0)
        return self._leaf(
            root, self._program.values[root].dtype, access, fixed=constant is not None
        )

    def _leaf(
        self,
        source: int | mx.array,
        dtype: mx.Dtype,
        access: Access,
        *,
        fixed: bool,
        summed: bool = False,
    ) -> Term:
        if dtype not in C_TYPES:
            raise NotGenerated(f"{dtype} is not read")
        key = source if isinstance(source, int) else id(source), access
        if key not in self._leaves:
            aligned = access.offset if isinstance(source, int) else 0
            self._arguments.append(Argument(source, aligned * dtype.size))
            self._leaves[key] = Leaf(len(self._leaves), dtype, access, fixed=fixed, summed=summed)
        return Term(f"a{self._leaves[key].number}", 0)

    def _made(self, node: Node) -> Term:
        if len(node.outputs) > 1:
            raise NotGenerated(f"{node.kind} has several outputs")
        if self._program.values[node.outputs[0]].dtype not in C_TYPES:
            raise NotGenerated(f"{self._program.values[node.outputs[0]].dtype} is not computed")
        if node.kind in NORMS:
            return self._normed(node)
        if node.kind == "weighted_sum":
            return self._weighted_sum(node)
        if node.kind == "summed":
            return self._summed(node)
        if node.kind not in SUPPORTED:
            raise NotGenerated(f"{node.kind} is not known")
        given = [self._term(id) for id in node.inputs]
        text = expression(self._program, node, [each.name for each in given])
        return self._variable(
            register_type(self._program.values[node.outputs[0]].dtype), text, given
        )

    def _variable(self, kind: str, text: str, given: Sequence[Term], phase: int = 0) -> Term:
        name = f"v{len(self._statements)}"
        phase = max([phase, *(each.phase for each in given)])
        uses = tuple(each.name for each in given)
        self._statements.append(Statement(phase, kind, name, text=text, uses=uses))
        return Term(name, phase)

    def _statistic(self, text: str, of: Term, phase: int, result: str) -> str:
        """Add a sum over the part in one phase, and return its name for the next phase.

        Args:
            text: C expression of an element's summand.
            result: C expression of the statistic; `{0}` is the sum.
        """
        while len(self._sums) <= phase:
            self._sums.append([])
        name = f"s{phase}_{len(self._sums[phase])}"
        self._sums[phase].append((name, result))
        place = f"sums{phase}[{len(self._sums[phase]) - 1}]"
        self._statements.append(Statement(phase, "", place, text=text, uses=(of.name,)))
        return name

    def _normed(self, node: Node) -> Term:
        """Return a norm's output, rounded to its type before the weight and after each step."""
        dtype = self._program.values[node.outputs[0]].dtype
        x = self._term(node.inputs[0])
        centred, phase = x.name, x.phase
        if node.kind == "layer_norm":
            mean = self._statistic(x.name, x, phase, result="{0} / PART")
            centred, phase = f"({x.name} - {mean})", phase + 1
        eps = literal(node.attributes["eps"], mx.float32)
        square = f"{centred} * {centred}"
        factor = self._statistic(square, x, phase, result=f"rsqrtf({{0}} / PART + {eps})")
        text, given = rounded(f"{centred} * {factor}", dtype), [x]
        for role, sign in (("weight", "*"), ("bias", "+")):
            weight = self._weight(node, role)
            if weight is not None:
                text = rounded(f"{text} {sign} {weight.name}", dtype)
                given.append(weight)
        return self._variable("float", text, given, phase=phase + 1)

    def _weighted_sum(self, node: Node) -> Term:
        """Return the sum of `[R, k, width]` over k, weighted by `[R, k]`, in the order of k. R is a
        multiple of the rows.
        """
        roots = x, _ = [self._rows.root(each) for each in node.inputs]
        if any(each in self._computed for each in roots):
            raise NotGenerated("a weighted sum of computed values")
        given, text = list[Term](), ""
        for accesses in zip(*map(self._rows.parts, node.inputs), strict=True):
            part, weight = map(self._read, roots, accesses)
            given += [part, weight]
            term = f"{weight.name} * {part.name}"
            text = f"{text} + {term}" if text else term
        dtype = self._program.values[x].dtype
        return self._variable("float", rounded(text, dtype), given)

    def _summed(self, node: Node) -> Term:
        """Return the sum of all ranks' rows, rounded to their type."""
        (x,) = node.inputs
        root, dtype, access = (
            self._rows.root(x),
            self._program.values[x].dtype,
            self._rows.access(x),
        )
        if self._inboxes is None or any(each.summed for each in self._leaves.values()):
            raise NotGenerated("a sum of ranks")
        if root in self._computed or not access.is_whole or self._cut.vector * dtype.size % PIECE:
            raise NotGenerated("a sum of ranks' parts of rows")
        return self._leaf(root, dtype, access, fixed=False, summed=True)

    def _weight(self, node: Node, role: str) -> Term | None:
        given = node.input(role)
        if given is not None:
            return self._term(given)
        array = node.weight(role)
        if array is None:
            return None
        steps = ((self._cut.part, 1), (self._cut.parts, 0))
        return self._leaf(
            array, array.dtype, Access(0, 0, steps[: 1 + (steps[1][0] > 1)]), fixed=True
        )
