"""Steps of few rows, as one operation on the device: sequences generate, or read short prompts.

Python touches a step's small arrays only: how many rows, their positions, slots, ranges and block
tables. All kernels of the decoder are recorded once for 1, 2, 4 and so on rows, on addresses that
stay: those of the weights, of the pools, and of memory between the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionCase
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.paged import packed
from quire.attention.paged.tiles import TILE_FIELDS
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
from quire.engine.decode import workspace
from quire.engine.decode.coding_check import DeviceRunner
from quire.engine.decode.pools import kind_of
from quire.engine.decode.recorder import Recorder, launches
from quire.engine.decode.recording import Recording
from quire.engine.decode.served import MOST_ROWS, UnsupportedStack, check_stack, has_head
from quire.engine.inputs import StepInputs
from quire.models.base import LanguageModel
from quire.models.stack import Stack, StackLayer, UnsupportedModel
from quire.scheduler.plan import ScheduledSequence
from quire.scheduler.positions import alike

log = logging.getLogger("quire.engine")

_MOST_ENTRIES = 1 << 18
"""Of all block tables of a step together."""


def open_whole_decode(
    model: LanguageModel,
    layout: KVLayout,
    pools: Pools,
    identity: str,
    *,
    batch_invariant: bool = False,
) -> WholeDecode | None:
    """For a model and its pools; None where nothing serves them, which a log line explains.

    Args:
        identity: of the weights; verified steps are recorded by it.
        batch_invariant: see `WholeDecode`.

    Raises:
        ModelError: `batch_invariant` is asked for, and nothing serves them.
    """
    if current_device().kernel_language != "cuda":
        return None
    try:
        stack = model.stack()
        check_stack(stack, layout, card(), batch_invariant=batch_invariant)
        if batch_invariant and not has_head(stack, card()):
            raise UnsupportedStack("the head is not packed in 4 bits, or too wide")
        return WholeDecode(
            stack,
            model.logits,
            layout,
            pools,
            identity,
            load_extension(),
            batch_invariant=batch_invariant,
        )
    except (UnsupportedStack, UnsupportedModel, NoExtension, DriverError, OSError) as error:
        if batch_invariant:
            raise ModelError(f"batch-invariant: {error}") from error
        log.info("decode steps go layer by layer: %s", error)
        return None


class Computed(NamedTuple):
    """A step's normalised hidden states `[T, hidden]`, or its logits `[T, vocab]`.

    Attributes:
        whole: whether one operation computes them, into memory that the next step writes to again.
    """

    rows: mx.array
    logits: bool
    whole: bool


@dataclass(slots=True)
class _Graphs:
    """Of a format, by the rows they are recorded for, as long as its pools are where they were."""

    addresses: tuple[tuple[int, ...], ...]
    graphs: dict[int, Graph] = field(default_factory=dict)


class WholeDecode:
    """The recorded steps of a model.

    A sequence may have several rows: some of its prompt, or drafts. In formats with tails these lie
    in one block: rows of the next one would read its codes, which are there when the step ends.

    Each number of rows is held against the model's own way once. If it differs, none is used.

    Args:
        logits: of hidden states, the model's own way.
        identity: of the weights.
        batch_invariant: every step is computed so, those that read prompts too, and a row's bits
            do not depend on the other rows.
    """

    def __init__(
        self,
        stack: Stack,
        logits: Callable[[mx.array], mx.array],
        layout: KVLayout,
        pools: Pools,
        identity: str,
        extension: Extension,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self._stack, self._layout, self._pools = stack, layout, pools
        self._logits_of = logits
        self._extension = extension
        self._compiler = compiler()
        groups = len(layout.groups)
        self._workspace = workspace.Workspace(
            stack, groups, MOST_ROWS, _MOST_ENTRIES, extension.pointer
        )
        self._out = mx.zeros((MOST_ROWS, stack.hidden_size), dtype=mx.bfloat16)
        self._logits: mx.array | None = None
        if has_head(stack, card()):
            assert stack.head is not None
            self._logits = mx.zeros((MOST_ROWS, stack.head.weight.codes.shape[0]))
            mx.eval(self._logits)
        mx.eval(self._out)
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

    def computed(self, inputs: StepInputs, reference: Callable[[], mx.array]) -> Computed | None:
        """What a step computes; None where it must go layer by layer.

        Args:
            reference: computes hidden states so, and writes to the pools.

        Raises:
            EngineFailure: rows must be batch-invariant, and cannot be.
        """
        if self._batch_invariant:
            return self._invariant_rows(inputs, reference)
        if not self._serves(inputs):
            return None
        max_rows = _max_rows(inputs.sequences)
        verified = self._known(inputs.sequences[0].format, max_rows)
        if verified is False:
            return None
        if verified is None:
            return Computed(self._tried(inputs, max_rows, reference), False, False)
        rows = self._launched(inputs, max_rows)
        return None if rows is None else Computed(rows, self._logits is not None, True)

    def _invariant_rows(self, inputs: StepInputs, reference: Callable[[], mx.array]) -> Computed:
        format, max_rows = inputs.sequences[0].format, _max_rows(inputs.sequences)
        # A prompt's rows are not tried: the model may go on with the last of them alone.
        if inputs.wanted is None and self._known(format, max_rows) is None:
            self._tried(inputs, max_rows, reference)
        rows = None
        if self._known(format, max_rows) is not False and self._within_blocks(inputs.sequences):
            rows = self._launched(inputs, max_rows)
            if rows is None:  # something is still to be done to the pools
                mx.eval(*self._pools.arrays(range(len(self._stack.layers))))
                rows = self._launched(inputs, max_rows)
        if rows is None:
            raise EngineFailure(f"batch-invariant: steps of {max_rows} rows cannot be computed")
        return Computed(rows, logits=True, whole=True)

    def _known(self, format: KVFormat, max_rows: int) -> bool | None:
        """What was found out, here or at an earlier start, of steps of so many rows."""
        key = format, max_rows
        if key not in self.verified and key not in self._unknown:
            if verified_kernels().holds(self._verification(format, max_rows)):
                self.verified[key] = True
            else:
                self._unknown.add(key)  # asked once: planning asks at each step
        return self.verified.get(key)

    def _serves(self, inputs: StepInputs) -> bool:
        rows = inputs.sequences
        if not 0 < sum(each.count for each in rows) <= MOST_ROWS:
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

    def rows_together(self, format: KVFormat) -> int:
        """Rows of a step that is likely to be recorded, several of a sequence among them.

        In formats with tails those of a sequence must lie in one block.

        Returns:
            0 where no step is.
        """
        if not self.serves_format(format):
            return 0
        rows = MOST_ROWS
        while rows > 1 and self._known(format, rows) is False:
            rows //= 2
        return rows if rows > 1 else 0

    def serves_format(self, format: KVFormat) -> bool:
        """Whether the kernels read and write it; found out once."""
        if format not in self._formats:
            self._formats[format] = self._tried_coding(format)
        return self._formats[format]

    def _tried_coding(self, format: KVFormat) -> bool:
        cases = [self._case(layer, format) for layer in self._stack.layers]
        if not all(kind_of(each.format).serves(each) for each in cases):
            return False
        runner = DeviceRunner(self._compiler, self._extension)
        for case in dict.fromkeys(cases):
            verification = Verification(Check.CODING_AGREES, case)
            if verified_kernels().holds(verification):
                continue
            if (difference := kind_of(case.format).differs(case, runner)) is not None:
                log.warning("decode steps in %s go layer by layer: %s", format.name, difference)
                return False
            verified_kernels().add(verification)
        return True

    def _case(self, layer: StackLayer, format: KVFormat) -> AttentionCase:
        number = layer.attention.layer
        spec = self._layout.groups[self._layout.group[number]].spec.attention
        assert spec is not None, "a stack's layers attend"
        own, tokens = format.of_layer(number), self._pools.block_size
        heads = layer.attention.heads
        return AttentionCase(own, spec, tokens, heads, 1, mx.bfloat16, softcap=False, sinks=False)

    def _launched(self, inputs: StepInputs, max_rows: int) -> mx.array | None:
        graph = self._graph(max_rows, inputs.sequences)
        numbers = None if graph is None else self._input_numbers(inputs.sequences)
        if graph is None or numbers is None:
            return None
        return self._extension.replay(
            graph=graph.handle,
            inputs=[inputs.tokens],
            targets=[self._workspace.at(workspace.Buffer.TOKENS)],
            workspace=self._out if self._logits is None else self._logits,
            rows=sum(each.count for each in inputs.sequences),
            numbers=numbers.tobytes(),
            numbers_target=self._workspace.at(workspace.Buffer.INPUTS),
        )

    def _tried(
        self, inputs: StepInputs, max_rows: int, reference: Callable[[], mx.array]
    ) -> mx.array:
        """What the model computes; whether the recorded step does so too is known then."""
        mx.synchronize()
        expected = reference()
        mx.eval(expected, *self._pools.arrays(range(len(self._stack.layers))))
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
        if difference is not None:
            log.warning("decode steps of %d rows go layer by layer: %s", max_rows, difference)
        return expected

    def _verification(self, format: KVFormat, max_rows: int) -> Verification:
        """Return the verification that steps of `max_rows` rows agree with the model."""
        subject = self._identity, format, max_rows, self._batch_invariant
        return Verification(Check.DECODE_STEPS_AGREE, subject)

    # -- graphs --------------------------------------------------------------------------------

    def _graph(self, max_rows: int, rows: Sequence[ScheduledSequence]) -> Graph | None:
        """Recorded for the pools as they are; None while something is still to be done to them."""
        format = rows[0].format
        stores = [
            self._pools.kv(self._layout.group[layer], format).layers[layer]
            for layer in range(len(self._stack.layers))
        ]
        pointer = self._extension.pointer
        addresses = tuple(tuple(map(pointer, each.arrays())) for each in stores)
        if not all(map(all, addresses)):
            return None
        known = self._recorded.get(format)
        if known is None or known.addresses != addresses:
            known = self._recorded[format] = _Graphs(addresses)
        graph = known.graphs.get(max_rows)
        if graph is None:
            graph = known.graphs[max_rows] = self._new_graph(max_rows, stores)
        return graph

    def _new_graph(self, max_rows: int, stores: list[LayerStore]) -> Graph:
        pointer = self._extension.pointer
        pools = {
            layer: kind_of(store.format).of(store, self._layout.group[layer], pointer)
            for layer, store in enumerate(stores)
        }
        recorder = Recorder(
            max_rows,
            pointer,
            self._workspace,
            card(),
            batch_invariant=self._batch_invariant,
            copies=self._copies,
        )
        out = pointer(self._out)
        logits = None if self._logits is None else pointer(self._logits)
        Recording(self._stack, pools, recorder, out, logits).record()
        functions = self._compiler.functions([each.source for each in recorder.kernels])
        return Graph(launches(recorder.kernels, functions), recorder.kept)

    # -- a step's inputs -----------------------------------------------------------------------

    def _input_numbers(self, rows: Sequence[ScheduledSequence]) -> Ints | None:
        """A step's inputs but for its tokens, laid out as in `Workspace`.

        None if they are too many, or the kernels' rotation is not that of the rows.
        """
        groups = len(self._layout.groups)
        start = workspace.table_start(MOST_ROWS, groups)
        numbers = np.zeros(start, np.int32)
        numbers[0] = sum(each.count for each in rows)
        if not write_positions(numbers, rows):
            return None
        tables: list[Ints] = []
        entries = 0
        for number, group in enumerate(self._layout.groups):
            spec = group.spec.attention
            assert spec is not None, "a stack's layers attend"
            metadata = build_metadata(number, spec, rows, self._pools.block_size)
            write_group(numbers, number, metadata, entries)
            tables.append(metadata.block_table)
            entries += len(metadata.block_table)
        return None if entries > self._workspace.entries else np.concatenate([numbers, *tables])


def write_positions(numbers: Ints, rows: Sequence[ScheduledSequence]) -> bool:
    """Mutates: a step's inputs get each row's position as float32.

    False if a row's position is another on another axis.
    """
    found = [positions for each in rows if (positions := alike(each.positions)) is not None]
    if len(found) < len(rows):
        return False
    positions = np.concatenate(found)
    numbers[4 : 4 + len(positions)] = positions.view(np.int32)
    return True


def write_group(numbers: Ints, group: int, metadata: AttentionMetadata, entries: int) -> None:
    """Mutates: a step's inputs get its rows in a KV group, as `workspace.GroupInputs` says.

    Args:
        entries: of the block tables, those before the group's.
    """
    count, slots = metadata.rows, metadata.slots
    at = workspace.GroupInputs.of(workspace.group_start(MOST_ROWS, group), MOST_ROWS)
    numbers[at.blocks :][:count] = slots.blocks
    numbers[at.offsets :][:count] = slots.offsets
    first, last = metadata.first_visible, metadata.last_visible
    visible = numbers[at.visible :][: 2 * count].reshape(count, 2)
    visible[:, 0], visible[:, 1] = first, last
    if metadata.tails is not None:
        numbers[at.tails :][:count] = metadata.by_row(metadata.tails)
        coded, own = packed.tiles_of(metadata)
        coded[:, 4] += entries
        numbers[at.coded :][: coded.size] = coded.reshape(-1)
        numbers[at.own :][: own.size] = own.reshape(-1)
    tiles = numbers[at.tiles :][: TILE_FIELDS * count].reshape(count, TILE_FIELDS)
    tiles[:, 0] = np.arange(count)
    tiles[:, 1] = 1
    tiles[:, 2], tiles[:, 3] = first, last + 1
    places = metadata.table_starts[:-1] - metadata.first_blocks + entries
    fresh = metadata.keys[metadata.query_starts[:-1]]
    tiles[:, 4], tiles[:, 5] = metadata.by_row(places), metadata.by_row(fresh)


def in_one_block(rows: ScheduledSequence, block_size: int) -> bool:
    """Whether a sequence's rows lie in one block."""
    return rows.start % block_size + rows.count <= block_size


def _max_rows(rows: Sequence[ScheduledSequence]) -> int:
    """The rows that the graph of a step is recorded for."""
    return 1 << (sum(each.count for each in rows) - 1).bit_length()
