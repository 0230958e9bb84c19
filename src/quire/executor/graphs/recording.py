"""Records the program of a step as kernels: one function for each kind of node."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import mlx.core as mx

from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.cache.specs import KVLayout
from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.weights import Packing
from quire.executor.graphs import kernels, product_kernels
from quire.executor.graphs.between import MLXSegment, RecordedNode, memory_of
from quire.executor.graphs.embed import embed_kernel, gathered_kernel
from quire.executor.graphs.exchange import ExchangeRecording
from quire.executor.graphs.head_nodes import HeadRecording
from quire.executor.graphs.indexers import Index, IndexerRecording
from quire.executor.graphs.joined import joined_kernel
from quire.executor.graphs.layer_attention import HeadRows, LayerAttention, Rotation
from quire.executor.graphs.library_products import LibraryRecording
from quire.executor.graphs.low_rank import LowRankRecording
from quire.executor.graphs.mixtures import MixtureRecording
from quire.executor.graphs.operands import (
    HeadOperand,
    Part,
    ProductMatrix,
    UnsupportedNode,
    check_heads,
    is_plain,
    is_readable,
    product_matrix,
)
from quire.executor.graphs.places import Place, shown
from quire.executor.graphs.plain_products import PlainProduct
from quire.executor.graphs.pools import LayerPool, TailCoding
from quire.executor.graphs.product_kernels import Gemm
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.recurrences import StateRecording
from quire.executor.graphs.rows import row_kernel
from quire.executor.graphs.small_sums import reduced_kernel, small_product_kernel
from quire.executor.graphs.source import NotGenerated
from quire.executor.graphs.states import LayerStates
from quire.program.passes import PRODUCTS, RESHAPES, Uses
from quire.program.pieces import at_once
from quire.program.values import Node, Program

NODES_A_PIECE = 100
_FEW_OUTPUTS = 512
"""Most outputs of a matrix whose product is computed by one warp for each element."""


class Recording(
    MixtureRecording,
    StateRecording,
    HeadRecording,
    ExchangeRecording,
    IndexerRecording,
    LowRankRecording,
    LibraryRecording,
):
    """Records programs for one number of rows.

    Args:
        pools: the pool of each layer that keeps keys and values, by layer.
        layout: says which layer owns the keys that a layer reads.
        states: arrays of each layer's recurrent states, by layer.
        by_mlx: nodes without kernels, which become segments.

    Attributes:
        segments: what MLX computes between two parts of the recorder's kernels, in order.
        recorded: the nodes that kernels compute, in order.
        indexes: see `IndexerRecording`.
    """

    def __init__(
        self,
        recorder: Recorder,
        pools: Mapping[int, LayerPool],
        layout: KVLayout,
        states: Mapping[int, LayerStates],
        by_mlx: Iterable[Node] = (),
    ) -> None:
        super().__init__(recorder)
        self._by_mlx = frozenset(by_mlx)
        self.segments: list[MLXSegment] = []
        self.recorded: list[RecordedNode] = []
        self._pools, self._layout, self._states = pools, layout, states
        self.indexes = {
            layer: Index(each.index, each.group, each.block_size) for layer, each in pools.items()
        }
        self._kinds: dict[str, Callable[[Node], None]] = {
            "embed": partial(self._generate, embed_kernel),
            "Gather": partial(self._generate, gathered_kernel),
            "rows": self._rows,
            "linear": self._products,
            "packed_linear": self._products,
            "products": self._products,
            "gated products": self._gated,
            "gated product": self._gated_product,
            "add_low_rank": self._low_rank,
            "attention": self._attention,
            "choose": self._choose,
            "route": self._route,
            "expert_outputs": self._experts,
            "by_head": self._by_head,
            "rotate": self._rotate,
            "convolve": self._convolve,
            "delta_rule": self._delta_rule,
            "state_space": self._state_space,
            "summed": self._exchange,
            "gathered": self._exchange,
            "Reduce": partial(self._generate, reduced_kernel),
            "Matmul": partial(self._generate, small_product_kernel),
            "Concatenate": partial(self._generate, joined_kernel),
            **dict.fromkeys(("Split", "Slice", "Transpose", "Broadcast"), self._copied),
        }
        self._tails: dict[TailCoding, list[tuple[int, ...]]] = {}

    def record(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> list[Buffer]:
        """Record the kernels of a program; see `record_in_pieces`."""
        return at_once(self.record_in_pieces(program, given, outputs))

    def record_in_pieces(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> Generator[None, None, list[Buffer]]:
        """Record the kernels of a program, those of `NODES_A_PIECE` nodes in each piece.

        Args:
            given: locations of the program's fields, by name.
            outputs: locations of its outputs.

        Raises:
            UnsupportedNode: there is no kernel for one of its nodes.
        """
        self._start(program, given, outputs)
        last, done = self._last_reads(program), list[int]()
        for number, node in enumerate(program.nodes):
            if number and number % NODES_A_PIECE == 0:
                yield
            if node in self._by_mlx:
                self._segment(node)
            else:
                before = len(self._recorder.kernels)
                self._record(node)
                if len(self._recorder.kernels) > before:
                    self.recorded.append(self._just_recorded(node))
            done += last.get(number, ())
            if node in self._by_mlx:
                continue  # MLX may read its buffers until the next graph begins
            for value in done:
                place = self._places.get(value)
                if place is not None and place.buffer is not None:
                    self._recorder.release(place.buffer)
            done.clear()
        return list(outputs)

    def _segment(self, node: Node) -> None:
        """Let MLX compute a node behind the kernels recorded so far."""
        recorder = self._recorder
        if not self.segments or recorder.parts[-1] < len(recorder.kernels):
            recorder.start_part()
            self.segments.append(MLXSegment(self._program))
        segment = self.segments[-1]
        for value in node.reads:
            self._read_by_mlx(segment, value)
        segment.nodes.append(node)
        for value in node.outputs:
            segment.writes[value] = self._written(value, []).address

    def _just_recorded(self, node: Node) -> RecordedNode:
        """Return a node whose kernels have just been recorded."""
        places = {value: self._places.get(value) for value in node.outputs}
        results = {
            value: place.buffer
            for value, place in places.items()
            if place is not None and place.buffer is not None and place.buffer.memory is not None
        }
        end = len(self._recorder.kernels)
        return RecordedNode(self._program, node, end, alone=self._alone(node), results=results)

    def _alone(self, node: Node) -> MLXSegment | None:
        """Return the segment of one node; None if MLX cannot read its inputs."""
        segment = MLXSegment(self._program)
        try:
            for value in node.reads:
                self._read_by_mlx(segment, value)
        except UnsupportedNode:
            return None
        segment.nodes.append(node)
        return segment

    def _read_by_mlx(self, segment: MLXSegment, value: int) -> None:
        """Let a segment know a value, which may be a view of what a kernel computed."""
        known = {id for each in segment.nodes for id in each.outputs}
        if value in known or value in segment.reads or value in self._program.constants:
            return
        source = self._uses.source(value)
        if source in self._places and source not in segment.writes:
            segment.reads[value] = memory_of(value, self._places[source].buffer)
            return
        view = self._uses.makers[value]
        for each in view.inputs:
            self._read_by_mlx(segment, each)
        segment.nodes.append(view)

    def _record(self, node: Node) -> None:
        """Record the kernels of a node.

        Raises:
            UnsupportedNode: the node has no kernel.
        """
        self._choose_rows(node)
        if node.name in self._kinds:
            self._kinds[node.name](node)
        elif node.kind not in RESHAPES:
            raise UnsupportedNode(shown(self._program, node))

    def code_tails(self) -> None:
        """Record the kernels that code the blocks which the step's rows have filled."""
        recorder = self._recorder
        for coding, stores in self._tails.items():
            group = recorder.inputs.group(coding.group)
            arguments = [recorder.inputs.rows, group.blocks, group.offsets, group.tails]
            dims = coding.kv_heads, coding.key_dim, coding.value_dim
            signs = packed.signs(coding.value_dim) if coding.value_dim else None
            arguments += [0 if signs is None else recorder.copied(signs)]
            arguments += [recorder.table([address for arrays in stores for address in arrays])]
            source = kernels.code_tails(*dims, coding.codes)
            grid = coding.kv_heads, len(stores), 1
            recorder.add_last(source, grid, kernels.TAIL_THREADS, arguments=arguments)

    # -- products --------------------------------------------------------------------------------

    def _products(self, node: Node) -> None:
        """Record products of the same rows with several matrices, each into its own buffer."""
        nodes = [each for each in (node.arguments or [node]) if each.kind in PRODUCTS]
        for each in nodes:
            if not is_readable(each):
                self._plain_product(each)
        alike: dict[Packing, list[tuple[Node, ProductMatrix]]] = {}
        for each in filter(is_readable, nodes):
            matrix = product_matrix(each)
            alike.setdefault(matrix.packing, []).append((each, matrix))
        for found in alike.values():
            own = [each for each, _ in found]
            if self._is_by_library(own):
                self._products_by_library(own)
            else:
                self._products_alike(own, [matrix for _, matrix in found])

    def _products_alike(self, nodes: Sequence[Node], weights: Sequence[ProductMatrix]) -> None:
        biases = [each.weight("bias") for each in nodes]
        recorder, x = self._recorder, nodes[0].inputs[0]
        reads = self._read([x])
        offsets = any(each is not None for each in biases)
        outputs = tuple(each.outputs for each in weights)
        gemm = self._fitting(recorder.gemm(weights[0], sum(outputs), sharing=True), x)
        arguments, writes = [recorder.rows, self._multiplied(x, gemm)], list[Buffer]()
        for each, weight, bias in zip(nodes, weights, biases, strict=True):
            writes.append(self._written(each.outputs[0], reads))
            arguments += [*recorder.matrix(weight), writes[-1].address]
            arguments += [recorder.optional(bias)] * offsets
        inboxes = None
        if len(nodes) == 1 and isinstance(gemm, SkinnyGemm):
            inboxes = self._sending(nodes[0])
        if inboxes is not None:
            arguments.append(recorder.address(inboxes.table))
            reads = [*reads, recorder.exchanged]
        grid = gemm.grid(sum(product_kernels.parts(gemm, outputs)))
        source = product_kernels.linear(gemm, outputs, offsets=offsets, inboxes=inboxes)
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=reads, writes=writes)

    def _gated(self, node: Node) -> None:
        gate, up, join = _ordered(node)
        if not _gates_products(gate, up, join) or self._is_by_library([gate, up]):
            self._products(node)
            self._generate(row_kernel, join)
            for each in (gate, up):
                self._recorder.release(self._buffer(each.outputs[0]))
            return
        weights, recorder = [product_matrix(gate), product_matrix(up)], self._recorder
        activation = join.attributes["gating"].activation
        reads = self._read(gate.inputs)
        outputs, (x, *_) = weights[0].outputs, gate.inputs
        gemm = self._fitting(recorder.gemm(weights[0], outputs, gated=True, sharing=True), x)
        (output,) = join.outputs
        layout = self._wanted_layout(output, [RowLayout.DIGITS])
        y = self._written(output, reads, layout=layout)
        arguments = [recorder.rows, self._multiplied(x, gemm)]
        arguments += [*recorder.matrix(weights[0]), *recorder.matrix(weights[1]), y.address]
        arguments += [self._laid_out[output, layout]] if layout else []
        grid = gemm.grid(-(-outputs // gemm.width))
        digit_rows = recorder.max_rows if layout else 0
        source = product_kernels.gated(gemm, activation, digit_rows=digit_rows)
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=reads, writes=[y])

    def _gated_product(self, node: Node) -> None:
        """Record a product and its gate, which multiplies a part of another value."""
        product = next(each for each in node.arguments if each.kind in PRODUCTS)
        join = next(each for each in node.arguments if each.kind == "gated")
        other = self._multiplied_part(node, join)
        recorder, x = self._recorder, product.inputs[0]
        gemm: Gemm | None = None
        if other is not None and _gates_products(product, product, join):
            weight = product_matrix(product)
            gemm = self._fitting(recorder.gemm(weight, weight.outputs, sharing=True), x)
        if other is None or not isinstance(gemm, SkinnyGemm):
            self._products(product)
            rest = tuple(each for each in node.arguments if each is not product)
            self._generate(row_kernel, replace(node, arguments=rest))
            recorder.release(self._buffer(product.outputs[0]))
            return
        reads = self._read([x, other.source])
        y = self._written(join.outputs[0], reads)
        address = self._place(other.source).address + 2 * other.offset
        arguments = [recorder.rows, self._multiplied(x, gemm), *recorder.matrix(weight)]
        arguments += [y.address, address]
        activation = join.attributes["gating"].activation
        source = product_kernels.gated(gemm, activation, others=other.row)
        grid = gemm.grid(-(-weight.outputs // gemm.width))
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=reads, writes=[y])

    def _multiplied_part(self, node: Node, join: Node) -> Part | None:
        """Return the part of a value that a gate multiplies; None if kernels cannot read it."""
        inner, value = self._inside(node), join.input("y")
        assert value is not None, "gates multiply a value"
        try:
            return Part.of(inner, Uses(inner), value)
        except UnsupportedNode:
            return None

    def _inside(self, node: Node) -> Program:
        """Return the program of a fused node's own nodes."""
        return replace(self._program, nodes=node.arguments, outputs=())

    def _plain_product(self, node: Node) -> None:
        """Record a product with a matrix that tensor core kernels do not take."""
        x, y = (self._program.values[each] for each in (node.inputs[0], node.outputs[0]))
        product = PlainProduct(x.dtype, y.dtype, node.weight("weight"), bias=node.weight("bias"))
        recorder = self._recorder
        if product.outputs > _FEW_OUTPUTS:
            product_matrix(node)
        try:
            text = product.text
        except NotGenerated as error:
            raise UnsupportedNode(f"{shown(self._program, node)}: {error}") from error
        reads = self._read([node.inputs[0]])
        to = self._written(node.outputs[0], reads)
        arguments = [recorder.rows, self._place(node.inputs[0]).address]
        arguments += [*map(recorder.weight, product.arrays), to.address]
        grid = product.grid(recorder.max_rows)
        recorder.add(text, grid, product.threads, arguments=arguments, reads=reads, writes=[to])

    # -- attention -------------------------------------------------------------------------------

    def _attention(self, node: Node) -> None:
        attend, recorder = node.arguments[-1], self._recorder
        own = attend.attributes
        chosen = self._chosen_by(own.get("chosen_by"))
        sinks = attend.weight("sinks")
        if "sinks" in attend.roles or (sinks is not None and sinks.dtype != mx.bfloat16):
            raise UnsupportedNode("attention with sinks that are no weights in bfloat16")
        layer = own["layer"]
        spec = self._layout.groups[self._layout.group[layer]].spec.attention
        assert spec is not None, "layers that attend keep keys"
        inner = self._inside(node)
        roles = ("q", "k") if spec.value_in_key else ("q", "k", "v")
        heads = {role: HeadOperand.of(inner, attend, role) for role in roles}
        q, k, v = heads["q"], heads["k"], heads.get("v")
        assert q is not None, "attention has queries"
        head_dim = spec.head_dim
        if not paged.takes(head_dim, spec.value_dim):
            raise UnsupportedNode(f"heads of {head_dim}, with values of {spec.value_dim}")
        check_heads(q, k, v)
        eps = {h.norm.attributes["eps"] for h in heads.values() if h and h.norm is not None}
        rotation = self._rotation(q, k)
        values = [each.part.source for each in heads.values() if each is not None]
        reads = self._read([*values, *(q.rotate.inputs[1:] if q.rotate is not None else ())])
        pool, output = self._pools[self._layout.owner[layer]], attend.outputs[0]
        written = [RowLayout.DIGITS] if pool.writes_digits(spec.value_dim) else []
        result = self._written(output, reads, layout=self._wanted_layout(output, written))
        described = LayerAttention(
            self._width(attend.input("q"), 1),
            spec.kv_heads,
            head_dim,
            scale=own["scale"],
            softcap=own.get("softcap"),
            q=self._head_rows(q),
            k=None if k is None else self._head_rows(k),
            v=None if v is None else self._head_rows(v),
            normed=q.norm is not None,
            values_normed=v is not None and v.norm is not None,
            eps=max(eps, default=0.0),
            q_norm=None if q.norm is None else q.norm.weight("weight"),
            k_norm=None if k is None or k.norm is None else k.norm.weight("weight"),
            rotation=rotation,
            result=result,
            digits=self._laid_out.get((output, RowLayout.DIGITS), 0),
            sinks=sinks,
            value_dim=spec.value_dim,
            value_in_key=spec.value_in_key,
            chosen=chosen,
        )
        pool.record(recorder, described)
        self._has_attended(own.get("chosen_by"))
        coding = None if k is None else pool.tail_coding(spec)
        if coding is not None:
            self._tails.setdefault(coding, []).append(pool.arrays)

    def _head_rows(self, heads: HeadOperand) -> HeadRows:
        part = heads.part
        place = self._place(part.source)
        if place.buffer is None:
            raise UnsupportedNode("attention over heads that no kernel computes")
        return HeadRows(place.buffer, part.offset, part.row, head_stride=part.head)

    def _rotation(self, q: HeadOperand, k: HeadOperand | None) -> Rotation | None:
        if q.rotate is None:
            return None
        cosines, sines = q.rotate.inputs[1:]
        if k is not None and k.rotate is not None and k.rotate.inputs[1:] != (cosines, sines):
            raise UnsupportedNode("attention with two rotations")
        places = [self._place(each).buffer for each in (cosines, sines)]
        if places[0] is None or places[1] is None:
            raise UnsupportedNode("a rotation by constant angles")
        pairs = self._width(cosines, 1)
        return Rotation(places[0], places[1], pairs, neighbours=q.rotate.attributes["neighbours"])


def _gates_products(gate: Node, up: Node, join: Node) -> bool:
    """Whether one kernel can compute both products and their gate."""
    both = gate, up
    biased = any(each.weight("bias") is not None for each in both)
    if biased or not is_plain(join.attributes["gating"]) or not all(map(is_readable, both)):
        return False
    return len({each.packing for each in map(product_matrix, both)}) == 1


def _ordered(node: Node) -> tuple[Node, Node, Node]:
    """Return the product of the gate, the product of the value, and the node that joins them."""
    join = next(each for each in node.arguments if each.kind == "gated")
    made = {each.outputs[0]: each for each in node.arguments}
    return made[join.inputs[0]], made[join.inputs[1]], join
