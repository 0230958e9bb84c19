"""Records mixtures: routers, and the products of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from quire.device.cuda.wide_gemm import ROWS
from quire.device.weights import GatedExperts
from quire.executor.graphs import kernels
from quire.executor.graphs.operands import UnsupportedNode, expert_matrix
from quire.executor.graphs.operands import gate as gate_name
from quire.executor.graphs.places import Place, ValueRecording
from quire.executor.graphs.recorder import Buffer
from quire.executor.graphs.routes import EXPERT_TILE, ROUTE_THREADS, Route
from quire.program.values import Node, Program


@dataclass(frozen=True, slots=True)
class Routed:
    """Where a router's kernel puts pairs of row and expert, grouped by expert.

    Attributes:
        order: pairs.
        tiles: of each tile its expert, first pair and number of pairs.
        max_tiles: the most tiles.
        many: whether a tile holds up to `ROWS` pairs, else up to `EXPERT_TILE`.
    """

    order: Buffer
    tiles: Buffer
    max_tiles: int
    many: bool

    @property
    def wide_tiles(self) -> int:
        """Tiles for `Recorder.gemm`: 0 where they are small."""
        return self.max_tiles if self.many else 0


class MixtureRecording(ValueRecording):
    """Records the nodes of mixtures of experts."""

    def _begin(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> None:
        super()._begin(program, given, outputs)
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
        kernel = Route.of(route.attributes["router"], experts, correction, per_expert, dtype)
        pairs = recorder.max_rows * kernel.k
        many = pairs > EXPERT_TILE * experts and not recorder.batch_invariant
        tile = ROWS if many else EXPERT_TILE
        max_tiles = min(pairs, experts + pairs // tile)
        reads = self._read([logits])
        chosen, weights = (self._written(value, reads) for value in route.outputs)
        order, tiles = (recorder.buffer(size, reads) for size in (4 * pairs, 12 * max_tiles))
        writes = [chosen, weights, order, tiles]
        arguments = [recorder.inputs.rows, self._place(logits).address]
        arguments += map(recorder.optional, (correction, per_expert))
        arguments += [each.address for each in writes]
        source = kernel.text(max_tiles, tile)
        recorder.add(source, (1, 1, 1), ROUTE_THREADS, arguments, reads, writes)
        self._routed[route.outputs[0]] = Routed(order, tiles, max_tiles, many)

    def _experts(self, node: Node) -> None:
        recorder, experts = self._recorder, node.weight("experts")
        if not isinstance(experts, GatedExperts):
            raise UnsupportedNode("experts without gates")
        gate, up, down = map(expert_matrix, (experts.gate, experts.up, experts.down))
        if (gate.bits, gate.group_size) != (up.bits, up.group_size):
            raise UnsupportedNode("experts whose gates are packed otherwise than their values")
        activation = gate_name(experts.gating)
        x, chosen = node.inputs
        if chosen not in self._routed:
            raise UnsupportedNode("experts whose router has no kernel")
        routed = self._routed[chosen]
        order, tiles, max_tiles = routed.order, routed.tiles, routed.max_tiles
        count, width, hidden, top = gate.experts, gate.outputs, down.outputs, self._width(chosen, 1)
        pairs = recorder.max_rows * top
        places = [each.address for each in (order, tiles)]
        gemm = self._fitting(recorder.gemm(gate, width, gated=True, tiles=routed.wide_tiles))
        reads = [*self._read([x]), order, tiles]
        inner = recorder.buffer(2 * pairs * width, reads)
        arguments = [self._place(x).address, *recorder.matrix(gate), *recorder.matrix(up)]
        arguments += [*places, inner.address]
        grid = -(-width // gemm.width), max_tiles, 1
        source = kernels.experts_gated(gemm, count, activation, top)
        recorder.add(source, grid, gemm.threads, arguments, reads, [inner], gemm.shared)
        gemm = self._fitting(recorder.gemm(down, hidden, tiles=routed.wide_tiles))
        reads = [inner, order, tiles]
        y = self._written(node.outputs[0], reads)
        arguments = [inner.address, *recorder.matrix(down), *places, y.address]
        grid, source = (-(-hidden // gemm.width), max_tiles, 1), kernels.experts_down(gemm, count)
        recorder.add(source, grid, gemm.threads, arguments, reads, [y], gemm.shared)
        for each in reads:
            recorder.release(each)
