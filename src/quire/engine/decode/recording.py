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
from quire.engine.decode import kernels, room
from quire.engine.decode.head import Head
from quire.engine.decode.room import Place, Room
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
    """The kernels of a step of up to `most` rows.

    Args:
        address: of an array on the device.
        room: what the kernels write to, and where the step's inputs are.
        out: where the normalised hidden states go.
        logits: where logits go; None leaves the head out.
        even: a row's bits do not depend on how many rows there are.
    """

    stack: Stack
    pools: Mapping[int, LayerPool]
    most: int
    address: Address
    room: Room
    out: int
    logits: int | None = None
    even: bool = False
    kernels: list[Kernel] = field(default_factory=list)
    tables: list[mx.array] = field(default_factory=list)
    """Arrays of addresses that kernels read."""

    def record(self) -> list[Kernel]:
        """All of them, in an order in which they may run."""
        stack, at = self.stack, self.room.at
        tables = self._matrix(stack.embedding)
        first = self.address(stack.layers[0].input_norm)
        source = kernels.embed(
            stack.hidden_size,
            stack.embedding.packing.group_size,
            float(mx.array(stack.multiplier).astype(mx.bfloat16)),
            stack.eps,
        )
        arguments = at(Place.ROWS), at(Place.TOKENS), *tables, first, at(Place.X), at(Place.NORMED)
        last = self._add(source, (self.most, 1, 1), kernels.ROW_THREADS, arguments, ())
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
        head = Head(self.most, words * 8, outputs, weight.packing.group_size, cap)
        arguments = self.room.at(Place.ROWS), self.out, *self._matrix(weight), logits
        self._add(head.text, head.grid, 32 * head.warps, arguments, (last,), head.shared)

    # -- a layer -------------------------------------------------------------------------------

    def _layer(self, layer: StackLayer, last: int, norm: mx.array, out: int | None) -> int:
        """The last of a layer's kernels; `norm` is what reads its output, `out` where to."""
        at = self.room.at
        last = self._attention(layer.attention, last)
        norms = [each.norm for each in (layer.mlp, layer.experts) if each is not None]
        if layer.experts is not None:
            norms.append(layer.experts.router_norm)
        places = [at(Place.NORMED), at(Place.NORMED_1), at(Place.NORMED_2)][: len(norms)]
        mix = self._mix(layer.attention_post_norm, None, None, None, True, len(norms))
        arguments = self._mix_arguments(layer.attention_post_norm, None, None, None, norms, places)
        last = self._add(mix, (self.most, 1, 1), kernels.ROW_THREADS, arguments, (last,))
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
            [at(Place.NORMED) if out is None else out],
        )
        return self._add(source, (self.most, 1, 1), kernels.ROW_THREADS, arguments, tuple(ends))

    def _attention(self, attention: StackAttention, last: int) -> int:
        at, pool = self.room.at, self.pools[attention.layer]
        group = self.room.group(pool.group)
        parts = [(attention.q, Place.Q), (attention.k, Place.K)]
        if attention.v is not None:
            parts.append((attention.v, Place.V))
        last = self._linear(at(Place.NORMED), [(w, at(place)) for w, place in parts], last)
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
            *(at(Place.ROWS), at(Place.Q), at(Place.K)),
            at(Place.K if attention.v is None else Place.V),
            *(self._optional(attention.q_norm), self._optional(attention.k_norm)),
            *(self.address(rope.frequencies), at(Place.POSITIONS)),
            *(group.blocks if pool.codes is None else group.tails, group.offsets),
            *pool.arrays[-2:],
        )
        warps = kernels.HEAD_THREADS // 32
        grid = self.most, -(-(heads + 2 * kv_heads) // warps), 1
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
        return self._linear(at(Place.ATTENDED), [(attention.o, at(Place.Y))], last)

    def _attend(self, shape: paged.Shape, pool: LayerPool, numbers: int, last: int) -> int:
        """Over plain blocks."""
        at, group = self.room.at, self.room.group(pool.group)
        splits = room.splits(shape, self.most, even=self.even)
        found = at(Place.PARTIAL), at(Place.STATS)
        arguments = (
            *(at(Place.Q), *pool.arrays, group.tiles, self.room.table, numbers, *found),
            at(Place.ATTENDED),
        )
        grid = self.most, shape.kv_heads * (shape.group // shape.part), splits
        shared = paged.single_memory(shape)
        last = self._add(kernels.attend(shape), grid, paged.LANES, arguments, (last,), shared)
        arguments = at(Place.ROWS), *found, group.tiles, at(Place.ATTENDED)
        source, grid = kernels.combine(shape, splits), (self.most * shape.heads, 1, 1)
        return self._add(source, grid, paged.LANES, arguments, (last,))

    def _attend_packed(
        self, shape: paged.Shape, pool: LayerPool, codes: packed.Codes, numbers: int, last: int
    ) -> int:
        """Over coded blocks, and each row's own as written."""
        at, group = self.room.at, self.room.group(pool.group)
        splits = room.splits(shape, self.most, even=self.even)
        places = Place.PARTIAL, Place.STATS, Place.OWN_PARTIAL, Place.OWN_STATS
        found = tuple(map(at, places))
        arguments: tuple[int, ...] = (
            *(at(Place.Q), *pool.arrays, group.coded, group.own, self.room.table, group.tails),
            *(group.visible, numbers, *found),
        )
        grid = self.most, shape.kv_heads * (shape.group // shape.part), splits + 1
        shared = packed.shared_memory(shape, codes)
        source = kernels.attend_packed(shape, codes)
        last = self._add(source, grid, paged.LANES, arguments, (last,), shared)
        signs = self._constant(packed.signs(shape.value_dim))
        arguments = at(Place.ROWS), *found, signs, at(Place.ATTENDED)
        source, grid = kernels.join(shape, splits), (self.most * shape.heads, 1, 1)
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
            group = self.room.group(number)
            arguments = (
                *(self.room.at(Place.ROWS), group.blocks, group.offsets, group.tails),
                *(self._constant(packed.signs(dim)), self._constant(self.tables[-1])),
            )
            source, grid = kernels.seal(kv_heads, dim, codes), (kv_heads, len(arrays) // 8, 1)
            last = self._add(source, grid, kernels.SEAL_THREADS, arguments, (last,))
        return last

    def _mlp(self, mlp: StackMLP, last: int, x: int) -> int:
        outputs, tiling = mlp.gate.codes.shape[0], kernels.Tiling(self.most, self.even)
        inputs, group_size = mlp.gate.codes.shape[1] * 8, mlp.gate.packing.group_size
        source = kernels.gated(inputs, outputs, group_size, mlp.activation, tiling)
        inner = self.room.at(Place.INNER)
        matrices = *self._matrix(mlp.gate), *self._matrix(mlp.up)
        arguments = self.room.at(Place.ROWS), x, *matrices, inner
        grid = outputs // 16, tiling.blocks, 1
        last = self._add(source, grid, 32 * tiling.warps, arguments, (last,))
        return self._linear(inner, [(mlp.down, self.room.at(Place.Y))], last)

    def _experts(self, experts: StackExperts, last: int, x: int, routed: int) -> int:
        at = self.room.at
        last = self._linear(routed, [(experts.router, at(Place.LOGITS))], last)
        count, outputs, words = experts.gate.codes.shape
        hidden, pairs = self.stack.hidden_size, self.most * experts.k
        most = min(pairs, count + pairs // 8)
        source = kernels.route(
            count,
            experts.k,
            experts.normalise,
            experts.scale,
            experts.per_expert is not None,
            most,
        )
        order = at(Place.ORDER), at(Place.TILES)
        arguments: tuple[int, ...] = (
            *(at(Place.ROWS), at(Place.LOGITS), self._optional(experts.per_expert)),
            *(at(Place.CHOSEN), at(Place.WEIGHTS), *order),
        )
        last = self._add(source, (1, 1, 1), kernels.ROUTE_THREADS, arguments, (last,))
        size = experts.gate.packing.group_size
        source = kernels.experts_gated(
            count, words * 8, outputs, size, experts.activation, experts.k
        )
        matrices = *self._matrix(experts.gate), *self._matrix(experts.up)
        arguments = x, *matrices, *order, at(Place.EXPERT_INNER)
        grid = outputs // 16, most, 1
        last = self._add(source, grid, kernels.EXPERT_THREADS, arguments, (last,))
        size = experts.down.packing.group_size
        source = kernels.experts_down(count, outputs, hidden, size)
        arguments = at(Place.EXPERT_INNER), *self._matrix(experts.down), *order, at(Place.EXPERT_Y)
        grid = hidden // 16, most, 1
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
        """Matrices by which the same rows are multiplied, each into a place of its own."""
        weights = [weight for weight, _ in parts]
        outputs = tuple(weight.codes.shape[0] for weight in weights)
        tiling = kernels.Tiling(self.most, self.even)
        inputs, group_size = weights[0].codes.shape[1] * 8, weights[0].packing.group_size
        source = kernels.linear(inputs, outputs, group_size, tiling)
        arguments = [self.room.at(Place.ROWS), x]
        for weight, place in parts:
            arguments += [*self._matrix(weight), place]
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
        at = self.room.at
        missing = [0] * (3 - len(norms))
        return (
            *(at(Place.ROWS), at(Place.X), at(Place.Y)),
            self._optional(None if mlp is None else mlp.post_norm),
            *(at(Place.EXPERT_Y), at(Place.WEIGHTS)),
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
