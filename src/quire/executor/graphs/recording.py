"""Records the program of a step as kernels: one function for each kind of node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np

from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.cache.specs import KVLayout
from quire.device.activations import Gating
from quire.device.cuda.packed import ACTIVATIONS, Packed
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.gpu_kernels import in_device_memory
from quire.device.weights import ExpertMatrices, GatedExperts, PackedWeight
from quire.executor.graphs import kernels
from quire.executor.graphs.embed import embed_kernel
from quire.executor.graphs.head import Head
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


class UnsupportedNode(Exception):
    """No kernel computes a node of the program; the message names it and says why."""


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
            "embed": self._embed,
            "rows": self._rows,
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

    def _embed(self, node: Node) -> None:
        self._generate(node, embed_kernel)

    def _rows(self, node: Node) -> None:
        self._generate(node, row_kernel)

    def _generate(self, node: Node, make: Callable[[Program, Node], RowKernel]) -> None:
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
        weights = [_codes(each) for each in nodes]
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
        weights, recorder = [_codes(gate), _codes(up)], self._recorder
        if any(each.weight("bias") is not None for each in (gate, up)):
            raise UnsupportedNode("a gated product with biases")
        activation = _gate(join.attributes["gating"])
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
        heads = {role: _Heads.of(inner, attend, role) for role in ("q", "k", "v")}
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

    def _head_rows(self, heads: _Heads) -> HeadRows:
        place = self._place(heads.source)
        if place.buffer is None:
            raise UnsupportedNode("attention over heads that no kernel computes")
        return HeadRows(place.buffer, heads.offset, heads.stride)

    def _rotation(self, q: _Heads, k: _Heads | None) -> Rotation | None:
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
        gate, up, down = map(_expert_codes, (experts.gate, experts.up, experts.down))
        if gate.packing != up.packing:
            raise UnsupportedNode("experts whose gates are packed otherwise than their values")
        activation = _gate(experts.gating)
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


@dataclass(frozen=True, slots=True)
class _Heads:
    """Where queries, keys or values come from, and what is done to them.

    Attributes:
        source: the value that a product computed.
        offset, stride: in elements: where a row begins, and from one row to the next.
    """

    source: int
    offset: int
    stride: int
    norm: Node | None
    rotate: Node | None

    @staticmethod
    def of(program: Program, attend: Node, role: str) -> _Heads | None:
        """Follow an operand of attention to its product, within the fused node's program."""
        value = attend.input(role)
        if value is None:
            return None
        uses = Uses(program)
        found: dict[str, Node] = {}
        for kind in ("rotate", "rms_norm"):
            maker = uses.maker(value)
            if maker is not None and maker.kind == kind:
                found[kind] = maker
                value = maker.inputs[0]
        source, offset = uses.source(value), 0
        width = _row_width(program, source)
        stride = width
        maker = uses.makers.get(source)
        if maker is not None and maker.kind in ("Split", "Slice"):
            offset = _offset(program, maker, source)
            source = uses.source(maker.inputs[0])
            stride = _row_width(program, source)
        return _Heads(source, offset, stride, found.get("rms_norm"), found.get("rotate"))


def _row_width(program: Program, value: int) -> int:
    return prod(n for n in program.values[value].shape[1:] if isinstance(n, int))


def _offset(program: Program, node: Node, value: int) -> int:
    """Return where a part of rows `[T, n]` begins.

    Raises:
        UnsupportedNode: it is a part of something else.
    """
    if len(program.values[node.inputs[0]].shape) != 2:
        raise UnsupportedNode("attention over parts of heads")
    if node.kind == "Split":
        cuts, axis = node.arguments
        if axis == 1:
            return int((0, *cuts)[node.outputs.index(value)])
    elif node.arguments[0][0] == 0 and node.arguments[2] == (1, 1):
        return int(node.arguments[0][1])
    raise UnsupportedNode("attention over parts of rows")


def _codes(node: Node) -> PackedWeight:
    weight = node.weight("weight")
    if not isinstance(weight, PackedWeight):
        raise UnsupportedNode(f"a product with a matrix of {weight.dtype}")
    return _readable(weight)


def _expert_codes(matrices: ExpertMatrices) -> PackedWeight:
    if not isinstance(matrices.weight, PackedWeight) or matrices.bias is not None:
        raise UnsupportedNode("experts that are not packed, or have biases")
    return _readable(matrices.weight)


def _readable(weight: PackedWeight, rows: int = 16, columns: int = 64) -> PackedWeight:
    """Return a matrix that kernels read.

    Raises:
        UnsupportedNode: its codes are of another kind, or it has no multiple of so many rows.
    """
    packing = weight.packing
    if weight.biases is None or weight.tiled or packing.bits != 4:
        raise UnsupportedNode(f"codes of {packing.bits} bits in mode {packing.mode}")
    known = Packed(weight.codes, weight.scales, weight.biases, packing.group_size, packing.bits)
    if (
        weight.codes.shape[-2] % rows
        or weight.codes.shape[-1] * 8 % columns
        or not known.readable_by_kernels
    ):
        shape = f"{weight.codes.shape[-2]} x {weight.codes.shape[-1] * 8}"
        raise UnsupportedNode(f"a matrix of {shape}, in groups of {packing.group_size}")
    return weight


def _gate(gating: Gating) -> str:
    if not gating.plain or gating.activation not in ACTIVATIONS:
        raise UnsupportedNode(f"the gate {gating}")
    return gating.activation


def _ordered(node: Node, last: str) -> tuple[Node, Node, Node]:
    """Return the products of a gate and of a value, and the node that joins them."""
    join = next(each for each in node.arguments if each.kind == last)
    made = {each.outputs[0]: each for each in node.arguments}
    return made[join.inputs[0]], made[join.inputs[1]], join


def _shown(program: Program, node: Node) -> str:
    """Return a node's first line as its program prints it."""
    lines: Iterator[str] = program.lines(node)
    return next(lines)


def record_head(
    recorder: Recorder, weight: PackedWeight, softcap: float | None, hidden: Buffer, logits: Buffer
) -> None:
    """Record the product with a head: logits of `hidden`, in float32."""
    outputs, words = weight.codes.shape
    group_size = weight.packing.group_size
    head = Head(recorder.max_rows, words * 8, outputs, group_size, softcap, recorder.card)
    arguments = [recorder.inputs.rows, hidden.address, *recorder.matrix(weight), logits.address]
    recorder.add(head.text, head.grid, 32 * head.warps, arguments, [hidden], [logits], head.shared)


def served_head(program: Program, card: Any) -> tuple[PackedWeight, float | None] | None:
    """Return the matrix and the soft cap of a head that `record_head` serves; None otherwise."""
    nodes = [node for node in program.nodes if node.kind != "Broadcast"]
    first = nodes[0] if nodes else None
    if first is None or first.kind != "packed_linear" or first.weight("bias") is not None:
        return None
    try:
        weight = _readable(first.weight("weight"), 32, 256)
    except UnsupportedNode:
        return None
    kinds = [node.kind for node in nodes[1:] if node.kind != "AsType"]
    caps = [
        float(program.constants[id].array.item())  # type: ignore[arg-type]  # of one float
        for node in nodes[1:]
        for id in node.inputs
        if id in program.constants and program.constants[id].array.size == 1
    ]
    softcap = None
    if kinds == ["Divide", "Tanh", "Multiply"] and len(caps) >= 1 and len(set(caps)) == 1:
        softcap = caps[0]
    elif kinds:
        return None
    outputs, words = weight.codes.shape
    head = Head(64, words * 8, outputs, weight.packing.group_size, softcap, card)
    return (weight, softcap) if head.fits else None
