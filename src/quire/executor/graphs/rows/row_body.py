"""Writes the body of a row kernel: how rows are cut over threads, and each thread's code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.device.cuda.row_layout import RowLayout
from quire.executor.graphs.rows.accesses import Access
from quire.executor.graphs.rows.arithmetic import register_type
from quire.executor.graphs.source import C_TYPES

_MOST_THREADS, _THREADS = 512, 128
LINE = 16
"""Bytes of a thread's widest load."""


@dataclass(frozen=True)
class Cut:
    """How rows are cut into parts, and a part's elements over threads.

    Attributes:
        width: elements of a row.
        part: elements of a part; the last part of a row may have fewer.
        vector: contiguous elements that a thread handles together.
        per: vectors of a thread.
        lanes: threads of a part.
        groups: parts that a thread block handles.
    """

    width: int
    part: int
    vector: int
    per: int
    lanes: int
    groups: int

    @staticmethod
    def of(width: int, norm: int | None, together: int | None = None) -> Cut:
        """Return how rows are cut.

        Args:
            norm: elements that a norm covers.
            together: elements that are contiguous in the output; by default all.
        """
        part, together = norm or width, together or width
        vector = min(8, part & -part, together & -together)
        while vector > 1 and part // vector < 16:
            vector //= 2
        if norm is None:
            part = min(part, _THREADS * vector)
        vectors = part // vector
        if vectors <= 32:
            lanes = 1 << (vectors - 1).bit_length()
            return Cut(width, part, vector, per=1, lanes=lanes, groups=_THREADS // lanes)
        per = -(-vectors // _MOST_THREADS)
        lanes = -(-vectors // (per * 32)) * 32
        return Cut(width, part, vector, per=per, lanes=lanes, groups=1)

    @property
    def parts(self) -> int:
        """Number of parts of a row."""
        return -(-self.width // self.part)

    def grid(self, max_rows: int) -> tuple[int, int, int]:
        """Return the number of thread blocks for up to `max_rows` rows."""
        return -(-max_rows * self.parts // self.groups), 1, 1

    @property
    def has_groups(self) -> bool:
        """Whether eight neighbouring threads have 64 contiguous elements of a row."""
        return self.vector == 8 and self.part % 64 == 0 and self.lanes % 8 == 0

    @property
    def constants(self) -> Mapping[str, int]:
        """The integers of a cut, by their names in the source."""
        names = {"WIDTH": self.width, "PART": self.part, "PARTS": self.parts, "PER": self.per}
        return names | {"LANES": self.lanes, "GROUPS": self.groups, "V": self.vector}

    @property
    def inside(self) -> str:
        """Return a C condition: vector `p` of a thread lies within the part, the row and
        the rows.
        """
        conditions = []
        if self.groups > 1:
            conditions.append("there")
        if self.lanes * self.per * self.vector != self.part:
            conditions.append("c < PART")
        if self.parts * self.part != self.width:
            conditions.append("r < WIDTH")
        return " && ".join(conditions) or "true"


@dataclass(frozen=True)
class Term:
    """A value in an expression.

    Attributes:
        name: a variable's name, or a number.
        phase: the first phase in which it is known.
    """

    name: str
    phase: int


@dataclass
class Statement:
    """A computation in a phase: a variable, or, if it has no type, a summand of a sum."""

    phase: int
    type: str
    name: str
    text: str
    uses: tuple[str, ...]


@dataclass(frozen=True)
class Leaf:
    """An argument loaded into registers: `a<number>` is its element.

    Attributes:
        fixed: whether no kernel of the step writes it.
        summed: whether the other ranks' rows are added to it.
    """

    number: int
    dtype: mx.Dtype
    access: Access
    fixed: bool
    summed: bool = False


@dataclass(frozen=True)
class Stored:
    """A value written to argument `out<number>`.

    Attributes:
        dtype: type in memory.
        access: offsets and strides of its elements.
        layout: in which its rows are also written, to `laid_out<number>`; None if they are not.
    """

    number: int
    term: Term
    dtype: mx.Dtype
    access: Access
    layout: RowLayout | None = None

    @property
    def parameter(self) -> str:
        """The C parameter of the rows in another layout."""
        kind = "uint4*" if self.layout is RowLayout.DIGITS else "__nv_bfloat16*"
        return f"{kind} laid_out{self.number}"

    def store(self, elements: str) -> str:
        """Return the C statement that stores a thread's eight elements in another layout."""
        to = f"laid_out{self.number}"
        if self.layout is RowLayout.DIGITS:
            return f"store_digits(digits_of_row({to}, row, WIDTH), r, {elements}, inside);"
        return f"if (inside) store_interleaved({to} + (size_t)row * WIDTH, r, {elements});"


class Body:
    """Writes the lines of a kernel's body."""

    def __init__(
        self,
        cut: Cut,
        leaves: Sequence[Leaf],
        statements: Sequence[Statement],
        sums: Sequence[Sequence[tuple[str, str]]],
    ) -> None:
        self._cut, self._leaves, self._statements, self._sums = cut, leaves, statements, sums
        self._types = {each.name: each.type for each in statements}
        phases = {each.name: each.phase for each in statements}
        self._later = dict.fromkeys(
            name for each in statements for name in each.uses if phases.get(name, 99) < each.phase
        )

    def lines(self, stored: Sequence[Stored]) -> list[str]:
        """Return the kernel's lines."""
        own = ["const int at = blockIdx.x * GROUPS + threadIdx.x / LANES;"]
        own += ["const int row = at / PARTS, part = at % PARTS, lane = threadIdx.x % LANES;"]
        if self._cut.groups > 1:
            own += ["if (blockIdx.x * GROUPS / PARTS >= *rows) return;"]
            own += ["const bool there = row < *rows;"]
        else:
            own += ["if (row >= *rows) return;"]
        summed = [leaf for leaf in self._leaves if leaf.summed]
        own += ["char* const inbox = (char*)inboxes[RANK];"] * len(summed)
        for fixed in (True, False):
            if not fixed:
                own += ["wait_for_others();"]
            for leaf in self._leaves:
                own += self._loaded(leaf) if leaf.fixed == fixed else []
        for leaf in summed:
            own += self._added_up(leaf)
        if self._sums and self._cut.lanes > 32:
            own += [f"__shared__ float found[{32 * sum(map(len, self._sums))}];"]
        own += [f"{self._types[name]} kept_{name}[PER][V];" for name in self._later]
        phases = [each.term.phase for each in stored]
        phases += [each.phase for each in self._statements]
        for phase in range(max(phases) + 1):
            own += self._phase(phase, [each for each in stored if each.term.phase == phase])
        own += ["end_round(inbox, before, blocks, round);"] * len(summed)
        return own

    def _added_up(self, leaf: Leaf) -> list[str]:
        """Return the lines that add the other ranks' rows to an argument in registers."""
        kind = C_TYPES[leaf.dtype]
        return [
            "int first[PER];",
            *self._loop(["first[p] = inside ? row * WIDTH + r : -1;"]),
            "const unsigned round = round_of(inbox);",
            f"add_ranks<{kind}, PER, V>(({kind}*)raw{leaf.number}, first, inbox, round);",
            "const int blocks = (*rows * PARTS + GROUPS - 1) / GROUPS;",
            "const int before = blocks_before(inbox);",
        ]

    def _loop(self, lines: Sequence[str]) -> list[str]:
        """Wrap lines in a loop over a thread's vectors."""
        head = ["#pragma unroll", "for (int p = 0; p < PER; p++) {"]
        head += ["const int c = (lane + p * LANES) * V, r = part * PART + c;"]
        return [*head, f"const bool inside = {self._cut.inside};", *lines, "}"]

    def _loaded(self, leaf: Leaf) -> list[str]:
        """Return the lines that load an argument into registers."""
        access, kind, name = leaf.access, C_TYPES[leaf.dtype], f"raw{leaf.number}"
        from_row = f"in{leaf.number}" + f" + (size_t)row * {access.row}" * (access.row > 0)
        own = [f"const {kind}* from{leaf.number} = {from_row};"]
        there = "there" if self._cut.groups > 1 and access.row else "true"
        if access.is_uniform:
            return [*own, f"const {kind} {name} = {there} ? *from{leaf.number} : {kind}{{}};"]
        many = access.neighbours(self._cut.vector, LINE // leaf.dtype.size)
        if many:
            index = access.index("r", "c", self._cut.part)
            load = f"load<{kind}, {many}, V>({name}[p], from{leaf.number} + {index}, inside);"
            return [*own, f"Pack<{kind}, {many}> {name}[PER][V / {many}];", *self._loop([load])]
        if access.steps[0][1] == 0 and access.steps[0][0] % self._cut.vector == 0:
            index = access.index("r", "c", self._cut.part)
            load = f"{name}[p] = inside ? from{leaf.number}[{index}] : {kind}{{}};"
            return [*own, f"{kind} {name}[PER];", *self._loop([load])]
        index = access.index("(r + i)", "(c + i)", self._cut.part)
        load = f"{name}[p][i] = inside ? from{leaf.number}[{index}] : {kind}{{}};"
        each = ["#pragma unroll", f"for (int i = 0; i < V; i++) {load}"]
        return [*own, f"{kind} {name}[PER][V];", *self._loop(each)]

    def _element(self, leaf: Leaf) -> str:
        access, name = leaf.access, f"raw{leaf.number}"
        many = access.neighbours(self._cut.vector, LINE // leaf.dtype.size)
        if access.is_uniform:
            return name
        if many:
            return f"{name}[p][i / {many}].at[i % {many}]"
        whole = access.steps[0][1] == 0 and access.steps[0][0] % self._cut.vector == 0
        return f"{name}[p]" if whole else f"{name}[p][i]"

    def _phase(self, phase: int, stored: Sequence[Stored]) -> list[str]:
        """Return the loop of a phase over a thread's elements, and the reduction of its sums."""
        statements = [each for each in self._statements if each.phase == phase]
        used = {name for each in statements for name in each.uses}
        used |= {each.term.name for each in stored}
        inner = []
        for leaf in self._leaves:
            if f"a{leaf.number}" in used:
                kind, element = register_type(leaf.dtype), self._element(leaf)
                inner.append(f"const {kind} a{leaf.number} = number({element});")
        own = {each.name for each in statements}
        for name in self._later:
            if name in used and name not in own:
                inner.append(f"const {self._types[name]} {name} = kept_{name}[p][i];")
        for each in statements:
            if each.type:
                inner.append(f"const {each.type} {each.name} = {each.text};")
            else:
                guard = "" if self._cut.inside == "true" else "if (inside) "
                inner.append(f"{guard}{each.name} += {each.text};")
            if each.name in self._later:
                inner.append(f"kept_{each.name}[p][i] = {each.name};")
        before, after = [], []
        for out in stored:
            many = out.access.neighbours(self._cut.vector, LINE // out.dtype.size)
            kind, name = f"{C_TYPES[out.dtype]}, {many}", f"o{out.number}"
            before.append(f"Pack<{kind}> {name}[V / {many}];")
            inner.append(f"put({name}[i / {many}].at[i % {many}], {out.term.name});")
            index = out.access.index("r", "c", self._cut.part)
            index += f" + {out.access.offset}" * (out.access.offset > 0)
            row = f"out{out.number} + (size_t)row * {out.access.row}"
            after.append(f"if (inside) store<{kind}, V>({row} + {index}, {name});")
            if out.layout is not None:
                after.append(out.store(f"{name}->at"))
        loop = ["#pragma unroll", "for (int i = 0; i < V; i++) {", *inner, "}"]
        return [
            *self._sums_before(phase),
            *self._loop([*before, *loop, *after]),
            *self._sums_after(phase),
        ]

    def _sums_before(self, phase: int) -> list[str]:
        count = len(self._sums[phase]) if phase < len(self._sums) else 0
        return [f"float sums{phase}[{count}] = {{}};"] if count else []

    def _sums_after(self, phase: int) -> list[str]:
        if phase >= len(self._sums) or not self._sums[phase]:
            return []
        start = 32 * sum(map(len, self._sums[:phase]))
        found = f"found + {start}" if self._cut.lanes > 32 else "(float*)0"
        own = [f"sum_up<LANES, {len(self._sums[phase])}>(sums{phase}, {found});"]
        for number, (name, result) in enumerate(self._sums[phase]):
            own.append(f"const float {name} = {result.format(f'sums{phase}[{number}]')};")
        return own
