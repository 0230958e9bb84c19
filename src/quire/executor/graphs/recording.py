"""Records the program of a step as kernels: one function for each kind of node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod

import mlx.core as mx
import numpy as np

from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.cache.specs import KVLayout
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.gpu_kernels import in_device_memory
from quire.device.weights import GatedExperts
from quire.executor.graphs import kernels
from quire.executor.graphs.embed import embed_kernel
from quire.executor.graphs.operands import (
    HeadOperand,
    UnsupportedNode,
    codes,
    expert_codes,
)
from quire.executor.graphs.operands import (
    gate as gate_name,
)
from quire.executor.graphs.pools import (
    HeadRows,
    LayerAttention,
    LayerPool,
    Rotation,
    TailCoding,
)
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.rows import RowKernel, row_kernel
from quire.executor.graphs.source import NotGenerated
from quire.models.layers.routers import SoftmaxRouter
from quire.program.passes import Uses
from quire.program.values import FUSED, Node, Program, Value

_EXPERT_TILE = 8
"""Pairs of a row and an expert that a thread block of an experts' product takes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies.

    Attributes:
        address: of its first element.
        buffer: None for constants and for what the step gives.
    """

    address: int
    buffer: Buffer | None


class Recording:
    """Records programs for one number of rows.

    Args:
        pools: where each layer keeps its keys and values, by layer.
        layout: which layer owns the keys that a layer reads.
    """

    def __init__(
        self, recorder: Recorder, pools: Mapping[int, LayerPool], layout: KVLayout
    ) -> None:
        self._recorder, self._pools, self._layout = recorder, pools, layout
        self._kinds: dict[str, Callable[[Node], None]] = {
            "embed": partial(self._generate, embed_kernel),
            "rows": partial(self._generate, row_kernel),
            "linear": self._products,
            "packed_linear": self._products,
            "products": self._products,
            "gated products": self._gated,
            "attention": self._attention,
            "route": self._route,
            "expert_outputs": self._experts,
        }
        self._tails: dict[TailCoding, list[tuple[int, ...]]] = {}

    def record(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> list[Buffer]:
        """Record the kernels of a program.

        Args:
            given: where its fields are, by name.
            outputs: where its outputs go.

        Raises:
            UnsupportedNode: there is no kernel for one of its nodes.
        """
        self._program, self._uses = program, Uses(program)
        self._places = {id: given[name] for name, id in program.fields.items()}
        self._targets = dict(zip(map(self._uses.source, program.outputs), outputs, strict=True))
        self._routed: dict[int, tuple[Buffer, Buffer, int]] = {}
        """By the value of chosen experts: order, tiles, and how many tiles there are."""
        last = self._last_reads(program)
        for number, node in enumerate(program.nodes):
            name = node.attributes["what"] if node.kind == FUSED else node.kind
            if name in self._kinds:
                self._kinds[name](node)
            elif name not in ("Reshape", "Flatten", "Unflatten", "ExpandDims", "Squeeze"):
                raise UnsupportedNode(_shown(program, node))
            for value in last.get(number, ()):
                place = self._places.get(value)
                if place is not None and place.buffer is not None:
                    self._recorder.release(place.buffer)
        return list(outputs)

    def _last_reads(self, program: Program) -> Mapping[int, list[int]]:
        """Return the values that are read for the last time by each node, by its number."""
        last: dict[int, int] = {}
        for number, node in enumerate(program.nodes):
            for value in (*node.inputs, *node.outputs):
                last[self._uses.source(value)] = number
        kept = set(self._targets) | set(program.fields.values())
        found: dict[int, list[int]] = {}
        for value, number in last.items():
            if value not in kept:
                found.setdefault(number, []).append(value)
        return found

    def code_tails(self) -> None:
        """Record the kernels that code the blocks which the step's rows have filled."""
        recorder = self._recorder
        for coding, stores in self._tails.items():
            group = recorder.inputs.group(coding.group)
            addresses = mx.array(np.array(stores, np.int64))
            arguments = [recorder.inputs.rows, group.blocks, group.offsets, group.tails]
            arguments += [recorder.copied(packed.signs(coding.dim))]
            arguments += [recorder.constant(in_device_memory(addresses))]
            source = kernels.code_tails(coding.kv_heads, coding.dim, coding.codes)
            grid = coding.kv_heads, len(stores), 1
            recorder.add_last(source, grid, kernels.TAIL_THREADS, arguments)

    # -- values ----------------------------------------------------------------------------------

    def _place(self, value: int) -> Place:
        source = self._uses.source(value)
        if source not in self._places:
            constant = self._program.constants.get(source)
            if constant is None:
                maker = self._uses.makers.get(source)
                what = "a value" if maker is None else _shown(self._program, maker)
                raise UnsupportedNode(f"{what} is read by a product")
            self._places[source] = Place(self._recorder.weight(constant.array), None)
        return self._places[source]

    def _read(self, values: Sequence[int]) -> list[Buffer]:
        places = map(self._place, values)
        return list(dict.fromkeys(each.buffer for each in places if each.buffer is not None))

    def _written(self, value: int, reads: Sequence[Buffer]) -> Buffer:
        """Return memory for a value that the next kernel writes."""
        target = self._targets.get(value)
        if target is None:
            target = self._recorder.buffer(self._bytes(self._program.values[value]), reads)
        self._places[value] = Place(target.address, target)
        return target

    def _buffer(self, value: int) -> Buffer:
        buffer = self._place(value).buffer
        assert buffer is not None, "kernels write to buffers"
        return buffer

    def _bytes(self, value: Value) -> int:
        rows = dict.fromkeys(self._program.symbols, self._recorder.max_rows)
        sizes = [n if isinstance(n, int) else n.at(rows) for n in value.shape]
        return prod(sizes) * value.dtype.size

    # -- rows ------------------------------------------------------------------------------------

    def _generate(self, make: Callable[[Program, Node], RowKernel], node: Node) -> None:
        try:
            self._generated(make(self._program, node), node)
        except NotGenerated as error:
            raise UnsupportedNode(f"{_shown(self._program, node)}: {error}") from error

    def _generated(self, kernel: RowKernel, node: Node) -> None:
        sources = [each.source for each in kernel.arguments if isinstance(each.source, int)]
        reads = self._read([each for each in sources if each not in node.outputs])
        for value in node.outputs:
            self._written(value, reads)
        writes = [self._buffer(value) for value in node.outputs]
        arguments = [self._recorder.inputs.rows]
        for each in kernel.arguments:
            if isinstance(each.source, int):
                arguments.append(self._place(each.source).address + each.offset)
            else:
                arguments.append(self._recorder.weight(each.source) + each.offset)
        grid = kernel.grid(self._recorder.max_rows)
        self._recorder.add(
            kernel.text, grid, kernel.threads, arguments, reads, writes, kernel.shared
        )

    # -- products --------------------------------------------------------------------------------

    def _products(self, node: Node) -> None:
        """Products of the same rows with matrices, each into a buffer of its own."""
        nodes = list(node.arguments) if node.kind == FUSED else [node]
        weights = [codes(each) for each in nodes]
        biases = [each.weight("bias") for each in nodes]
        recorder, x = self._recorder, nodes[0].inputs[0]
        reads = self._read([x])
        offsets = any(each is not None for each in biases)
        outputs = tuple(each.codes.shape[0] for each in weights)
        gemm = self._fitting(recorder.gemm(weights[0], sum(outputs)))
        arguments, writes = [recorder.inputs.rows, self._place(x).address], list[Buffer]()
        for each, weight, bias in zip(nodes, weights, biases, strict=True):
            writes.append(self._written(each.outputs[0], reads))
            arguments += [*recorder.matrix(weight), writes[-1].address]
            arguments += [recorder.optional(bias)] * offsets
        grid = sum(kernels.parts(gemm, outputs)), gemm.blocks, 1
        source = kernels.linear(gemm, outputs, offsets=offsets)
        recorder.add(source, grid, gemm.threads, arguments, reads, writes, gemm.shared)

    def _gated(self, node: Node) -> None:
        gate, up, join = _ordered(node, "gated")
        weights, recorder = [codes(gate), codes(up)], self._recorder
        if any(each.weight("bias") is not None for each in (gate, up)):
            raise UnsupportedNode("a gated product with biases")
        activation = gate_name(join.attributes["gating"])
        reads = self._read(gate.inputs)
        gemm = self._fitting(recorder.gemm(weights[0], weights[0].codes.shape[0], gated=True))
        y = self._written(join.outputs[0], reads)
        arguments = [recorder.inputs.rows, self._place(gate.inputs[0]).address]
        arguments += [*recorder.matrix(weights[0]), *recorder.matrix(weights[1]), y.address]
        grid = -(-gemm.outputs // gemm.width), gemm.blocks, 1
        source = kernels.gated(gemm, activation)
        recorder.add(source, grid, gemm.threads, arguments, reads, [y], gemm.shared)

    def _fitting(self, gemm: SkinnyGemm) -> SkinnyGemm:
        if not gemm.fits:
            shared = self._recorder.card.shared
            raise UnsupportedNode(
                f"{gemm.inputs} columns do not fit {shared} bytes of shared memory"
            )
        return gemm

    # -- attention -------------------------------------------------------------------------------

    def _attention(self, node: Node) -> None:
        attend, recorder = node.arguments[-1], self._recorder
        own = attend.attributes
        for name in ("sinks", "chosen_by"):
            if own.get(name) is not None or name in attend.roles:
                raise UnsupportedNode(f"attention with {name}")
        layer = own["layer"]
        spec = self._layout.groups[self._layout.group[layer]].spec.attention
        if spec is None or spec.value_in_key or spec.value_dim != spec.head_dim:
            raise UnsupportedNode("attention whose values differ from keys")
        inner = Program(
            self._program.symbols,
            self._program.fields,
            self._program.constants,
            self._program.values,
            node.arguments,
            (),
        )
        heads = {role: HeadOperand.of(inner, attend, role) for role in ("q", "k", "v")}
        q, k, v = heads["q"], heads["k"], heads["v"]
        assert q is not None, "attention has queries"
        head_dim = spec.head_dim
        if head_dim not in paged.VALUE_DIMS:
            raise UnsupportedNode(f"heads of {head_dim}")
        if k is not None and (k.rotate is None) != (q.rotate is None):
            raise UnsupportedNode("attention that rotates queries alone")
        if k is not None and (k.norm is None) != (q.norm is None):
            raise UnsupportedNode("attention that normalises queries alone")
        if v is not None and (v.rotate is not None or (v.norm and v.norm.weight("weight"))):
            raise UnsupportedNode("attention with weighted norms of values")
        eps = {h.norm.attributes["eps"] for h in heads.values() if h and h.norm is not None}
        rotation = self._rotation(q, k)
        values = [each.source for each in heads.values() if each is not None]
        reads = self._read([*values, *(q.rotate.inputs[1:] if q.rotate is not None else ())])
        result = self._written(attend.outputs[0], reads)
        described = LayerAttention(
            self._width(attend.input("q"), 1),
            spec.kv_heads,
            head_dim,
            own["scale"],
            own.get("softcap"),
            self._head_rows(q),
            None if k is None else self._head_rows(k),
            None if v is None else self._head_rows(v),
            q.norm is not None,
            v is not None and v.norm is not None,
            max(eps, default=0.0),
            None if q.norm is None else q.norm.weight("weight"),
            None if k is None or k.norm is None else k.norm.weight("weight"),
            rotation,
            result,
        )
        pool = self._pools[self._layout.owner[layer]]
        pool.record(recorder, described)
        coding = None if k is None else pool.tail_coding(spec.kv_heads, head_dim)
        if coding is not None:
            self._tails.setdefault(coding, []).append(pool.arrays)

    def _width(self, value: int | None, axis: int) -> int:
        assert value is not None, "attention has queries"
        size = self._program.values[value].shape[axis]
        assert isinstance(size, int), "heads are a fixed number"
        return size

    def _head_rows(self, heads: HeadOperand) -> HeadRows:
        place = self._place(heads.source)
        if place.buffer is None:
            raise UnsupportedNode("attention over heads that no kernel computes")
        return HeadRows(place.buffer, heads.offset, heads.stride)

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
        return Rotation(places[0], places[1], pairs, q.rotate.attributes["neighbours"])

    # -- experts ---------------------------------------------------------------------------------

    def _route(self, node: Node) -> None:
        route = node.arguments[-1]
        recorder, router = self._recorder, route.attributes["router"]
        if not isinstance(router, SoftmaxRouter) or router.corrected or router.groups > 1:
            raise UnsupportedNode(f"a router of type {type(router).__name__}, or with groups")
        logits = node.inputs[0]
        if route.roles != ("logits",) or self._program.values[logits].dtype != mx.bfloat16:
            raise UnsupportedNode("a router whose logits are no product in bfloat16")
        experts = self._width(logits, 1)
        if experts % 32 or experts > 1024 or router.k > 32:
            raise UnsupportedNode(f"{router.k} of {experts} experts")
        pairs = recorder.max_rows * router.k
        max_tiles = min(pairs, experts + pairs // _EXPERT_TILE)
        per_expert = route.weight("per_expert")
        source = kernels.route(
            experts,
            router.k,
            router.normalise,
            router.scale,
            per_expert is not None,
            max_tiles,
        )
        reads = self._read([logits])
        chosen, weights = (self._written(value, reads) for value in route.outputs)
        order, tiles = (recorder.buffer(size, reads) for size in (4 * pairs, 12 * max_tiles))
        writes = [chosen, weights, order, tiles]
        arguments = [recorder.inputs.rows, self._place(logits).address]
        arguments += [recorder.optional(per_expert), *(each.address for each in writes)]
        recorder.add(source, (1, 1, 1), kernels.ROUTE_THREADS, arguments, reads, writes)
        self._routed[route.outputs[0]] = order, tiles, max_tiles

    def _experts(self, node: Node) -> None:
        recorder, experts = self._recorder, node.weight("experts")
        if not isinstance(experts, GatedExperts):
            raise UnsupportedNode("experts without gates")
        gate, up, down = map(expert_codes, (experts.gate, experts.up, experts.down))
        if gate.packing != up.packing:
            raise UnsupportedNode("experts whose gates are packed otherwise than their values")
        activation = gate_name(experts.gating)
        x, chosen = node.inputs
        order, tiles, max_tiles = self._routed[chosen]
        count, width, _ = gate.codes.shape
        hidden, top = down.codes.shape[1], self._width(chosen, 1)
        pairs = recorder.max_rows * top
        places = [each.address for each in (order, tiles)]
        gemm = self._fitting(recorder.gemm(gate, width, gated=True, experts=True))
        reads = [*self._read([x]), order, tiles]
        inner = recorder.buffer(2 * pairs * width, reads)
        arguments = [self._place(x).address, *recorder.matrix(gate), *recorder.matrix(up)]
        arguments += [*places, inner.address]
        grid = -(-width // gemm.width), max_tiles, 1
        source = kernels.experts_gated(gemm, count, activation, top)
        recorder.add(source, grid, gemm.threads, arguments, reads, [inner], gemm.shared)
        gemm = self._fitting(recorder.gemm(down, hidden, experts=True))
        reads = [inner, order, tiles]
        y = self._written(node.outputs[0], reads)
        arguments = [inner.address, *recorder.matrix(down), *places, y.address]
        grid, source = (-(-hidden // gemm.width), max_tiles, 1), kernels.experts_down(gemm, count)
        recorder.add(source, grid, gemm.threads, arguments, reads, [y], gemm.shared)
        for each in reads:
            recorder.release(each)


def _ordered(node: Node, last: str) -> tuple[Node, Node, Node]:
    """Return the products of a gate and of a value, and the node that joins them."""
    join = next(each for each in node.arguments if each.kind == last)
    made = {each.outputs[0]: each for each in node.arguments}
    return made[join.inputs[0]], made[join.inputs[1]], join


def _shown(program: Program, node: Node) -> str:
    """Return a node's first line as its program prints it."""
    lines: Iterator[str] = program.lines(node)
    return next(lines)
