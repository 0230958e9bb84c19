"""Records recurrent nodes: kernels that advance the states of a step's sequences row by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import mlx.core as mx

from quire.cache.specs import KVLayout
from quire.device.cuda.delta_chunks import LEAST_ROWS, DeltaChunks, chunk_values
from quire.device.cuda.delta_rule import RESIDENT, DeltaRule, own_values
from quire.device.cuda.delta_rule import THREADS as _THREADS
from quire.device.gpu_kernels import kernel_text
from quire.device.recurrence import UNIT_EPS, WAITING
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.places import NodeKinds, Operand, ValueRecording, buffers_of
from quire.executor.graphs.source import C_TYPES, ROUNDED, generated_source, own_text
from quire.executor.graphs.states import MAX_TARGETS, LayerStates, StateArray
from quire.program.values import Node

_AT_ONCE = 128
"""Most sequences that have thread blocks of their own. A graph of 2,048 rows has few sequences."""
_FEW_AT_ONCE = 32
"""Most short sequences that advance token by token at once, where long ones advance in chunks."""
_EACH_SEQUENCE = (
    "for (int sequence = blockIdx.y; sequence < *rows; sequence += gridDim.y) {",
    "const int first = firsts[sequence], count = counts[sequence];",
)
_TILE = 32
"""Rows of a step that a thread block of a convolution takes: those of a long prompt are shared."""
_EACH_PART = (
    "const int lane = threadIdx.x & 31, tile = blockIdx.y * TILE, beyond_tile = tile + TILE;",
    "if (tile >= *rows) { wait_for_others(); return; }",
    "int sequence = 1 << 30;",
    "for (int from = 0; sequence == 1 << 30; from += 32) {",
    "const int own = from + lane, more = own < *rows ? counts[own] : 0;",
    "const bool reaches = !more || firsts[own] + more > tile;",
    "sequence = __reduce_min_sync(0xffffffffu, reaches ? own : 1 << 30);",
    "}",
    "for (; sequence < *rows && counts[sequence] && firsts[sequence] < beyond_tile; sequence++) {",
    "const int first = firsts[sequence], count = counts[sequence];",
    # No part but the first needs the state, which the first one's threads overwrite.
    "const int least = first + TAPS - 1, begin = tile <= first ? first : max(tile, least);",
    "const int end = min(first + count, max(beyond_tile, least));",
    "if (begin >= end) continue;",
)
_CHANNELS = 4
"""Neighbouring channels of a convolution that a thread reads and writes at once in graphs of few
rows. With more rows that takes longer (benchmarks/results/gpu-runs.md).
"""
_GATES = ("steps", "betas", "log_rates", "step_biases")
"""Operands of a delta rule beside its rows."""
_FEW_ROWS = 64
"""Most rows of a graph in which all states advance token by token."""


def _is_aligned(x: Operand, channels: int) -> bool:
    """Return whether `_CHANNELS` channels of a convolution's input lie in one aligned word."""
    first = 0 if x.buffer is None else (x.address - x.buffer.address) // x.dtype.size
    return (channels | x.row | first) % _CHANNELS == 0


def _convolution_text(dtype: mx.Dtype) -> str:
    """Return the C functions of convolutions whose results are of a type."""
    return f"#define ROUNDED {ROUNDED[dtype]}\n{own_text('channels.cuh')}"


def _token_lines(rule: DeltaRule, rows: Sequence[int]) -> list[str]:
    """Return the body of a kernel that advances a `sequence` token by token.

    Args:
        rows: see `DeltaRule.defines`.
    """
    return [
        rule.defines(*rows),
        "const int slot = count ? sources[sequence] : -1;",
        "const int* const own_targets = targets + sequence * TARGETS;",
        # An update may wait where a state stays in its slot, and goes nowhere else.
        "const bool stays = slot >= 0 && own_targets[0] == slot && own_targets[1] < 0;",
        "const bool defers = count == 1 && stays;",
        "auto* to = state;",
        kernel_text("quire.device.cuda", "delta_rule.cuh"),
        "#pragma unroll 1",
        "for (int n = 0; n < TARGETS && !defer; n++)",
        "if (own_targets[n] >= 0) keep(own_targets[n]);",
        *["keep_inputs();"] * rule.convolved,
    ]


@dataclass(frozen=True, slots=True)
class _Advance:
    """A kernel that advances a layer's states.

    Attributes:
        lines: its body.
        constants: integers that the body uses, by name.
        functions: C functions that the body calls.
        shared: bytes of shared memory of a thread block.
        resident: thread blocks that a multiprocessor must be able to run at once.
    """

    lines: Sequence[str]
    grid: tuple[int, int, int]
    threads: int = _THREADS
    constants: Mapping[str, int] = field(default_factory=dict)
    functions: str = ""
    shared: int = 0
    resident: int = 1


class StateRecording(ValueRecording):
    """Records the nodes that read and write recurrent states.

    Attributes:
        _layout: says which group each layer's states belong to.
        _states: arrays of the states, by layer.
    """

    _layout: KVLayout
    _states: Mapping[int, LayerStates]

    @property
    def kinds(self) -> NodeKinds:
        own = {"convolve": self._convolve, "delta_rule": self._delta_rule}
        own |= {"recurrence": self._recurrence, "state_space": self._state_space}
        return {**super().kinds, **own}

    def _convolve(self, node: Node) -> None:
        state, rows = self._state(node, "conv"), self._recorder.max_rows
        x, taps = self._operand(node, "x"), self._operand(node, "taps")
        bias, few = self._operand(node, "bias"), rows <= _FEW_ROWS
        dtype, channels = self._program.values[node.outputs[0]].dtype, state.shape[1]
        each = _CHANNELS if few and _is_aligned(x, channels) else 1
        constants = {
            "CHANNELS": channels,
            "TAPS": state.shape[0] + 1,
            "THREADS": _THREADS,
            "X_ROW": x.row,
            "EACH": each,
            "AHEAD": 2 if few else 8,
            "TILE": _TILE,
            "BIASED": int(bias.address != 0),
            "SILU": int(node.attributes["silu"]),
        }
        lines = [own_text("convolve.cuh"), "}"]
        operands = {"x": x, "taps": taps, "bias": bias}
        blocks = -(-channels // (each * _THREADS))
        if few:
            begin = [*_EACH_SEQUENCE, "const int begin = first, end = first + count;"]
            grid = blocks, min(rows, _AT_ONCE), 1
        else:
            begin, grid = [*_EACH_PART], (blocks, -(-rows // _TILE), 1)
        functions = _convolution_text(dtype)
        kernel = _Advance([*begin, *lines], grid, constants=constants, functions=functions)
        self._advance(node, {"state": state}, operands, kernel)

    def _recurrence(self, node: Node) -> None:
        """Record a delta rule and the convolution before it: one kernel in graphs of few rows."""
        convolve, delta = node.parts
        rule = self._rule(delta, convolved=True)
        x, taps = (self._operand(convolve, name) for name in ("x", "taps"))
        types = {x.dtype, taps.dtype, self._state(convolve, "conv").dtype}
        types.add(self._program.values[convolve.outputs[0]].dtype)
        alike = len(types) == 1 and x.dtype.size == 2
        if self._recorder.max_rows > _FEW_ROWS or not rule.convolves or not alike:
            self._convolve(convolve)
            self._delta_rule(delta)
            self._recorder.release(self._buffer(convolve.outputs[0]))
        elif not _is_aligned(x, rule.channels):
            raise UnsupportedNode("a convolution of parts of rows that are not aligned")
        else:
            self._convolved_rule(rule, convolve, delta)

    def _convolved_rule(self, rule: DeltaRule, convolve: Node, delta: Node) -> None:
        """Record a delta rule whose thread blocks convolve the channels that they read."""
        inputs = self._state(convolve, "conv")
        states = {"state": self._state(delta, "delta"), **self._waiting(delta), "inputs": inputs}
        operands = {name: self._operand(convolve, name) for name in ("x", "taps", "bias")}
        operands |= {name: self._operand(delta, name) for name in _GATES}
        rows = [operands[name].row for name in ("x", "steps", "betas")]
        constants = {
            "TAPS": inputs.shape[0] + 1,
            "BIASED": int(operands["bias"].address != 0),
            "SILU": int(convolve.attributes["silu"]),
        }
        arrivals = mx.zeros((self._recorder.max_rows * rule.key_heads,), mx.int32)
        kernel = self._by_sequence(
            ["const auto* mixed = x;", *_token_lines(rule, rows)],
            rule.blocks,
            constants,
            functions=_convolution_text(inputs.dtype),
            resident=RESIDENT,
        )
        own = {"arrivals": StateArray(self._recorder.constant(arrivals), (), mx.int32)}
        self._advance(delta, {**states, **own}, operands, kernel)

    def _rule(self, node: Node, *, convolved: bool = False) -> DeltaRule:
        """Return the constants of a delta rule.

        Raises:
            UnsupportedNode: there is no kernel for its shape.
        """
        heads, values, keys = self._state(node, "delta").shape
        waiting, own = self._waiting(node), node.attributes
        rule = DeltaRule(
            heads,
            own["key_heads"],
            values,
            key_dim=keys,
            by_channel=self._rank(node, "steps") == 3,
            eps=UNIT_EPS,
            most_correction=own["most_correction"],
            most_forgotten=own.get("most_forgotten"),
            own=own_values(values, self._recorder.max_rows),
            deferred=waiting[WAITING[1]].shape[0] if waiting else 0,
            convolved=convolved,
        )
        if not rule.served:
            raise UnsupportedNode(f"a delta rule of {values} values and {keys} keys")
        return rule

    def _delta_rule(self, node: Node) -> None:
        state, rule = self._state(node, "delta"), self._rule(node)
        states = {"state": state, **self._waiting(node)}
        operands = {name: self._operand(node, name) for name in ("mixed", *_GATES)}
        if operands["mixed"].row % 4:
            raise UnsupportedNode("a delta rule of rows that are not aligned")
        rows = [operands[name].row for name in ("mixed", "steps", "betas")]
        chunks = DeltaChunks(rule, chunk_values(rule, self._recorder.card), *rows)
        lines = _token_lines(rule, rows)
        if not self._has_chunks(chunks, operands["mixed"], state):
            whole = self._by_sequence(lines, rule.blocks, resident=RESIDENT)
            self._advance(node, states, operands, whole)
            return
        # Kernels behind this one start when it is done, so it must not be done before others are.
        skipped = f"if (count >= {LEAST_ROWS}) {{ wait_for_others(); continue; }}"
        short = self._by_sequence(
            [skipped, *lines], rule.blocks, at_once=_FEW_AT_ONCE, resident=RESIDENT
        )
        self._advance(node, states, operands, short, self._by_chunks(chunks))

    def _waiting(self, node: Node) -> Mapping[str, StateArray]:
        """Return the arrays of updates that wait beside a layer's states, if it has them."""
        states = self._states[node.attributes["layer"]]
        return {name: states[name] for name in WAITING if name in states}

    def _has_chunks(self, chunks: DeltaChunks, mixed: Operand, state: StateArray) -> bool:
        """Return whether sequences with many rows in a step advance in chunks."""
        recorder = self._recorder
        if recorder.max_rows <= _FEW_ROWS or recorder.batch_invariant or mixed.buffer is None:
            return False
        aligned = (mixed.address - mixed.buffer.address) % 16 == 0
        return aligned and chunks.served(recorder.card, mixed.dtype, state.dtype)

    def _by_chunks(self, chunks: DeltaChunks) -> _Advance:
        """Return the kernel for sequences with many rows in a step."""
        # No more thread blocks than run at once: most would have no sequence.
        sequences = max(1, self._recorder.card.multiprocessors // chunks.blocks)
        return _Advance(
            ["auto* to_state = state;", *chunks.lines],
            (chunks.blocks, sequences, 1),
            chunks.threads,
            functions=chunks.functions,
            shared=chunks.shared,
        )

    def _state_space(self, node: Node) -> None:
        state = self._state(node, "state")
        names = ("values", "keys", "queries", "steps", "rates")
        operands = {name: self._operand(node, name) for name in names}
        heads = self._width(node.input("values"), 1)
        dim, groups = self._width(node.input("values"), 2), self._width(node.input("keys"), 1)
        size = state.shape[-1]
        lanes = min(32, 1 << (size - 1).bit_length())
        constants = {
            "HEADS": heads,
            "HEAD_DIM": dim,
            "GROUPS": groups,
            "STATE": size,
            "LANES": lanes,
            "THREADS": _THREADS,
            "BY_CHANNEL": int(self._rank(node, "rates") == 2),
            **{f"{name.upper()}_ROW": operands[name].row for name in names[:-1]},
        }
        blocks = -(-heads * dim * lanes // _THREADS)
        lines = [own_text("state_space.cuh")]
        kernel = self._by_sequence(lines, blocks, constants)
        self._advance(node, {"state": state}, operands, kernel)

    def _by_sequence(
        self,
        lines: Sequence[str],
        blocks: int,
        constants: Mapping[str, int] = MappingProxyType({}),
        *,
        functions: str = "",
        at_once: int | None = None,
        resident: int = 1,
    ) -> _Advance:
        """Return a kernel whose thread blocks take one sequence after the other.

        Args:
            lines: its body for a `sequence`, whose rows are `count` from `first` on.
            blocks: thread blocks of a sequence.
            at_once: most sequences that have thread blocks of their own; `_AT_ONCE` if None.
            functions, resident: see `_Advance`.
        """
        grid = blocks, min(self._recorder.max_rows, at_once or _AT_ONCE), 1
        functions += kernel_text("quire.device.cuda", "lanes.cuh")
        return _Advance(
            [*_EACH_SEQUENCE, *lines, "}"],
            grid,
            constants=constants,
            functions=functions,
            resident=resident,
        )

    def _advance(
        self,
        node: Node,
        states: Mapping[str, StateArray],
        operands: Mapping[str, Operand],
        *kernels: _Advance,
    ) -> None:
        """Record kernels that advance a layer's states, each those of some sequences.

        Args:
            states: arrays of the states, by the kernels' names for them.
        """
        recorder = self._recorder
        at = recorder.inputs.states(self._layout.group[node.attributes["layer"]])
        y = self._program.values[node.outputs[0]]
        names = ("firsts", "counts", "sources", "targets")
        parameters = [f"const int* {name}" for name in names]
        parameters += [f"{C_TYPES[each.dtype]}* {name}" for name, each in states.items()]
        parameters += [each.parameter(own) for own, each in operands.items()]
        parameters += [f"{C_TYPES[y.dtype]}* y"]
        reads = buffers_of(operands.values())
        to = self._written(node.outputs[0], reads)
        arguments = [recorder.rows, *(getattr(at, name) for name in names)]
        arguments += [each.address for each in states.values()]
        arguments += [*(each.address for each in operands.values()), to.address]
        for each in kernels:
            text = generated_source(
                parameters,
                each.lines,
                each.threads,
                constants={**each.constants, "TARGETS": MAX_TARGETS},
                functions=each.functions,
                resident=each.resident,
            )
            recorder.add(
                text,
                each.grid,
                each.threads,
                arguments=arguments,
                reads=reads,
                writes=[to],
                shared=each.shared,
            )

    # -- operands --------------------------------------------------------------------------------

    def _state(self, node: Node, name: str) -> StateArray:
        return self._states[node.attributes["layer"]][name]

    def _operand(self, node: Node, role: str) -> Operand:
        """Return the location of an operand: rows, perhaps part of longer ones, or a weight."""
        value = node.input(role)
        if value is None:
            weight = node.weight(role)
            if weight is None:
                return Operand(0, mx.float32, 0, head=0, buffer=None)
            return Operand(self._recorder.weight(weight), weight.dtype, 0, head=0, buffer=None)
        return self._rows_of(value)

    def _rank(self, node: Node, role: str) -> int:
        value = node.input(role)
        if value is not None:
            return len(self._program.values[value].shape)
        return int(node.weight(role).ndim)
