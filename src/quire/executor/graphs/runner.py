"""Runs steps of few rows as CUDA graphs: sequences generate, or read short prompts.

The program of a step is traced from the model once. Its kernels are recorded for 1, 2, 4 and so on
rows, on addresses that stay: those of the weights, of the pools, and of buffers between kernels.
Python then touches a step's small arrays only: how many rows, their positions, slots, visible
ranges and block tables.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx

from quire.attention.backend import AttentionCase
from quire.cache.formats.base import LayerStore
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout
from quire.core.arrays import Ints
from quire.core.errors import EngineFailure, ModelError
from quire.core.kv_format import KVFormat
from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import DriverError, Graph, card
from quire.device.cuda.extension import Extension, NoExtension, load_extension
from quire.device.device import current_device
from quire.device.verified import Check, Verification, verified_kernels
from quire.executor.graphs.coding_check import DeviceRunner
from quire.executor.graphs.head import record_head, served_head
from quire.executor.graphs.layout import InputLayout, step_numbers
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.places import Place
from quire.executor.graphs.pools import LayerPool, PlainPool, kind_of
from quire.executor.graphs.recorder import Buffer, Recorder, launches
from quire.executor.graphs.recording import Recording
from quire.executor.inputs import StepInputs
from quire.models.base import LanguageModel
from quire.program.passes import recordable
from quire.program.trace import NotLinear, StepPrograms, trace
from quire.program.values import FUSED, Program
from quire.scheduler.plan import ScheduledSequence

log = logging.getLogger("quire.engine")

MAX_ROWS = 64
"""Rows of the largest graph."""
_MAX_ENTRIES = 1 << 18
"""Entries of all block tables of a step together."""


def open_cuda_graphs(
    model: LanguageModel,
    layout: KVLayout,
    pools: Pools,
    identity: str,
    *,
    batch_invariant: bool = False,
) -> CUDAGraphs | None:
    """Trace a model and check that graphs can compute its steps.

    Args:
        identity: of the weights; what was verified about their steps is kept by it.
        batch_invariant: see `CUDAGraphs`.

    Returns:
        None on other devices, and where a part of the program has no kernel: a log line says which.

    Raises:
        ModelError: `batch_invariant` is asked for, and graphs cannot compute the steps.
    """
    if current_device().kernel_language != "cuda":
        return None
    try:
        traced = trace(model)
        programs = StepPrograms(recordable(traced.body), recordable(traced.head))
        graphs = CUDAGraphs(
            programs,
            model.logits,
            layout,
            pools,
            identity,
            load_extension(),
            batch_invariant=batch_invariant,
        )
        graphs.check()
        return graphs
    except (UnsupportedNode, NotLinear, NoExtension, DriverError, OSError) as error:
        if batch_invariant:
            raise ModelError(f"batch-invariant: {error}") from error
        log.info("CUDA graphs disabled for this model: %s. Decoding runs eagerly.", error)
        return None


class Computed(NamedTuple):
    """A step's normalised hidden states `[T, hidden]`, or its logits `[T, vocab]`.

    Attributes:
        graphed: whether a graph computes them, into memory that the next step writes to again.
    """

    rows: mx.array
    logits: bool
    graphed: bool


@dataclass(slots=True)
class _Graphs:
    """CUDA graphs of one KV format, by row count. Invalid once the pools are reallocated."""

    addresses: tuple[tuple[int, ...], ...]
    graphs: dict[int, Graph] = field(default_factory=dict)


class CUDAGraphs:
    """The recorded steps of a model.

    A sequence may have several rows: some of its prompt, or drafts. In formats with tails these lie
    in one block: rows of the next one would read its codes, which are there when the step ends.

    Each number of rows is verified against the model once. If it differs, it is not used.

    Args:
        logits: of hidden states, the model's own way.
        identity: of the weights.
        batch_invariant: every step is computed so, those that read prompts too, and a row's bits
            do not depend on the other rows.
    """

    def __init__(
        self,
        programs: StepPrograms,
        logits: Callable[[mx.array], mx.array],
        layout: KVLayout,
        pools: Pools,
        identity: str,
        extension: Extension,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._programs, self._logits_of = programs, logits
        self._layout, self._pools = layout, pools
        self._extension = extension
        self._compiler = compiler()
        self._inputs = InputLayout(len(layout.groups), MAX_ROWS, _MAX_ENTRIES, extension.pointer)
        self._heads = _attention_heads(programs.body)
        self._head = served_head(programs.head, card())
        hidden = programs.body.values[programs.body.outputs[0]]
        width = hidden.shape[-1]
        assert isinstance(width, int), "the hidden size is fixed"
        self._hidden = mx.zeros((MAX_ROWS, width), dtype=hidden.dtype)
        self._logits: mx.array | None = None
        if self._head is not None:
            self._logits = mx.zeros((MAX_ROWS, self._head[0].codes.shape[0]))
            mx.eval(self._logits)
        mx.eval(self._hidden)
        self._recorded: dict[KVFormat, _Graphs] = {}
        self._copies: dict[int, tuple[mx.array, mx.array]] = {}
        """See `Recorder.copied`."""
        self._formats: dict[KVFormat, bool] = {}
        """What `serves_format` found out."""
        self.verified: dict[tuple[KVFormat, int], bool] = {}
        """By format and rows of a graph, whether it computes what the model does."""
        self._unknown: set[tuple[KVFormat, int]] = set()
        """Of which no earlier start knew anything."""
        self._identity = identity
        self._batch_invariant = batch_invariant

    def check(self) -> None:
        """Record a step over plain blocks without compiling it.

        Raises:
            UnsupportedNode: a part of the program has no kernel.
        """
        if self._batch_invariant and self._head is None:
            raise UnsupportedNode("the head is not packed in 4 bits, or too wide")
        tokens = self._pools.block_size
        pools: dict[int, LayerPool] = {
            layer: PlainPool(self._layout.group[layer], tokens, (0, 0)) for layer in self._heads
        }
        self._record(self._recorder(MAX_ROWS), pools)

    def compute(self, inputs: StepInputs, run_eagerly: Callable[[], mx.array]) -> Computed | None:
        """Run the step as one CUDA graph. Return None if no graph supports it.

        Args:
            run_eagerly: runs the model, which writes to the pools; returns hidden states.

        Raises:
            EngineFailure: rows must be batch-invariant, and cannot be.
        """
        if self._batch_invariant:
            return self._invariant_rows(inputs, run_eagerly)
        if not self._serves(inputs):
            return None
        max_rows = _max_rows(inputs.sequences)
        verified = self._known(inputs.sequences[0].format, max_rows)
        if verified is False:
            return None
        if verified is None:
            return Computed(self._verified(inputs, max_rows, run_eagerly), False, False)
        rows = self._launched(inputs, max_rows)
        return None if rows is None else Computed(rows, self._logits is not None, True)

    def _invariant_rows(self, inputs: StepInputs, run_eagerly: Callable[[], mx.array]) -> Computed:
        format, max_rows = inputs.sequences[0].format, _max_rows(inputs.sequences)
        # A prompt's rows are not verified: the model may go on with the last of them alone.
        if inputs.wanted is None and self._known(format, max_rows) is None:
            self._verified(inputs, max_rows, run_eagerly)
        rows = None
        if self._known(format, max_rows) is not False and self._within_blocks(inputs.sequences):
            rows = self._launched(inputs, max_rows)
            if rows is None:  # something is still to be done to the pools
                mx.eval(*self._pools.arrays(range(len(self._layout.group))))
                rows = self._launched(inputs, max_rows)
        if rows is None:
            raise EngineFailure(f"batch-invariant: steps of {max_rows} rows cannot be computed")
        return Computed(rows, logits=True, graphed=True)

    def _known(self, format: KVFormat, max_rows: int) -> bool | None:
        """Return the cached verification result for graphs of `max_rows` rows, from this run or an
        earlier one."""
        key = format, max_rows
        if key not in self.verified and key not in self._unknown:
            if verified_kernels().holds(self._verification(format, max_rows)):
                self.verified[key] = True
            else:
                self._unknown.add(key)  # asked once: planning asks at each step
        return self.verified.get(key)

    def _serves(self, inputs: StepInputs) -> bool:
        rows = inputs.sequences
        if not 0 < sum(each.count for each in rows) <= MAX_ROWS:
            return False
        if inputs.media is not None or inputs.cross is not None:
            return False
        format = rows[0].format
        if not self.serves_format(format) or not self._within_blocks(rows):
            return False
        return all(each.format == format and each.sampled == each.wanted for each in rows)

    def _within_blocks(self, rows: Sequence[ScheduledSequence]) -> bool:
        """Whether no row reads a block that is coded when the step ends."""
        tokens = self._pools.block_size
        return not rows[0].format.has_tail or all(in_one_block(each, tokens) for each in rows)

    def max_graph_rows(self, format: KVFormat) -> int:
        """Return the rows of a step that is likely to be graphed, several of a sequence among them.

        In formats with tails those of a sequence must lie in one block. 0 where no step is graphed.
        """
        if not self.serves_format(format):
            return 0
        rows = MAX_ROWS
        while rows > 1 and self._known(format, rows) is False:
            rows //= 2
        return rows if rows > 1 else 0

    def serves_format(self, format: KVFormat) -> bool:
        """Whether the kernels read and write a format; found out once."""
        if format not in self._formats:
            self._formats[format] = self._tried_coding(format)
        return self._formats[format]

    def _tried_coding(self, format: KVFormat) -> bool:
        cases = [self._case(layer, heads, format) for layer, heads in self._heads.items()]
        if not all(kind_of(each.format).serves(each) for each in cases):
            return False
        runner = DeviceRunner(self._compiler, self._extension)
        for case in dict.fromkeys(cases):
            verification = Verification(Check.CODING_AGREES, case)
            if verified_kernels().holds(verification):
                continue
            if (difference := kind_of(case.format).differs(case, runner)) is not None:
                log.warning("CUDA graphs disabled for %s: %s", format.name, difference)
                return False
            verified_kernels().add(verification)
        return True

    def _case(self, layer: int, heads: int, format: KVFormat) -> AttentionCase:
        spec = self._layout.groups[self._layout.group[layer]].spec.attention
        assert spec is not None, "layers that attend keep keys"
        own, tokens = format.of_layer(layer), self._pools.block_size
        return AttentionCase(own, spec, tokens, heads, 1, mx.bfloat16, softcap=False, sinks=False)

    def _launched(self, inputs: StepInputs, max_rows: int) -> mx.array | None:
        graph = self._graph(max_rows, inputs.sequences)
        numbers = None if graph is None else self._numbers(inputs.sequences)
        if graph is None or numbers is None:
            return None
        return self._extension.replay(
            graph=graph.handle,
            inputs=[inputs.tokens],
            targets=[self._inputs.tokens],
            workspace=self._hidden if self._logits is None else self._logits,
            rows=sum(each.count for each in inputs.sequences),
            numbers=numbers.tobytes(),
            numbers_target=self._inputs.numbers,
        )

    def _numbers(self, rows: Sequence[ScheduledSequence]) -> Ints | None:
        entries, size = self._inputs.entries, self._pools.block_size
        return step_numbers(rows, self._layout, MAX_ROWS, size, entries)

    def _verified(
        self, inputs: StepInputs, max_rows: int, run_eagerly: Callable[[], mx.array]
    ) -> mx.array:
        """Run the model, and compare the graph's result with it; return the model's."""
        mx.synchronize()
        expected = run_eagerly()
        mx.eval(expected, *self._pools.arrays(range(len(self._layout.group))))
        format = inputs.sequences[0].format
        difference: str | None
        try:
            found = self._launched(inputs, max_rows)
            if found is None:
                return expected
            whole = expected if self._logits is None else self._logits_of(expected)
            wide = whole.astype(mx.float32)
            if inputs.narrowed:
                found = found[inputs.wanted]
            error = mx.linalg.norm(found.astype(mx.float32) - wide) / mx.linalg.norm(wide)
            log.debug("%d rows: relative error %.2g", max_rows, float(error))
            # Written so that a NaN is too much.
            fine = float(error) <= kind_of(format).tolerance
            difference = None if fine else f"relative error {float(error):.2g}"
        except (DriverError, RuntimeError) as problem:
            difference = str(problem)
        self.verified[format, max_rows] = difference is None
        if difference is None:
            verified_kernels().add(self._verification(format, max_rows))
        else:
            log.warning("CUDA graphs of %d rows disabled: %s", max_rows, difference)
        return expected

    def _verification(self, format: KVFormat, max_rows: int) -> Verification:
        """Return the verification that steps of `max_rows` rows agree with the model."""
        subject = self._identity, format, max_rows, self._batch_invariant
        return Verification(Check.DECODE_STEPS_AGREE, subject)

    # -- graphs --------------------------------------------------------------------------------

    def _graph(self, max_rows: int, rows: Sequence[ScheduledSequence]) -> Graph | None:
        """Return the graph for the pools as they are; None while work on them is pending."""
        format = rows[0].format
        stores = {
            layer: self._pools.kv(self._layout.group[layer], format).layers[layer]
            for layer in self._heads
        }
        pointer = self._extension.pointer
        addresses = tuple(tuple(map(pointer, each.arrays())) for each in stores.values())
        if not all(map(all, addresses)):
            return None
        known = self._recorded.get(format)
        if known is None or known.addresses != addresses:
            known = self._recorded[format] = _Graphs(addresses)
        graph = known.graphs.get(max_rows)
        if graph is None:
            graph = known.graphs[max_rows] = self._new_graph(max_rows, stores)
        return graph

    def _new_graph(self, max_rows: int, stores: dict[int, LayerStore]) -> Graph:
        pointer = self._extension.pointer
        pools = {
            layer: kind_of(store.format).of(store, self._layout.group[layer], pointer)
            for layer, store in stores.items()
        }
        recorder = self._recorder(max_rows)
        self._record(recorder, pools)
        functions = self._compiler.functions([each.source for each in recorder.kernels])
        return Graph(launches(recorder.kernels, functions), recorder.kept)

    def _recorder(self, max_rows: int) -> Recorder:
        return Recorder(
            max_rows,
            self._extension.pointer,
            self._inputs,
            card(),
            batch_invariant=self._batch_invariant,
            copies=self._copies,
        )

    def _record(self, recorder: Recorder, pools: dict[int, LayerPool]) -> None:
        """Record body and head.

        Raises:
            UnsupportedNode: there is no kernel for a part of the body.
        """
        hidden = Buffer(recorder.address(self._hidden), self._hidden.nbytes)
        given = {
            "tokens.0": Place(self._inputs.tokens, None),
            "positions.0": Place(self._inputs.positions, None),
        }
        recording = Recording(recorder, pools, self._layout)
        recording.record(self._programs.body, given, [hidden])
        recording.code_tails()
        if self._logits is not None and self._head is not None:
            weight, softcap = self._head
            logits = Buffer(recorder.address(self._logits), self._logits.nbytes)
            record_head(recorder, weight, softcap, hidden, logits)


def _attention_heads(program: Program) -> dict[int, int]:
    """Return the heads of each layer that keeps keys, by layer."""
    found: dict[int, int] = {}
    for node in program.nodes:
        for each in node.arguments if node.kind == FUSED else ():
            if each.kind == "attend" and each.input("k") is not None:
                layer = each.attributes["layer"]
                q = each.input("q")
                heads = 0 if q is None else program.values[q].shape[1]
                assert isinstance(heads, int), "heads are a fixed number"
                found[layer] = heads
    return found


def in_one_block(rows: ScheduledSequence, block_size: int) -> bool:
    """Whether a sequence's rows lie in one block."""
    return rows.start % block_size + rows.count <= block_size


def _max_rows(rows: Sequence[ScheduledSequence]) -> int:
    """Return the rows that the graph of a step is recorded for."""
    return 1 << (sum(each.count for each in rows) - 1).bit_length()
