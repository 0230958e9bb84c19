"""Steps in which every sequence generates one token, as one operation on the device.

Python touches a step's small arrays only: how many rows, their positions, slots, ranges and block
tables. All kernels of the decoder are recorded once for 1, 2, 4 and so on rows, on addresses that
stay: those of the weights, of the pools, and of memory between the kernels.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from quire.attention.backend import AttentionCase
from quire.attention.metadata import AttentionMetadata, build_metadata
from quire.attention.paged import cuda as paged
from quire.attention.paged import packed
from quire.attention.paged.backend import kernels_serve
from quire.attention.paged.tiles import TILE_FIELDS
from quire.cache.formats.base import LayerStore
from quire.cache.pools import Pools
from quire.cache.specs import Ints, KVLayout
from quire.core.kv_format import KVFormat
from quire.device.cuda.build import sources_digest
from quire.device.cuda.driver import Compiler, DriverError, Graph
from quire.device.cuda.products import ACTIVATIONS, Packed
from quire.device.device import current_device
from quire.device.operations import PackedWeight
from quire.engine.decode import room
from quire.engine.decode.recording import LayerPool, Recording, launches
from quire.engine.decode.sealing import runs_on_device, seal_differs
from quire.engine.inputs import StepInputs
from quire.models.base import LanguageModel
from quire.models.stack import NotTold, Stack, StackLayer
from quire.scheduler.plan import ScheduledSequence

log = logging.getLogger("quire.engine")

MOST_ROWS = 64
_MOST_ENTRIES = 1 << 18
"""Of all block tables of a step together."""
_TOLERANCE = 5e-2


class Unfit(Exception):
    """The model or the machine is not served; the message says why."""


def open_whole_decode(model: LanguageModel, layout: KVLayout, pools: Pools) -> WholeDecode | None:
    """For a model and its pools; None where nothing serves them, which a log line explains."""
    if current_device().kernel_language != "cuda":
        return None
    try:
        stack = model.stack()
        check_stack(stack, layout)
        return WholeDecode(stack, layout, pools, _extension())
    except (Unfit, NotTold, DriverError, OSError) as error:
        log.info("decode steps go layer by layer: %s", error)
        return None


class Hidden(NamedTuple):
    """Normalised hidden states `[T, hidden]`, and whether one operation computes them."""

    states: mx.array
    whole: bool


@dataclass(slots=True)
class _Graphs:
    """Of a format, by their most rows, as long as its pools are where they were."""

    addresses: tuple[tuple[int, ...], ...]
    graphs: dict[int, Graph] = field(default_factory=dict)


class WholeDecode:
    """The recorded steps of a model.

    Each number of rows is held against the model's own way once. If it differs, none is used.
    """

    def __init__(self, stack: Stack, layout: KVLayout, pools: Pools, extension: Any) -> None:
        self._stack, self._layout, self._pools = stack, layout, pools
        self._extension = extension
        self._compiler = Compiler(_cache_folder())
        groups = len(layout.groups)
        self._room = room.Room(stack, groups, MOST_ROWS, _MOST_ENTRIES, extension.pointer)
        self._out = mx.zeros((MOST_ROWS, stack.hidden_size), dtype=mx.bfloat16)
        mx.eval(self._out)
        self._recorded: dict[KVFormat, _Graphs] = {}
        self._serves_format: dict[KVFormat, bool] = {}
        self._sound: dict[tuple[KVFormat, int], bool] = {}
        """By the most rows of a graph, whether it computes what the model does."""

    def hidden(self, inputs: StepInputs, reference: Callable[[], mx.array]) -> Hidden | None:
        """Of a step; None where it must go layer by layer.

        Args:
            reference: computes them so, and writes to the pools.
        """
        if not self._serves(inputs):
            return None
        most = 1 << (len(inputs.sequences) - 1).bit_length()
        sound = self._sound.get((inputs.sequences[0].format, most))
        if sound is False:
            return None
        if sound is None:
            return Hidden(self._tried(inputs, most, reference), False)
        states = self._launched(inputs, most)
        return None if states is None else Hidden(states, True)

    def _serves(self, inputs: StepInputs) -> bool:
        rows = inputs.sequences
        if not 0 < len(rows) <= MOST_ROWS or inputs.media is not None:
            return False
        if inputs.wanted is not None or inputs.cross is not None or inputs.positions.ndim != 1:
            return False
        format = rows[0].format
        if format not in self._serves_format:
            self._serves_format[format] = self._made_for(format)
        if not self._serves_format[format]:
            return False
        return all(each.count == 1 and each.sampled == 1 and each.format == format for each in rows)

    def _made_for(self, format: KVFormat) -> bool:
        """Whether the kernels read and write it."""
        cases = [self._case(layer, format) for layer in self._stack.layers]
        if not all(map(kernels_serve, cases)):
            return False
        coded = dict.fromkeys((each.spec, each.format) for each in cases if each.format.has_tail)
        run = runs_on_device(self._compiler, self._extension)
        found = (seal_differs(*each, run) for each in coded)
        difference = next(filter(None, found), None)
        if difference is not None:
            log.warning("decode steps in %s go layer by layer: %s", format.name, difference)
        return difference is None

    def _case(self, layer: StackLayer, format: KVFormat) -> AttentionCase:
        number = layer.attention.layer
        spec = self._layout.groups[self._layout.group[number]].spec.attention
        assert spec is not None, "a stack's layers attend"
        own, tokens = format.of_layer(number), self._pools.block_tokens
        heads = layer.attention.heads
        return AttentionCase(own, spec, tokens, heads, 1, mx.bfloat16, softcap=False, sinks=False)

    def _launched(self, inputs: StepInputs, most: int) -> mx.array | None:
        graph = self._graph(most, inputs.sequences)
        told = None if graph is None else self._told(inputs.sequences)
        if graph is None or told is None:
            return None
        targets = [self._room.at(room.Place.TOKENS), self._room.at(room.Place.INPUTS)]
        arrays = [inputs.tokens, mx.array(told)]
        count = len(inputs.sequences)
        hidden: mx.array = self._extension.replay(graph.handle, arrays, targets, self._out, count)
        return hidden

    def _tried(self, inputs: StepInputs, most: int, reference: Callable[[], mx.array]) -> mx.array:
        """What the model computes; whether the recorded step does so too is known then."""
        mx.synchronize()
        expected = reference()
        mx.eval(expected, *self._pools.arrays(range(len(self._stack.layers))))
        difference: str | None
        try:
            found = self._launched(inputs, most)
            if found is None:
                return expected
            wide = expected.astype(mx.float32)
            error = mx.linalg.norm(found.astype(mx.float32) - wide) / mx.linalg.norm(wide)
            log.debug("%d rows: relative error %.2g", most, float(error))
            # Written so that a NaN is too much.
            fine = float(error) <= _TOLERANCE
            difference = None if fine else f"relative error {float(error):.2g}"
        except (DriverError, RuntimeError) as problem:
            difference = str(problem)
        self._sound[inputs.sequences[0].format, most] = difference is None
        if difference is not None:
            log.warning("decode steps of %d rows go layer by layer: %s", most, difference)
        return expected

    # -- graphs --------------------------------------------------------------------------------

    def _graph(self, most: int, rows: Sequence[ScheduledSequence]) -> Graph | None:
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
        graph = known.graphs.get(most)
        if graph is None:
            graph = known.graphs[most] = self._new_graph(most, stores, addresses)
        return graph

    def _new_graph(
        self, most: int, stores: list[LayerStore], addresses: tuple[tuple[int, ...], ...]
    ) -> Graph:
        pools = {
            layer: LayerPool(
                self._layout.group[layer],
                self._pools.block_tokens,
                addresses[layer],
                None if store.packed is None else packed.Codes.of(store.arrays()),
            )
            for layer, store in enumerate(stores)
        }
        pointer = self._extension.pointer
        recording = Recording(self._stack, pools, most, pointer, self._room, pointer(self._out))
        recorded = recording.record()
        functions = self._compiler.functions([each.source for each in recorded])
        return Graph(launches(recorded, functions), recording.tables)

    # -- a step's inputs -----------------------------------------------------------------------

    def _told(self, rows: Sequence[ScheduledSequence]) -> Ints | None:
        """What the kernels read of a step, in the places that `Room` gives; None if too much."""
        groups = len(self._layout.groups)
        start = room.table_start(MOST_ROWS, groups)
        told = np.zeros(start, np.int32)
        count = told[0] = len(rows)
        tables: list[Ints] = []
        entries = 0
        for number, group in enumerate(self._layout.groups):
            spec = group.spec.attention
            assert spec is not None, "a stack's layers attend"
            metadata = build_metadata(number, spec, rows, self._pools.block_tokens)
            _tell(told, number, metadata, entries)
            if number == 0:
                told[4 : 4 + count] = metadata.keys
            tables.append(metadata.block_table)
            entries += len(metadata.block_table)
        return None if entries > self._room.entries else np.concatenate([told, *tables])


def _tell(told: Ints, number: int, metadata: AttentionMetadata, entries: int) -> None:
    """Mutates: the rows of a KV group, whose block tables begin at entry `entries`."""
    count, slots = metadata.rows, metadata.slots
    at = room.GroupInputs.of(room.group_start(MOST_ROWS, number), MOST_ROWS)
    told[at.blocks :][:count] = slots.blocks
    told[at.offsets :][:count] = slots.offsets
    first, last = metadata.first_visible, metadata.last_visible
    visible = told[at.visible :][: 2 * count].reshape(count, 2)
    visible[:, 0], visible[:, 1] = first, last
    if metadata.tails is not None:
        told[at.tails :][:count] = metadata.tails
        coded, own = packed.tiles_of(metadata)
        coded[:, 4] += entries
        told[at.coded :][: coded.size] = coded.reshape(-1)
        told[at.own :][: own.size] = own.reshape(-1)
    tiles = told[at.tiles :][: TILE_FIELDS * count].reshape(count, TILE_FIELDS)
    tiles[:, 0] = tiles[:, 5] = np.arange(count)
    tiles[:, 1] = 1
    tiles[:, 2], tiles[:, 3] = first, last + 1
    tiles[:, 4] = metadata.table_starts[:-1] - metadata.first_blocks + entries


# -- what is served --------------------------------------------------------------------------------


def check_stack(stack: Stack, layout: KVLayout) -> None:
    """Whether the kernels are made for a model.

    Raises:
        Unfit: they are not.
    """
    _check_matrix(stack.embedding)
    for number, layer in enumerate(stack.layers):
        _check(layer, number, layout)


def _check(layer: StackLayer, number: int, layout: KVLayout) -> None:
    """Raises `Unfit` for a layer that the kernels are not made for."""
    attention = layer.attention
    if layout.owner[number] != number or attention.layer != number:
        raise Unfit("a layer reads another's keys")
    spec = layout.groups[layout.group[number]].spec.attention
    if spec is None or spec.value_in_key or spec.value_dim != attention.head_dim:
        raise Unfit("values differ from keys")
    if attention.head_dim not in paged.VALUE_DIMS:
        raise Unfit(f"heads of {attention.head_dim}")
    matrices = [attention.q, attention.k, attention.o]
    if attention.v is not None:
        matrices.append(attention.v)
    for part in (layer.mlp, layer.experts):
        if part is None:
            continue
        if part.activation not in ACTIVATIONS:
            raise Unfit(f"the activation {part.activation}")
        if part.gate.packing != part.up.packing:
            raise Unfit("gate and up are packed differently")
        matrices += [part.gate, part.up, part.down]
    if layer.experts is not None:
        count = layer.experts.gate.codes.shape[0]
        if count % 32 or count > 1024 or layer.experts.k > 32:
            raise Unfit(f"{layer.experts.k} of {count} experts")
        matrices.append(layer.experts.router)
    for weight in matrices:
        _check_matrix(weight)
    if any(each.dtype != mx.bfloat16 for each in _vectors(layer)):
        raise Unfit("norms of another type than bfloat16")


def _vectors(layer: StackLayer) -> list[mx.array]:
    """What multiplies rows element by element."""
    found = [layer.input_norm, layer.attention_post_norm, layer.post_norm, layer.scalar]
    found += [layer.attention.q_norm, layer.attention.k_norm]
    if layer.mlp is not None:
        found += [layer.mlp.norm, layer.mlp.post_norm]
    if layer.experts is not None:
        own = layer.experts
        found += [own.norm, own.post_norm, own.router_norm, own.per_expert]
    return [each for each in found if each is not None]


def _check_matrix(weight: PackedWeight) -> None:
    packing = weight.packing
    if weight.biases is None:
        raise Unfit(f"codes in mode {packing.mode}")
    known = Packed(weight.codes, weight.scales, weight.biases, packing.group_size, packing.bits)
    if not known.readable_by_kernels:
        raise Unfit(f"codes of {packing.bits} bits in groups of {packing.group_size}")


def _extension() -> Any:
    """The extension that launches graphs; raises `Unfit` where there is none for this MLX."""
    try:
        extension = importlib.import_module("quire.device.cuda._cuda")
    except ImportError as error:
        raise Unfit(f"the extension for CUDA graphs is missing ({error})") from error
    if (mlx := version("mlx")) != extension.MLX_VERSION:
        raise Unfit(f"the extension was built for MLX {extension.MLX_VERSION}, this is {mlx}")
    if sources_digest() != extension.SOURCES:
        raise Unfit("the extension was built from other sources")
    return extension


def _cache_folder() -> Path | None:
    """Where compiled kernels are kept: beside those of MLX, in the process's private place."""
    folder = os.environ.get("MLX_PTX_CACHE_DIR")
    return None if folder is None else Path(folder, "quire")
