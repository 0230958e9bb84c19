"""Records the kernels of a decode step: which, in which order, on which addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from quire.attention.paged import packed
from quire.device.gpu_kernels import in_device_memory
from quire.engine.decode import kernels
from quire.engine.decode.head import Head
from quire.engine.decode.pools import LayerPool, TailCoding
from quire.engine.decode.recorder import Recorder
from quire.engine.decode.workspace import Buffer
from quire.models.stack import Stack, StackAttention, StackExperts, StackLayer, StackMLP


@dataclass(frozen=True, slots=True)
class Recording:
    """The kernels of a step, added to those of a recorder.

    Args:
        pools: by layer.
        out: where the normalised hidden states go.
        logits: where logits go; None leaves the head out.
    """

    stack: Stack
    pools: Mapping[int, LayerPool]
    recorder: Recorder
    out: int
    logits: int | None = None

    def record(self) -> None:
        """Adds all of them, in an order in which they may run."""
        stack, recorder, at = self.stack, self.recorder, self.recorder.workspace.at
        tables = recorder.matrix(stack.embedding)
        first = recorder.address(stack.layers[0].input_norm)
        source = kernels.embed(
            stack.hidden_size,
            stack.embedding.packing.group_size,
            float(mx.array(stack.multiplier).astype(mx.bfloat16)),
            stack.eps,
        )
        arguments = [at(Buffer.ROWS), at(Buffer.TOKENS), *tables, first]
        arguments += [at(Buffer.X), at(Buffer.NORMED)]
        grid = recorder.max_rows, 1, 1
        last = recorder.add(source, grid, kernels.ROW_THREADS, arguments, ())
        for number, layer in enumerate(stack.layers):
            following = stack.layers[number + 1] if number + 1 < len(stack.layers) else None
            norm = stack.norm if following is None else following.input_norm
            last = self._layer(layer, last, norm, self.out if following is None else None)
        last = self._code_tails(last)
        if self.logits is not None:
            self._head(self.logits, last)

    def _head(self, logits: int, last: int) -> None:
        assert self.stack.head is not None, "logits are asked of a stack without a head"
        weight, cap, recorder = self.stack.head.weight, self.stack.head.softcap, self.recorder
        outputs, words = weight.codes.shape
        group_size = weight.packing.group_size
        head = Head(recorder.max_rows, words * 8, outputs, group_size, cap, recorder.card)
        arguments = [recorder.workspace.at(Buffer.ROWS), self.out]
        arguments += [*recorder.matrix(weight), logits]
        recorder.add(head.text, head.grid, 32 * head.warps, arguments, (last,), head.shared)

    # -- a layer -------------------------------------------------------------------------------

    def _layer(self, layer: StackLayer, last: int, norm: mx.array, out: int | None) -> int:
        """The last of a layer's kernels; `norm` is what reads its output, `out` where to."""
        at = self.recorder.workspace.at
        last = self._attention(layer.attention, last)
        norms = [each.norm for each in (layer.mlp, layer.experts) if each is not None]
        if layer.experts is not None:
            norms.append(layer.experts.router_norm)
        places = [at(Buffer.NORMED), at(Buffer.NORMED_1), at(Buffer.NORMED_2)][: len(norms)]
        added = _Added(post=layer.attention_post_norm)
        last = self._mix(added, list(zip(norms, places, strict=True)), (last,))
        ends: list[int] = []
        if layer.mlp is not None:
            ends.append(self._mlp(layer.mlp, last, places[0]))
        if layer.experts is not None:
            normed, routed = places[-2:]
            ends.append(self._experts(layer.experts, last, normed, routed))
        added = _Added(
            dense=layer.mlp is not None,
            dense_norm=None if layer.mlp is None else layer.mlp.post_norm,
            experts=layer.experts,
            post=layer.post_norm,
            scalar=layer.scalar,
        )
        return self._mix(added, [(norm, at(Buffer.NORMED) if out is None else out)], tuple(ends))

    def _attention(self, attention: StackAttention, last: int) -> int:
        recorder, at = self.recorder, self.recorder.workspace.at
        parts = [(attention.q, Buffer.Q), (attention.k, Buffer.K)]
        if attention.v is not None:
            parts.append((attention.v, Buffer.V))
        products = [(weight, at(buffer)) for weight, buffer in parts]
        last = recorder.linear(at(Buffer.NORMED), products, last)
        last = self.pools[attention.layer].record(recorder, attention, self.stack.eps, last)
        return recorder.linear(at(Buffer.ATTENDED), [(attention.o, at(Buffer.Y))], last)

    def _code_tails(self, last: int) -> int:
        """Codes the blocks that the step's rows have filled, in all layers."""
        alike: dict[TailCoding, list[tuple[int, ...]]] = {}
        for layer in self.stack.layers:
            pool = self.pools[layer.attention.layer]
            coding = pool.tail_coding(layer.attention)
            if coding is not None:
                alike.setdefault(coding, []).append(pool.arrays)
        recorder = self.recorder
        for coding, stores in alike.items():
            group = recorder.workspace.group(coding.group)
            arguments = [recorder.workspace.at(Buffer.ROWS)]
            arguments += [group.blocks, group.offsets, group.tails]
            arguments += [recorder.copied(packed.signs(coding.dim))]
            addresses = mx.array(np.array(stores, np.int64))
            arguments += [recorder.constant(in_device_memory(addresses))]
            source = kernels.code_tails(coding.kv_heads, coding.dim, coding.codes)
            grid = coding.kv_heads, len(stores), 1
            last = recorder.add(source, grid, kernels.TAIL_THREADS, arguments, (last,))
        return last

    def _mlp(self, mlp: StackMLP, last: int, x: int) -> int:
        recorder, at = self.recorder, self.recorder.workspace.at
        gemm = recorder.gemm(mlp.gate, mlp.gate.codes.shape[0], gated=True)
        arguments = [at(Buffer.ROWS), x, *recorder.matrix(mlp.gate), *recorder.matrix(mlp.up)]
        arguments += [at(Buffer.INNER)]
        source, grid = (
            kernels.gated(gemm, mlp.activation),
            (-(-gemm.outputs // gemm.width), gemm.blocks, 1),
        )
        last = recorder.add(source, grid, gemm.threads, arguments, (last,), gemm.shared)
        return recorder.linear(at(Buffer.INNER), [(mlp.down, at(Buffer.Y))], last)

    def _experts(self, experts: StackExperts, last: int, x: int, routed: int) -> int:
        recorder, at = self.recorder, self.recorder.workspace.at
        last = recorder.linear(routed, [(experts.router, at(Buffer.LOGITS))], last)
        count, outputs, _ = experts.gate.codes.shape
        hidden, pairs = self.stack.hidden_size, recorder.max_rows * experts.k
        max_tiles = min(pairs, count + pairs // 8)
        source = kernels.route(
            count,
            experts.k,
            experts.normalise,
            experts.scale,
            experts.per_expert is not None,
            max_tiles,
        )
        order = [at(Buffer.ORDER), at(Buffer.TILES)]
        arguments = [at(Buffer.ROWS), at(Buffer.LOGITS), recorder.optional(experts.per_expert)]
        arguments += [at(Buffer.CHOSEN), at(Buffer.WEIGHTS), *order]
        last = recorder.add(source, (1, 1, 1), kernels.ROUTE_THREADS, arguments, (last,))
        gemm = recorder.gemm(experts.gate, outputs, gated=True, experts=True)
        source = kernels.experts_gated(gemm, count, experts.activation, experts.k)
        arguments = [x, *recorder.matrix(experts.gate), *recorder.matrix(experts.up)]
        arguments += [*order, at(Buffer.EXPERT_INNER)]
        grid = -(-outputs // gemm.width), max_tiles, 1
        last = recorder.add(source, grid, gemm.threads, arguments, (last,), gemm.shared)
        gemm = recorder.gemm(experts.down, hidden, experts=True)
        arguments = [at(Buffer.EXPERT_INNER), *recorder.matrix(experts.down)]
        arguments += [*order, at(Buffer.EXPERT_Y)]
        grid, source = (-(-hidden // gemm.width), max_tiles, 1), kernels.experts_down(gemm, count)
        return recorder.add(source, grid, gemm.threads, arguments, (last,), gemm.shared)

    def _mix(
        self, added: _Added, outs: Sequence[tuple[mx.array, int]], after: tuple[int, ...]
    ) -> int:
        """Adds to the residual stream, and normalises it for what follows.

        Args:
            outs: weight of a norm, and where the rows normalised by it go; up to three.
        """
        recorder, at = self.recorder, self.recorder.workspace.at
        experts = added.experts
        expert_norm = None if experts is None else experts.post_norm
        kernel = kernels.Mix(
            self.stack.hidden_size,
            self.stack.eps,
            added.dense,
            added.dense_norm is not None,
            0 if experts is None else experts.k,
            expert_norm is not None,
            added.post is not None,
            added.scalar is not None,
            len(outs),
        )
        missing = [0] * (3 - len(outs))
        arguments = [at(Buffer.ROWS), at(Buffer.X), at(Buffer.Y)]
        arguments += [recorder.optional(added.dense_norm)]
        arguments += [at(Buffer.EXPERT_Y), at(Buffer.WEIGHTS), recorder.optional(expert_norm)]
        scalar = 0 if added.scalar is None else recorder.copied(added.scalar)
        arguments += [recorder.optional(added.post), scalar]
        arguments += [*(recorder.address(norm) for norm, _ in outs), *missing]
        arguments += [*(place for _, place in outs), *missing]
        grid = recorder.max_rows, 1, 1
        return recorder.add(kernel.text, grid, kernels.ROW_THREADS, arguments, after)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Added:
    """What is added to the residual stream.

    Attributes:
        dense: whether `Buffer.Y` is.
        dense_norm: weight of its norm.
        experts: whose outputs are, weighed.
        post: weight of the norm of all that.
        scalar: multiplies the stream then.
    """

    dense: bool = True
    dense_norm: mx.array | None = None
    experts: StackExperts | None = None
    post: mx.array | None
    scalar: mx.array | None = None
