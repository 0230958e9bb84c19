"""Records mixtures: routers, and the products of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from quire.device.weights import GatedExperts
from quire.executor.graphs import kernels
from quire.executor.graphs.operands import UnsupportedNode, expert_codes
from quire.executor.graphs.operands import gate as gate_name
from quire.executor.graphs.places import Place, ValueRecording
from quire.executor.graphs.recorder import Buffer
from quire.executor.graphs.routes import EXPERT_TILE, ROUTE_THREADS, Route
from quire.program.values import Node, Program


class MixtureRecording(ValueRecording):
    """Records the nodes of mixtures of experts."""

    def _begin(
        self, program: Program, given: Mapping[str, Place], outputs: Sequence[Buffer]
    ) -> None:
        super()._begin(program, given, outputs)
        self._routed: dict[int, tuple[Buffer, Buffer, int]] = {}
        """By the value of chosen experts: order, tiles, and how many tiles there are."""

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
        max_tiles = min(pairs, experts + pairs // EXPERT_TILE)
        reads = self._read([logits])
        chosen, weights = (self._written(value, reads) for value in route.outputs)
        order, tiles = (recorder.buffer(size, reads) for size in (4 * pairs, 12 * max_tiles))
        writes = [chosen, weights, order, tiles]
        arguments = [recorder.inputs.rows, self._place(logits).address]
        arguments += map(recorder.optional, (correction, per_expert))
        arguments += [each.address for each in writes]
        source = kernel.text(max_tiles)
        recorder.add(source, (1, 1, 1), ROUTE_THREADS, arguments, reads, writes)
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
        if chosen not in self._routed:
            raise UnsupportedNode("experts whose router has no kernel")
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
