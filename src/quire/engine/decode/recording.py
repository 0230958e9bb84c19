"""Records the kernels of a decode step: which, in which order, on which addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.device.cuda.driver import Launch
from quire.device.operations import PackedWeight
from quire.engine.decode import kernels, workspace
from quire.engine.decode.head import Head
from quire.engine.decode.workspace import Buffer, Workspace
from quire.models.stack import Stack, StackAttention, StackExperts, StackLayer, StackMLP

Address = Callable[[mx.array], int]


@dataclass(frozen=True, slots=True)
class LayerPool:
    """Where a layer keeps keys and values.

    Attributes:
        group: whose inputs say where a step's rows are.
        arrays: addresses of its store's arrays.
        codes: how blocks are coded, if they are.
    """

    group: int
    block_tokens: int
    arrays: tuple[int, ...]
    codes: packed.Codes | None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch before its source is compiled; see `driver.Launch`."""

    source: str
    grid: tuple[int, int, int]
    block: int
    shared: int
    arguments: tuple[int, ...]
    after: tuple[int, ...]


@dataclass
class Recording:
    """The kernels of a step of up to `max_rows` rows.

    Args:
        address: of an array on the device.
        workspace: what the kernels write to, and where the step's inputs are.
        out: where the normalised hidden states go.
        logits: where logits go; None leaves the head out.
        batch_invariant: a row's bits do not depend on how many rows there are.
    """

    stack: Stack
    pools: Mapping[int, LayerPool]
    max_rows: int
    address: Address
    workspace: Workspace
    out: int
    logits: int | None = None
    batch_invariant: bool = False
    kernels: list[Kernel] = field(default_factory=list)
    tables: list[mx.array] = field(default_factory=list)
    """Arrays of addresses that kernels read."""

    def record(self) -> list[Kernel]:
        """All of them, in an order in which they may run."""
        stack, at = self.stack, self.workspace.at
        tables = self._matrix(stack.embedding)
        first = self.address(stack.layers[0].input_norm)
        source = kernels.embed(
            stack.hidden_size,
            stack.embedding.packing.group_size,
            float(mx.array(stack.multiplier).astype(mx.bfloat16)),
            stack.eps,
        )
        arguments = (
            at(Buffer.ROWS),
            at(Buffer.TOKENS),
            *tables,
            first,
            at(Buffer.X),
            at(Buffer.NORMED),
        )
        last = self._add(source, (self.max_rows, 1, 1), kernels.ROW_THREADS, arguments, ())
        for number, layer in enumerate(stack.layers):
            following = stack.layers[number + 1] if number + 1 < len(stack.layers) else None
            norm = stack.norm if following is None else following.input_norm
            last = self._layer(layer, last, norm, self.out if following is None else None)
        last = self._seal(last)
        if self.logits is not None:
            self._head(self.logits, last)
        return self.kernels

    def _head(self, logits: int, last: int) -> None:
        assert self.stack.head is not None, "logits are asked of a stack without a head"
        weight, cap = self.stack.head.weight, self.stack.head.softcap
        outputs, words = weight.codes.shape
        head = Head(self.max_rows, words * 8, outputs, weight.packing.group_size, cap)
        arguments = self.workspace.at(Buffer.ROWS), self.out, *self._matrix(weight), logits
        self._add(head.text, head.grid, 32 * head.warps, arguments, (last,), head.shared)

    # -- a layer -------------------------------------------------------------------------------

    def _layer(self, layer: StackLayer, last: int, norm: mx.array, out: int | None) -> int:
        """The last of a layer's kernels; `norm` is what reads its output, `out` where to."""
        at = self.workspace.at
        last = self._attention(layer.attention, last)
        norms = [each.norm for each in (layer.mlp, layer.experts) if each is not None]
        if layer.experts is not None:
            norms.append(layer.experts.router_norm)
        places = [at(Buffer.NORMED), at(Buffer.NORMED_1), at(Buffer.NORMED_2)][: len(norms)]
        mix = self._mix(layer.attention_post_norm, None, None, None, True, len(norms))
        arguments = self._mix_arguments(layer.attention_post_norm, None, None, None, norms, places)
        last = self._add(mix, (self.max_rows, 1, 1), kernels.ROW_THREADS, arguments, (last,))
        ends: list[int] = []
        if layer.mlp is not None:
            ends.append(self._mlp(layer.mlp, last, places[0]))
        if layer.experts is not None:
            normed, routed = places[-2:]
            ends.append(self._experts(layer.experts, last, normed, routed))
        source = self._mix(
            layer.post_norm, layer.mlp, layer.experts, layer.scalar, layer.mlp is not None, 1
        )
        arguments = self._mix_arguments(
            layer.post_norm,
            layer.mlp,
            layer.experts,
            layer.scalar,
            [norm],
            [at(Buffer.NORMED) if out is None else out],
        )
        return self._add(source, (self.max_rows, 1, 1), kernels.ROW_THREADS, arguments, tuple(ends))

    def _attention(self, attention: StackAttention, last: int) -> int:
        at, pool = self.workspace.at, self.pools[attention.layer]
        group = self.workspace.group(pool.group)
        parts = [(attention.q, Buffer.Q), (attention.k, Buffer.K)]
        if attention.v is not None:
            parts.append((attention.v, Buffer.V))
        last = self._linear(at(Buffer.NORMED), [(w, at(buffer)) for w, buffer in parts], last)
        heads, kv_heads, dim = attention.heads, attention.kv_heads, attention.head_dim
        rope = attention.rope
        kernel = kernels.Heads(
            heads,
            kv_heads,
            dim,
            pool.block_tokens,
            rope.frequencies.size,
            rope.neighbours,
            rope.gain,
            attention.q_norm is not None,
            attention.norms_values,
            self.stack.eps,
        )
        arguments: tuple[int, ...] = (
            *(at(Buffer.ROWS), at(Buffer.Q), at(Buffer.K)),
            at(Buffer.K if attention.v is None else Buffer.V),
            *(self._optional(attention.q_norm), self._optional(attention.k_norm)),
            *(self.address(rope.frequencies), at(Buffer.POSITIONS)),
            *(group.blocks if pool.codes is None else group.tails, group.offsets),
            *pool.arrays[-2:],
        )
        warps = kernels.HEAD_THREADS // 32
        grid = self.max_rows, -(-(heads + 2 * kv_heads) // warps), 1
        last = self._add(kernel.text, grid, kernels.HEAD_THREADS, arguments, (last,))
        shape = paged.Shape(
            *(mx.bfloat16, dim, dim, kv_heads, heads // kv_heads),
            *(pool.block_tokens, False, False),
        )
        numbers = self._constant(paged.numbers(attention.scale, None))
        if pool.codes is None:
            last = self._attend(shape, pool, numbers, last)
        else:
            last = self._attend_packed(shape, pool, pool.codes, numbers, last)
        return self._linear(at(Buffer.ATTENDED), [(attention.o, at(Buffer.Y))], last)

    def _attend(self, shape: paged.Shape, pool: LayerPool, numbers: int, last: int) -> int:
        """Over plain blocks."""
        at, group = self.workspace.at, self.workspace.group(pool.group)
        splits = workspace.splits(shape, self.max_rows, batch_invariant=self.batch_invariant)
        found = at(Buffer.PARTIAL), at(Buffer.STATS)
        arguments = (
            *(at(Buffer.Q), *pool.arrays, group.tiles, self.workspace.table, numbers, *found),
            at(Buffer.ATTENDED),
        )
        grid = self.max_rows, shape.kv_heads * (shape.group // shape.part), splits
        shared = paged.single_memory(shape)
        last = self._add(kernels.attend(shape), grid, paged.LANES, arguments, (last,), shared)
        arguments = at(Buffer.ROWS), *found, group.tiles, at(Buffer.ATTENDED)
        source, grid = kernels.combine(shape, splits), (self.max_rows * shape.heads, 1, 1)
        return self._add(source, grid, paged.LANES, arguments, (last,))

    def _attend_packed(
        self, shape: paged.Shape, pool: LayerPool, codes: packed.Codes, numbers: int, last: int
    ) -> int:
        """Over coded blocks, and each row's own as written."""
        at, group = self.workspace.at, self.workspace.group(pool.group)
        splits = workspace.splits(shape, self.max_rows, batch_invariant=self.batch_invariant)
        places = Buffer.PARTIAL, Buffer.STATS, Buffer.OWN_PARTIAL, Buffer.OWN_STATS
        found = tuple(map(at, places))
        arguments: tuple[int, ...] = (
            *(
                at(Buffer.Q),
                *pool.arrays,
                group.coded,
                group.own,
                self.workspace.table,
                group.tails,
            ),
            *(group.visible, numbers, *found),
        )
        grid = self.max_rows, shape.kv_heads * (shape.group // shape.part), splits + 1
        shared = packed.shared_memory(shape, codes)
        source = kernels.attend_packed(shape, codes)
        last = self._add(source, grid, paged.LANES, arguments, (last,), shared)
        signs = self._constant(packed.signs(shape.value_dim))
        arguments = at(Buffer.ROWS), *found, signs, at(Buffer.ATTENDED)
        source, grid = kernels.join(shape, splits), (self.max_rows * shape.heads, 1, 1)
        return self._add(source, grid, paged.LANES, arguments, (last,))

    def _seal(self, last: int) -> int:
        """Codes the blocks that the step's rows have filled, in all layers."""
        alike: dict[tuple[int, int, int, packed.Codes], list[int]] = {}
        for layer in self.stack.layers:
            own, pool = layer.attention, self.pools[layer.attention.layer]
            if pool.codes is not None:
                key = pool.group, own.kv_heads, own.head_dim, pool.codes
                alike.setdefault(key, []).extend(pool.arrays)
        for (number, kv_heads, dim, codes), arrays in alike.items():
            self.tables.append(mx.array(np.array(arrays, np.int64)))
            group = self.workspace.group(number)
            arguments = (
                *(self.workspace.at(Buffer.ROWS), group.blocks, group.offsets, group.tails),
                *(self._constant(packed.signs(dim)), self._constant(self.tables[-1])),
            )
            source, grid = kernels.seal(kv_heads, dim, codes), (kv_heads, len(arrays) // 8, 1)
            last = self._add(source, grid, kernels.SEAL_THREADS, arguments, (last,))
        return last

    def _mlp(self, mlp: StackMLP, last: int, x: int) -> int:
        outputs, tiling = (
            mlp.gate.codes.shape[0],
            kernels.Tiling(self.max_rows, self.batch_invariant),
        )
        inputs, group_size = mlp.gate.codes.shape[1] * 8, mlp.gate.packing.group_size
        source = kernels.gated(inputs, outputs, group_size, mlp.activation, tiling)
        inner = self.workspace.at(Buffer.INNER)
        matrices = *self._matrix(mlp.gate), *self._matrix(mlp.up)
        arguments = self.workspace.at(Buffer.ROWS), x, *matrices, inner
        grid = outputs // 16, tiling.blocks, 1
        last = self._add(source, grid, 32 * tiling.warps, arguments, (last,))
        return self._linear(inner, [(mlp.down, self.workspace.at(Buffer.Y))], last)

    def _experts(self, experts: StackExperts, last: int, x: int, routed: int) -> int:
        at = self.workspace.at
        last = self._linear(routed, [(experts.router, at(Buffer.LOGITS))], last)
        count, outputs, words = experts.gate.codes.shape
        hidden, pairs = self.stack.hidden_size, self.max_rows * experts.k
        max_tiles = min(pairs, count + pairs // 8)
        source = kernels.route(
            count,
            experts.k,
            experts.normalise,
            experts.scale,
            experts.per_expert is not None,
            max_tiles,
        )
        order = at(Buffer.ORDER), at(Buffer.TILES)
        arguments: tuple[int, ...] = (
            *(at(Buffer.ROWS), at(Buffer.LOGITS), self._optional(experts.per_expert)),
            *(at(Buffer.CHOSEN), at(Buffer.WEIGHTS), *order),
        )
        last = self._add(source, (1, 1, 1), kernels.ROUTE_THREADS, arguments, (last,))
        size = experts.gate.packing.group_size
        source = kernels.experts_gated(
            count, words * 8, outputs, size, experts.activation, experts.k
        )
        matrices = *self._matrix(experts.gate), *self._matrix(experts.up)
        arguments = x, *matrices, *order, at(Buffer.EXPERT_INNER)
        grid = outputs // 16, max_tiles, 1
        last = self._add(source, grid, kernels.EXPERT_THREADS, arguments, (last,))
        size = experts.down.packing.group_size
        source = kernels.experts_down(count, outputs, hidden, size)
        arguments = (
            at(Buffer.EXPERT_INNER),
            *self._matrix(experts.down),
            *order,
            at(Buffer.EXPERT_Y),
        )
        grid = hidden // 16, max_tiles, 1
        threads = 32 * kernels.down_warps(outputs)
        return self._add(source, grid, threads, arguments, (last,))

    # -- kernels -------------------------------------------------------------------------------

    def _add(
        self,
        source: str,
        grid: tuple[int, int, int],
        block: int,
        arguments: tuple[int, ...],
        after: tuple[int, ...],
        shared: int = 0,
    ) -> int:
        """The number of a new kernel."""
        self.kernels.append(Kernel(source, grid, block, shared, arguments, after))
        return len(self.kernels) - 1

    def _linear(self, x: int, parts: Sequence[tuple[PackedWeight, int]], last: int) -> int:
        """Matrices by which the same rows are multiplied, each into a buffer of its own."""
        weights = [weight for weight, _ in parts]
        outputs = tuple(weight.codes.shape[0] for weight in weights)
        tiling = kernels.Tiling(self.max_rows, self.batch_invariant)
        inputs, group_size = weights[0].codes.shape[1] * 8, weights[0].packing.group_size
        source = kernels.linear(inputs, outputs, group_size, tiling)
        arguments = [self.workspace.at(Buffer.ROWS), x]
        for weight, buffer in parts:
            arguments += [*self._matrix(weight), buffer]
        grid = sum(outputs) // 16, tiling.blocks, 1
        return self._add(source, grid, 32 * tiling.warps, tuple(arguments), (last,))

    def _mix(
        self,
        post: mx.array | None,
        mlp: StackMLP | None,
        experts: StackExperts | None,
        scalar: mx.array | None,
        dense: bool,
        outs: int,
    ) -> str:
        return kernels.Mix(
            self.stack.hidden_size,
            self.stack.eps,
            dense,
            mlp is not None and mlp.post_norm is not None,
            0 if experts is None else experts.k,
            experts is not None and experts.post_norm is not None,
            post is not None,
            scalar is not None,
            outs,
        ).text

    def _mix_arguments(
        self,
        post: mx.array | None,
        mlp: StackMLP | None,
        experts: StackExperts | None,
        scalar: mx.array | None,
        norms: Sequence[mx.array],
        outs: Sequence[int],
    ) -> tuple[int, ...]:
        at = self.workspace.at
        missing = [0] * (3 - len(norms))
        return (
            *(at(Buffer.ROWS), at(Buffer.X), at(Buffer.Y)),
            self._optional(None if mlp is None else mlp.post_norm),
            *(at(Buffer.EXPERT_Y), at(Buffer.WEIGHTS)),
            self._optional(None if experts is None else experts.post_norm),
            *(self._optional(post), self._optional(scalar)),
            *(*map(self.address, norms), *missing, *outs, *missing),
        )

    def _matrix(self, weight: PackedWeight) -> tuple[int, int, int]:
        assert weight.biases is not None, "affine codes have biases"
        return self.address(weight.codes), self.address(weight.scales), self.address(weight.biases)

    def _constant(self, array: mx.array) -> int:
        mx.eval(array)
        return self.address(array)

    def _optional(self, array: mx.array | None) -> int:
        return 0 if array is None else self.address(array)


def launches(recorded: Sequence[Kernel], functions: Sequence[int]) -> list[Launch]:
    """The kernels with their compiled functions."""
    return [
        Launch(function, each.grid, each.block, each.shared, each.arguments, each.after)
        for each, function in zip(recorded, functions, strict=True)
    ]
