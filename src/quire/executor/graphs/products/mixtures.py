"""Records mixtures of experts: routers, and the products of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.device.cuda.row_layout import RowLayout
from quire.device.cuda.skinny_gemm import SkinnyGemm
from quire.device.weights import GatedExperts, PlainExperts
from quire.executor.graphs.operands import ProductMatrix, UnsupportedNode, is_plain
from quire.executor.graphs.places import NodeKinds
from quire.executor.graphs.products import product_kernels
from quire.executor.graphs.products.routes import ROUTE_THREADS, SCORING_THREADS, Route, grouping
from quire.executor.graphs.recorder import EXPERT_TILE, Buffer
from quire.executor.graphs.rows.arithmetic import activated, gated
from quire.executor.graphs.rows.row_layouts import (
    LayoutRecording,
    layout_for,
    tile_of_experts,
    with_layout,
)
from quire.executor.graphs.source import NotGenerated
from quire.program.values import Node, Program

_ROUTED_TOGETHER, _SCORED_TOGETHER = 64, 1 << 12
"""Most rows that one thread block routes and groups, and most scores of experts by which it does:
on H100s 64 rows by 256 experts took 14 us, and 6 us by a kernel for each; 32 rows 3 us more by one.
"""


@dataclass(frozen=True, slots=True)
class Routed:
    """Buffers into which a router's kernel writes pairs of row and expert, grouped by expert.

    Attributes:
        order: the pairs.
        tiles: for each tile its expert, first pair and number of pairs; behind these, for each one
            the thread blocks that have stored their first products.
        pairs: the most pairs.
        max_tiles: the most tiles.
        tile: the most pairs of a tile.
    """

    order: Buffer
    tiles: Buffer
    pairs: int
    max_tiles: int
    tile: int


class MixtureRecording(LayoutRecording):
    """Records the nodes of mixtures of experts."""

    @property
    def kinds(self) -> NodeKinds:
        return {**super().kinds, "route": self._route, "expert_outputs": self._experts}

    def _begin(self, program: Program) -> None:
        super()._begin(program)
        self._routed: dict[int, Routed] = {}
        """By the value of chosen experts."""

    def _route(self, node: Node) -> None:
        route, recorder = node.arguments[-1], self._recorder
        cast = node.arguments[0] if len(node.arguments) > 1 else route
        logits, dtype = node.inputs[0], self._program.values[cast.inputs[0]].dtype
        if route.roles != ("logits",) or dtype not in (mx.bfloat16, mx.float32):
            raise UnsupportedNode("a router whose logits are no product")
        correction, per_expert = (route.weight(name) for name in ("correction", "per_expert"))
        experts = self._width(logits, 1)
        kernel = Route.of(
            route.attributes["router"], experts, correction, per_expert=per_expert, logits=dtype
        )
        reads = self._read([logits])
        chosen, weights = (self._written(value, reads) for value in route.outputs)
        tile = self._tile(route.outputs[0])
        grouped = self._groups(route.outputs[0], experts, reads, tile=tile)
        rows, routed = recorder.rows, [chosen, weights]
        arguments = [rows, self._place(logits).address]
        arguments += map(recorder.optional, (correction, per_expert))
        arguments += [chosen.address, weights.address]
        scores = recorder.max_rows * experts
        if recorder.max_rows <= _ROUTED_TOGETHER and scores <= _SCORED_TOGETHER:
            alone = recorder.max_rows == 1
            recorder.add(
                kernel.alone() if alone else kernel.text(grouped.max_tiles, grouped.tile),
                (1, 1, 1),
                32 if alone else ROUTE_THREADS,
                arguments=[*arguments, grouped.order.address, grouped.tiles.address],
                reads=reads,
                writes=[*routed, grouped.order, grouped.tiles],
            )
        else:
            grid = -(-32 * recorder.max_rows // SCORING_THREADS), 1, 1
            recorder.add(
                kernel.scoring(),
                grid,
                SCORING_THREADS,
                arguments=arguments,
                reads=reads,
                writes=routed,
            )
            self._group(chosen, grouped, experts)

    def _tile(self, chosen: int) -> int:
        """Return the most pairs in a tile of the products of those experts."""
        parts = (part for node in self._uses.readers(chosen) for part in node.parts)
        node = next((each for each in parts if each.kind == "expert_outputs"), None)
        if node is None:
            return EXPERT_TILE
        try:
            return tile_of_experts(self._recorder, self._program, node)
        except UnsupportedNode:  # MLX multiplies by their matrices
            return EXPERT_TILE

    def _groups(
        self,
        chosen: int,
        experts: int,
        reads: Sequence[Buffer],
        *,
        tile: int,
        repeated: bool = False,
    ) -> Routed:
        """Return room for a value's pairs of row and expert, of which kernels know.

        Args:
            tile: the most pairs of a tile.
            repeated: whether a row may name an expert several times.
        """
        recorder = self._recorder
        pairs = recorder.max_rows * self._width(chosen, 1)
        most = min(tile, recorder.max_rows) if repeated else tile
        max_tiles = min(pairs, experts + pairs // most)
        order, tiles = (recorder.buffer(size, reads) for size in (4 * pairs, 16 * max_tiles))
        routed = Routed(order, tiles, pairs, max_tiles=max_tiles, tile=tile)
        self._routed[chosen] = routed
        return routed

    def _group(self, chosen: Buffer, routed: Routed, experts: int) -> None:
        """Record the kernel that groups chosen experts."""
        recorder = self._recorder
        most = min(routed.tile, recorder.max_rows)  # products read no more pairs of a tile
        source = grouping(experts, routed.pairs // recorder.max_rows, routed.max_tiles, tile=most)
        recorder.add(
            source,
            (1, 1, 1),
            ROUTE_THREADS,
            arguments=[recorder.rows, chosen.address, routed.order.address, routed.tiles.address],
            reads=[chosen],
            writes=[routed.order, routed.tiles],
        )

    def _experts(self, node: Node) -> None:
        recorder, chosen = self._recorder, self._uses.source(node.inputs[1])
        experts: GatedExperts | PlainExperts = node.weight("experts")
        if chosen not in self._routed:  # they were changed since a router chose them
            place = self._place(chosen).buffer
            if place is None:
                raise UnsupportedNode("experts that no kernel chooses")
            count = ProductMatrix.of(experts.down.weight).experts
            tile = tile_of_experts(recorder, self._program, node)
            groups = self._groups(chosen, count, [place], tile=tile, repeated=True)
            self._group(place, groups, count)
        routed = self._routed[chosen]
        order, tiles = routed.order, routed.tiles
        down = ProductMatrix.of(experts.down.weight)
        cut = recorder.gemm(down, down.outputs, tiles=routed.max_tiles, tile=routed.tile)
        layout = layout_for(cut)
        gemm = self._fitting(with_layout(cut, layout))
        counts = isinstance(gemm, SkinnyGemm) and recorder.max_rows > 1
        inner, counted = self._first(node, experts, layout, counts=counts)
        reads = [inner, order, tiles]
        y = self._written(node.outputs[0], reads)
        offsets = [] if experts.down.bias is None else [recorder.weight(experts.down.bias)]
        x = inner.address + _bytes_before_digits(routed, down.inputs, layout)
        arguments = [x, *recorder.matrix(down), *offsets]
        arguments += [order.address, tiles.address, y.address]
        grid = gemm.grid(-(-down.outputs // gemm.width), routed.max_tiles)
        source = product_kernels.experts_down(
            gemm,
            down.experts,
            offsets=bool(offsets),
            tiles=routed.max_tiles,
            counted=counted,
        )
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=reads, writes=[y])
        for each in reads:
            recorder.release(each)

    def _first(
        self,
        node: Node,
        experts: GatedExperts | PlainExperts,
        layout: RowLayout | None,
        *,
        counts: bool,
    ) -> tuple[Buffer, int]:
        """Record the experts' computation up to their last matrices.

        Args:
            layout: of the result's rows, where that is not plain; digits stand behind plain rows.
            counts: whether the last products can await each tile by itself.

        Returns:
            The result, and the thread blocks that are counted for each tile.
        """
        recorder, (x, chosen) = self._recorder, node.inputs
        gated = isinstance(experts, GatedExperts)
        matrices = [experts.gate, experts.up] if isinstance(experts, GatedExperts) else [experts.up]
        weights = [ProductMatrix.of(each.weight) for each in matrices]
        if len({each.packing for each in weights}) > 1:
            raise UnsupportedNode("experts whose gates are packed otherwise than their values")
        biases = [each.bias for each in matrices]
        routed = self._routed[self._uses.source(chosen)]
        order, tiles = routed.order, routed.tiles
        width, top = weights[0].outputs, self._width(chosen, 1)
        cut = recorder.gemm(
            weights[0], width, gated=gated, tiles=routed.max_tiles, tile=routed.tile
        )
        gemm = self._fitting(cut, x)
        counts &= isinstance(gemm, SkinnyGemm)
        reads = [*self._read([x]), order, tiles]
        before = _bytes_before_digits(routed, width, layout)
        size = routed.pairs * width // 64 * (128 if layout is None else layout.bytes)
        inner = recorder.buffer(before + size, reads)
        offsets = [recorder.weight(each) for each in biases if each is not None]
        arguments = self._multiplied(x, gemm)
        arguments += [part for each in weights for part in recorder.matrix(each)]
        arguments += [*offsets, order.address, tiles.address, inner.address]
        arguments += [inner.address + before] * bool(before)
        joined, activation = _joined(experts)
        source = product_kernels.experts_first(
            gemm,
            weights[0].experts,
            top,
            joined=joined,
            activation=activation,
            offsets=bool(offsets),
            layout=layout,
            tiles=routed.max_tiles,
            eps=self._eps(x),
            counts=counts,
        )
        grid = gemm.grid(-(-width // gemm.width), routed.max_tiles)
        recorder.add_product(gemm, source, grid, arguments=arguments, reads=reads, writes=[inner])
        return inner, grid[0] if counts else 0


def _bytes_before_digits(routed: Routed, width: int, layout: RowLayout | None) -> int:
    """Return the bytes of the pairs' plain rows, which their digits follow; 0 in other layouts."""
    return 2 * routed.pairs * width if layout is RowLayout.DIGITS else 0


def _joined(experts: GatedExperts | PlainExperts) -> tuple[str | None, str]:
    """Return the C expression that joins products `x` and `y`, and the activation.

    The expression is None if the product's kernel applies the activation by itself.
    """
    try:
        if isinstance(experts, PlainExperts):
            return activated(experts.activation, "x", mx.bfloat16), experts.activation
        gating = experts.gating
        joined = None if is_plain(gating) else gated(gating, "x", "y", dtype=mx.bfloat16)
    except NotGenerated as error:
        raise UnsupportedNode(str(error)) from error
    return joined, gating.activation
