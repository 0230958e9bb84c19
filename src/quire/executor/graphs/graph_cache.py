"""Records the steps of a model by number of rows, and binds the recordings to the pools'
addresses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import mlx.core as mx

from quire.attention.paged.cuda import shape_of
from quire.attention.paged.tiling import Tiling
from quire.attention.paged.warpgroups import tiling_of
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout, recurrent_groups
from quire.core.kv_format import KVFormat
from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import Graph, card
from quire.device.cuda.extension import Extension
from quire.device.cuda.inboxes import Inboxes
from quire.executor.graphs import device_memory
from quire.executor.graphs.attention.coding_check import DeviceRunner
from quire.executor.graphs.attention.indexers import has_indexers
from quire.executor.graphs.attention.pool_kinds import kind_of
from quire.executor.graphs.attention.pools import LayerPool, PlainPool
from quire.executor.graphs.attention.workspaces import COMMON, Workspaces
from quire.executor.graphs.coverage import Survey
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.operands import UnsupportedNode, attention_heads
from quire.executor.graphs.places import Place
from quire.executor.graphs.placing import RowPlacing, places_rows
from quire.executor.graphs.products.library_products import least_library_rows, open_library
from quire.executor.graphs.products.proposals import Proposals
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.recording import Recording
from quire.executor.graphs.states import LayerStates, layer_states, unplaced_states
from quire.executor.graphs.step_graphs import Addresses, RecordedStep, StepGraphs
from quire.executor.inputs import FlatRows
from quire.program.low_rank import NUMBERS
from quire.program.trace import HIDDEN, StepPrograms
from quire.program.tracing import position_axes
from quire.program.values import Node, Program, Value
from quire.program.wanted_rows import FIELD as WANTED_ROWS

log = logging.getLogger("quire.engine")

MAX_ROWS = 64
"""Rows of the largest graph that also computes logits, for sequences that generate."""
WIDE_ROWS = 2048
"""Rows of the largest graph, for prompts or more sequences."""
_ENDING_ROWS = 512
"""Rows of the smallest graph whose end computes wanted rows only: prompts have most of its rows."""
_INPUT_ROWS = (MAX_ROWS, 512, WIDE_ROWS)
"""Sizes of input buffers: a step copies as many inputs as its graph has rows, or a few times more.
"""
_MEDIA = "media."
"""Begins the names of the fields of media rows; see `Variant`."""
_MAX_ENTRIES = 1 << 18
"""Most entries of all block tables of a step together."""


class GraphCache:
    """The graphs of a model, and the device memory that they read and write.

    Args:
        batch_invariant: a row's bits do not depend on the other rows.
        inboxes: see `Recorder`.
        factors: of adapters; see `bind`.

    Attributes:
        heads: query heads of the layers whose keys are read, by layer.
        indexed: whether indexers choose the keys that rows attend to.
        hidden: `[rows, hidden]` buffer that every graph writes its hidden states to.
        library: computes products of wide graphs; None if own kernels compute all of them.
        made: number of graphs made so far.
        takes_media: whether rows of media may replace embeddings.
    """

    def __init__(
        self,
        programs: StepPrograms,
        layout: KVLayout,
        pools: Pools,
        extension: Extension,
        *,
        batch_invariant: bool = False,
        inboxes: Inboxes | None = None,
        factors: Sequence[mx.array] = (),
    ) -> None:
        self._programs, self._layout, self._pools = programs, layout, pools
        self._extension, self._compiler = extension, compiler()
        self._batch_invariant, self._inboxes = batch_invariant, inboxes
        self.heads = attention_heads(programs.body, layout.owner)
        self.indexed = has_indexers(programs.body)
        self._attended = tuple({layout.group[layer]: None for layer in self.heads})
        self._advanced = tuple(recurrent_groups(layout.groups))
        """Indices of the KV groups and of the groups of states that steps use."""
        self._by_mlx: list[Node] = []
        """Nodes of the body without kernels."""
        self._inputs: dict[int, InputLayout] = {}
        self._workspaces = Workspaces(layout, pools.block_size)
        runner = DeviceRunner(self._compiler, extension)
        least = None if batch_invariant else least_library_rows(programs.body)
        self.library = None if least is None else open_library(runner, card(), least)
        self._axes = position_axes(programs.body)
        hidden = programs.body.values[programs.body.outputs[0]]
        self.hidden = _rows_of(hidden)
        self._read = {
            name: _rows_of(programs.body.values[id])
            for name, id in programs.body.fields.items()
            if name == HIDDEN or name.removeprefix(_MEDIA).isdecimal()
        }
        """Buffers `[rows, width]` that graphs read by field: levels of media rows; behind a step,
        its final hidden states."""
        self.takes_media = f"{_MEDIA}0" in self._read
        self._numbers = device_memory.unwritten((WIDE_ROWS,), mx.int32)
        """Each row's number among the factors of adapters."""
        self._factors = tuple(factors)
        self._logits: mx.array | None = None
        self.made = 0
        self._recorded: dict[tuple[KVFormat, int], RecordedStep] = {}
        """Recorded steps by format and rows."""
        self._copies: dict[int, tuple[mx.array, mx.array]] = {}
        """Small weights and their copies in device memory, by identity of the weight."""
        self._make_logits()

    def use(self, pools: Pools) -> None:
        """Bind the recorded steps to other pools of the same model from now on."""
        self._pools = pools
        for each in self._recorded.values():
            each.bound = None  # whose memory the former pools have

    def bind(self, programs: StepPrograms, factors: Sequence[mx.array]) -> bool:
        """Bind the recorded steps to the factors of adapters, which are part of the programs.

        Returns:
            Whether that was possible. It is not where MLX computes nodes between graphs.
        """
        if self._by_mlx:
            return False
        self._programs, self._factors = programs, tuple(factors)
        return True

    def check(self) -> None:
        """Find the nodes without kernels; MLX will compute them between graphs.

        Raises:
            UnsupportedNode: one of them reads or writes pools, or rows must be batch-invariant.
        """
        if self._batch_invariant and self._logits is None:
            raise UnsupportedNode("there is no kernel for the head")
        tokens = self._pools.block_size
        pools: dict[int, LayerPool] = {
            layer: PlainPool(self._layout.group[layer], tokens, (0, 0)) for layer in self.heads
        }
        states = unplaced_states(self._layout, self._pools.dtype)

        def surveyed(program: Program) -> Survey:
            recorder = self._recorder(MAX_ROWS)
            found = Survey(recorder, pools, self._layout, states=states)
            found.record(
                program,
                self._given(recorder),
                [_buffer_of(recorder.address(self.hidden), self.hidden)],
            )
            return found

        survey, ending = surveyed(self._programs.body), self._programs.ending
        if ending is not None and surveyed(ending).unsupported:
            self._programs = replace(self._programs, ending=None)
        for node, reason in survey.unsupported:
            if self._batch_invariant or node.uses_pools:
                raise UnsupportedNode(reason)
        self._by_mlx = [node for node, _ in survey.unsupported]
        if self._by_mlx:
            self._record(self._recorder(MAX_ROWS), pools, states)
            log.info(
                "CUDA graphs compute %d of %d nodes of a step, MLX the others between graphs: %s",
                survey.nodes - len(self._by_mlx),
                survey.nodes,
                "; ".join(dict.fromkeys(reason for _, reason in survey.unsupported)),
            )

    def inputs(self, max_rows: int) -> InputLayout:
        """Return the input buffers for graphs of `max_rows` rows."""
        rows = next(each for each in _INPUT_ROWS if max_rows <= each)
        if rows not in self._inputs:
            many, tokens = rows > MAX_ROWS, self._pools.block_size
            self._inputs[rows] = InputLayout(
                len(self._layout.groups),
                rows,
                _MAX_ENTRIES,
                address=self._extension.pointer,
                tilings=_tilings(self._layout, self.heads, tokens) if many else (),
                workspace=self._workspaces.blocks if many else (),
                axes=self._axes,
            )
        return self._inputs[rows]

    def arrays_of(self, inputs: FlatRows, layout: InputLayout) -> dict[int, mx.array]:
        """Return a step's tokens if some are on the device, or those of the step before if rows
        follow it, the levels of its media rows, final hidden states that are read behind it, and
        the numbers of its rows' adapters, by the address that graphs read them from.
        """
        found: list[tuple[mx.array, mx.array]] = []
        if inputs.hidden is not None:
            found.append((self._read[HIDDEN], inputs.hidden))
        if inputs.media is not None:
            levels = list(inputs.media.levels)
            levels += [mx.zeros_like(levels[0])] * (len(self._read) - len(levels))
            found += zip(self._read.values(), levels, strict=True)
        if inputs.adapted is not None:
            found.append((self._numbers, inputs.adapted.numbers))
        arrays = {
            self._extension.pointer(buffer): array.astype(buffer.dtype) for buffer, array in found
        }
        if inputs.following is not None:
            assert self.placing is not None, "rows are placed"
            arrays |= self.placing.given(inputs.following)
            if not inputs.following.given:
                return arrays
        if inputs.known_tokens is not None:
            return arrays
        return {layout.tokens: inputs.tokens, **arrays}

    @cached_property
    def placing(self) -> RowPlacing | None:
        """Places rows that follow a running step; None where the model's rows do not move."""
        groups = self._layout.groups
        if self._axes or self.indexed or not places_rows(groups):
            return None
        given = self.inputs(MAX_ROWS), self._pools.block_size, self._extension.pointer
        return RowPlacing(groups, *given, compiler=self._compiler)

    def output(self, max_rows: int) -> tuple[mx.array, bool]:
        """Return the output buffer of graphs of `max_rows` rows, and whether it holds logits."""
        if self._logits is None or max_rows > MAX_ROWS:
            return self.hidden, False
        return self._logits, True

    def body(self, max_rows: int) -> Program:
        """Return the program of graphs of `max_rows` rows, up to hidden states: of all rows, or if
        it has the field of wanted rows, of these.
        """
        programs, library = self._programs, self.library
        if self._by_mlx:
            return programs.body
        if programs.ending is not None and max_rows >= _ENDING_ROWS:
            return programs.ending
        by_library = library is not None and library.serves(max_rows)
        return programs.joined if programs.joined and by_library else programs.body

    def start(self, max_rows: int, format: KVFormat) -> bool:
        """Record a step, and compile its kernels in the background. Return whether all of them are
        done; False while writes to the pools are pending.

        Raises:
            UnsupportedNode: there is no kernel for a part of the body.
        """
        addresses = self._addresses(format)
        if not all(addresses):
            return False
        return self._compiler.start(self.recorded(max_rows, format).sources)

    def graph(self, max_rows: int, format: KVFormat) -> StepGraphs | None:
        """Return a step's graphs for the current pools, when its kernels are compiled. Return None
        while writes to the pools are pending.

        Raises:
            UnsupportedNode: there is no kernel for a part of the body.
            DriverError: a kernel does not compile, or there is no graph of the kernels.
        """
        addresses = self._addresses(format)
        if not all(addresses):
            return None
        recorded = self.recorded(max_rows, format)
        if not recorded.functions:
            recorded.functions = self._compiler.functions(recorded.sources)
            seconds = time.perf_counter() - recorded.started
            numbers = max_rows, len(recorded.functions), seconds
            log.info("CUDA graph of %d rows: %d kernels, compiled in %.1f s", *numbers)
        before = recorded.bound
        graphs = recorded.graphs(addresses)
        self.made += recorded.bound is not before
        return graphs

    def piece(self, max_rows: int, format: KVFormat, kernels: range) -> Graph:
        """Return a graph of some kernels of a step that has graphs; see `RecordedStep.piece`."""
        return self.recorded(max_rows, format).piece(kernels, self._addresses(format))

    def recorded(self, max_rows: int, format: KVFormat) -> RecordedStep:
        """Return the recorded step of a format and row count, whose pools are computed."""
        key = format, max_rows
        if key not in self._recorded:
            addresses = self._addresses(format)
            self._recorded[key] = self._record_step(max_rows, format, addresses)
        return self._recorded[key]

    def _addresses(self, format: KVFormat) -> Addresses:
        """Return the addresses that steps are recorded for; 0 for arrays that are not computed."""
        arrays: list[mx.array] = []
        for group in self._attended:
            arrays += self._pools.kv(group, format).arrays(self.heads)
        for group in self._advanced:
            arrays += self._pools.states(group, format).arrays()
        return tuple(map(self._extension.pointer, (*arrays, *self._factors)))

    def _record_step(self, max_rows: int, format: KVFormat, addresses: Addresses) -> RecordedStep:
        started, pointer = time.perf_counter(), self._extension.pointer
        group = self._layout.group
        kept = {layer: self._pools.kv(group[layer], format) for layer in self.heads}
        stores = {layer: each.layers[layer] for layer, each in kept.items()}
        indexes = {
            layer: pointer(each.indexes[layer].arrays()[0])
            for layer, each in kept.items()
            if layer in each.indexes
        }
        states = layer_states(self._pools, self._layout, format, address=pointer)
        read = {owner for layer, owner in enumerate(self._layout.owner) if owner != layer}
        pools = {
            layer: replace(
                kind_of(store.format).of(store, self._layout.group[layer], pointer),
                index=indexes.get(layer, 0),
                # What other layers read, too, must stay until they have.
                workspace=1 + layer if layer in read else COMMON,
            )
            for layer, store in stores.items()
        }
        recorder = self._recorder(max_rows)
        recording = self._record(recorder, pools, states)
        if self.library is not None:
            recorder.kernels = Proposals(self.library.version, pointer).chosen(recorder.kernels)
        return RecordedStep(
            recorder, addresses, recording.segments, nodes=recording.recorded, started=started
        )

    def _recorder(self, max_rows: int) -> Recorder:
        return Recorder(
            max_rows,
            self._extension.pointer,
            self.inputs(max_rows),
            card=card(),
            batch_invariant=self._batch_invariant,
            copies=self._copies,
            inboxes=self._inboxes,
            workspaces=self._workspaces,
            library=self.library,
        )

    def _record(
        self, recorder: Recorder, pools: dict[int, LayerPool], states: dict[int, LayerStates]
    ) -> Recording:
        """Record the body, and the head if it has kernels.

        Raises:
            UnsupportedNode: there is no kernel for a part of the body.
        """
        hidden = _buffer_of(recorder.address(self.hidden), self.hidden)
        recording = Recording(recorder, pools, self._layout, states=states, by_mlx=self._by_mlx)
        body = self.body(recorder.max_rows)
        recording.record(body, self._given(recorder), [hidden])
        recording.code_tails()
        if self._logits is not None and recorder.max_rows <= MAX_ROWS:
            self._record_head(recorder, recording, hidden)
        return recording

    def _given(self, recorder: Recorder) -> dict[str, Place]:
        """Return the places of the fields of the body."""
        inputs = recorder.inputs
        by_row = {
            "tokens": inputs.tokens,
            "positions": inputs.positions,
            WANTED_ROWS: inputs.wanted,
        }
        known = {name: (at, inputs.array(at)) for name, at in by_row.items()}
        known |= {name: (recorder.address(each), each) for name, each in self._read.items()}
        found = {name: Place(at, _buffer_of(at, array)) for name, (at, array) in known.items()}
        numbers = Place(recorder.address(self._numbers), buffer=None)
        placed = Place(inputs.placed, buffer=None)
        return {**found, f"{_MEDIA}placed": placed, NUMBERS: numbers}

    def _record_head(self, recorder: Recorder, recording: Recording, hidden: Buffer) -> None:
        """Record the kernels that turn hidden states into logits.

        Raises:
            UnsupportedNode: a part of the head has no kernel.
        """
        assert self._logits is not None, "there is memory for logits"
        logits = Buffer(recorder.address(self._logits), self._logits.nbytes)
        given = {HIDDEN: Place(hidden.address, hidden)}
        recording.record(self._programs.head, given, [logits])

    def _make_logits(self) -> None:
        """Allocate the logits buffer if the head has kernels."""
        outputs = self._programs.head.values[self._programs.head.outputs[0]].shape[-1]
        assert isinstance(outputs, int), "the vocabulary is fixed"
        self._logits = device_memory.unwritten((MAX_ROWS, outputs), mx.float32)
        recorder = self._recorder(MAX_ROWS)
        hidden = _buffer_of(recorder.address(self.hidden), self.hidden)
        try:
            self._record_head(recorder, Recording(recorder, {}, self._layout, states={}), hidden)
        except UnsupportedNode as error:
            log.debug("logits are computed behind graphs: %s", error)
            self._logits = None


def _rows_of(value: Value) -> mx.array:
    """Return memory for the rows of a value, `[rows, width]`."""
    width = value.shape[-1]
    assert isinstance(width, int), "the width is fixed"
    return device_memory.unwritten((WIDE_ROWS, width), value.dtype)


def _tilings(layout: KVLayout, heads: Mapping[int, int], tokens: int) -> list[Tiling]:
    """Return, for each KV group, how rows of prompts are divided.

    Args:
        heads: of the queries, by layer.
        tokens: of a block.
    """
    found = [Tiling(WIDE_ROWS)] * len(layout.groups)
    for layer, count in heads.items():
        group = layout.group[layer]
        spec = layout.groups[group].spec.attention
        assert spec is not None, "layers that attend keep keys"
        dims = spec.head_dim, spec.value_dim, spec.kv_heads
        shape = shape_of(*dims, heads=count, block_size=tokens, capped=False, sinks=False)
        own = tiling_of(shape, card(), value_in_key=spec.value_in_key)
        found[group] = min(found[group], own, key=lambda each: (each.rows, -each.heads))
    return found


def _buffer_of(address: int, array: mx.array) -> Buffer:
    """Return an array as a buffer."""
    memory = array.reshape(-1).view(mx.uint8)
    mx.eval(memory)
    return Buffer(address, array.nbytes, memory)
