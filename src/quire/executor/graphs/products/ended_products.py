"""Records products of one row whose kernels also compute what follows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.cache.specs import KVLayout
from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.executor.graphs.attention.pools import LayerPool
from quire.executor.graphs.operands import HeadOperand, Part, is_readable, product_matrix
from quire.executor.graphs.places import Place
from quire.executor.graphs.products import product_kernels
from quire.executor.graphs.products.product_endings import (
    NormEnding,
    ProductEnding,
    heads_ending,
    norm_ending,
)
from quire.executor.graphs.recorder import Buffer
from quire.executor.graphs.rows.generated import GeneratedRecording, values_of
from quire.executor.graphs.rows.row_layouts import (
    LayoutRecording,
    Unscaled,
    layout_for,
    products_of,
)
from quire.executor.graphs.source import NotGenerated
from quire.program.passes import PRODUCTS
from quire.program.values import FUSED, Node, Program


class EndedRecording(GeneratedRecording, LayoutRecording):
    """Joins to products of one row the kernels behind them, which take about as long as a small
    product: norms that only products read, and the rotation and storing of heads without norms.

    A norm's output is then rounded once at most, behind its weight, and the products' sums are
    scaled in float32.
    """

    _pools: Mapping[int, LayerPool]
    _layout: KVLayout
    _by_mlx: frozenset[Node] = frozenset()

    def _begin(self, program: Program) -> None:
        super()._begin(program)
        self._endings: dict[Node, Node] = {}
        """Regions that products compute, by the product."""
        self._prepared: dict[Node, Buffer] = {}

    def _with_ending(self, node: Node) -> Node:
        """Return a product together with the region that its kernel computes."""
        region = self._endings.get(node)
        if region is None:
            return node
        outputs = tuple(each for each in region.outputs if each not in self._elsewhere)
        inputs = tuple(dict.fromkeys((*node.inputs, *region.inputs)))
        parts = *node.parts, *region.parts
        return Node(FUSED, inputs, outputs, arguments=parts, attributes={"what": "ended product"})

    # -- norms -----------------------------------------------------------------------------------

    def _ends_with_norm(self, node: Node) -> bool:
        """Record a product with the region behind it. Return False if they need two kernels."""
        region = self._uses.only_reader(node.outputs[0])
        if self._recorder.max_rows > 1 or node.kind not in PRODUCTS or not is_readable(node):
            return False
        if region is None or region.name != "rows" or region in self._by_mlx:
            return False
        gemm = self._one_row_gemm([node])
        if gemm is None:
            return False
        norms = [each for each in region.arguments if each.kind == "rms_norm"]
        layouts = self._unscaled_layouts(norms[0].outputs[0]) if norms else []
        try:
            found = norm_ending(self._program, region, node.outputs[0], layouts=layouts)
        except NotGenerated:
            return False
        if not layouts:
            return False
        sources = [each for each in values_of(found.arguments) if each not in region.outputs]
        sources = list(map(self._uses.source, sources))
        if not all(each in self._places or each in self._program.constants for each in sources):
            return False  # it reads what a later kernel computes
        self._endings[node] = region
        reads = self._read([node.inputs[0], *sources])
        self._record_norm(node, gemm, found, layouts=layouts, reads=reads)
        return True

    def _record_norm(
        self,
        node: Node,
        gemm: SkinnyGemm,
        found: NormEnding,
        *,
        layouts: Sequence[RowLayout | None],
        reads: Sequence[Buffer],
    ) -> None:
        recorder, width, normed = self._recorder, gemm.outputs, found.normed
        sizes = [width // 64 * (128 if each is None else each.bytes) for each in layouts]
        rows = recorder.buffer(sum(sizes) + width // 16 * 4, reads)
        outputs = [id for id in self._endings[node].outputs if id != normed]
        writes = [*(self._written(id, reads) for id in outputs), rows]
        places = [rows.address + sum(sizes[:number]) for number in range(len(sizes) + 1)]
        arguments = [*map(self._address, found.arguments), places[-1], *places[:-1]]
        self._record_ended(
            [node], gemm, found.ending, arguments=arguments, reads=reads, writes=writes
        )
        for layout, place in zip(layouts, places, strict=False):
            if layout is not None:
                self._laid_out[normed, layout] = place
        self._places[normed] = Place(places[0], rows)
        self._unscaled[normed] = Unscaled(places[-1], found.eps)
        self._elsewhere.add(normed)

    def _unscaled_layouts(self, value: int) -> list[RowLayout | None]:
        """Return the layouts in which products of one row read a value; none at all if something
        else reads it, or if one of them is plain, which was not measured.
        """
        reading, found = self._uses.readers(value), set[RowLayout | None]()
        if value in self._targets or self._by_mlx & set(reading):
            return []
        for node in reading:
            for each in node.parts:
                if value not in map(self._uses.source, each.inputs):
                    continue
                gemms = list(products_of(self._recorder, self._program, each))
                others = [self._uses.source(one) for one in each.inputs[1:]]
                if value in others or not all(isinstance(one, SkinnyGemm) for one in gemms):
                    return []
                if not gemms:
                    return []
                found.update(map(layout_for, gemms))
        return [] if None in found else list(found)

    # -- heads -----------------------------------------------------------------------------------

    def _ends_with_heads(self, node: Node) -> bool:
        """Record the product of queries, keys and values with the rotation behind it. Return False
        if they need two kernels.
        """
        if self._recorder.max_rows > 1 or len(node.outputs) != 3 or node.name != "products":
            return False
        attention = self._uses.only_reader(node.outputs[0])
        if attention is None or attention.name != "attention" or attention in self._by_mlx:
            return False
        if any(self._uses.only_reader(each) is not attention for each in node.outputs):
            return False
        attend = attention.arguments[-1]
        layer = attend.attributes["layer"]
        pool = self._pools[self._layout.owner[layer]]
        slots = pool.plain_slots(self._recorder)
        products = self._of_heads(attention, node)
        if slots is None or not products or attend.attributes.get("chosen_by") is not None:
            return False
        gemm = self._one_row_gemm(products)
        if gemm is None or gemm.cut.parts != 2:
            return False
        rotate = next(each for each in attention.arguments if each.kind == "rotate")
        angles = [self._uses.source(each) for each in rotate.inputs[1:]]
        if not all(each in self._places for each in angles):
            return False
        spec = self._layout.groups[self._layout.group[layer]].spec.attention
        assert spec is not None, "layers that attend keep keys"
        reads = self._read([products[0].inputs[0], *angles])
        q = self._written(products[0].outputs[0], reads)
        blocks, offsets, keys, values = slots
        places = [self._place(each).address for each in angles]
        arguments = [blocks, offsets, *places, q.address, keys, values]
        ending = heads_ending(spec.head_dim, spec.kv_heads, pool.block_size)
        self._record_ended(products, gemm, ending, arguments=arguments, reads=reads, writes=[q])
        self._prepared[attention] = q
        for each in products[1:]:
            self._places[each.outputs[0]] = Place(0, buffer=None)
        self._elsewhere |= set(node.outputs)
        return True

    def _of_heads(self, attention: Node, node: Node) -> list[Node]:
        """Return the products of queries, keys and values if attention only rotates queries and
        keys, by both halves of heads; else none.
        """
        attend, inner = attention.arguments[-1], self._program.inside(attention)
        heads = [HeadOperand.of(inner, attend, role) for role in ("q", "k", "v")]
        made = {each.outputs[0]: each for each in node.arguments}
        found, sizes = list[Node](), set[int]()
        for number, each in enumerate(heads):
            if each is None or each.norm is not None or each.part.source not in made:
                return []
            width = self._width(each.part.source, 1)
            whole = Part(each.part.source, 0, width, head=each.part.head)
            if each.part != whole or (each.rotate is None) != (number == 2):
                return []
            if each.rotate is not None:
                pairs = self._width(each.rotate.inputs[1], 1)
                if 2 * pairs != each.part.head or each.rotate.attributes["neighbours"]:
                    return []
            found.append(made[each.part.source])
            sizes.add(each.part.head)
        return found if len(sizes) == 1 else []

    # -- both ------------------------------------------------------------------------------------

    def _one_row_gemm(self, products: Sequence[Node]) -> SkinnyGemm | None:
        """Return how products of one row are cut, if one kernel may compute what follows them."""
        if not all(map(is_readable, products)):
            return None
        matrices = [product_matrix(each) for each in products]
        if len({each.packing for each in matrices}) > 1:
            return None
        outputs = sum(each.outputs for each in matrices)
        gemm = self._recorder.gemm(matrices[0], outputs, sharing=True)
        found = self._fitting(gemm, products[0].inputs[0])
        return found if isinstance(found, SkinnyGemm) and not found.batch_invariant else None

    def _record_ended(
        self,
        products: Sequence[Node],
        gemm: SkinnyGemm,
        ending: ProductEnding,
        *,
        arguments: Sequence[int],
        reads: Sequence[Buffer],
        writes: Sequence[Buffer],
    ) -> None:
        recorder, x = self._recorder, products[0].inputs[0]
        matrices, biases = [], [each.weight("bias") for each in products]
        offsets = any(each is not None for each in biases)
        given = [recorder.rows, *self._multiplied(x, gemm)]
        for product, bias in zip(products, biases, strict=True):
            matrices.append(product_matrix(product))
            given += [*recorder.matrix(matrices[-1]), *[recorder.optional(bias)] * offsets]
        outputs = tuple(each.outputs for each in matrices)
        source = product_kernels.linear(
            gemm, outputs, offsets=offsets, eps=self._eps(x), ending=ending
        )
        grid = gemm.grid(sum(product_kernels.parts(gemm, outputs)))
        arguments = [*given, *arguments]
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=reads, writes=writes)
