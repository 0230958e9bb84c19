"""Runs encoders of media as CUDA graphs: a recording for each item shape and number of items.

Kernels compute what has rows: products, norms, rotations and elements. Between two graphs MLX
computes the rest: attention, and where patches are read and merged.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import mlx.core as mx
import numpy as np

from quire.cache.specs import KVLayout
from quire.core.figures import size
from quire.core.media import MediaItem
from quire.device.cuda.compiled import compiler
from quire.device.cuda.driver import DriverError, card
from quire.device.cuda.extension import Extension
from quire.device.gpu_kernels import in_device_memory
from quire.executor.agreement import whole_error
from quire.executor.encoder_cache import Encoded
from quire.executor.graphs import device_memory
from quire.executor.graphs.attention.coding_check import DeviceRunner
from quire.executor.graphs.between import buffered
from quire.executor.graphs.coverage import Survey
from quire.executor.graphs.layout import InputLayout
from quire.executor.graphs.operands import UnsupportedNode
from quire.executor.graphs.places import Place
from quire.executor.graphs.products.library_products import open_library
from quire.executor.graphs.recorder import Buffer, Recorder
from quire.executor.graphs.recording import Recording
from quire.executor.graphs.step_graphs import RecordedStep, StepLaunch
from quire.models.base import Encoding, LanguageModel
from quire.program.encoder_rows import RowProgram
from quire.program.passes import PRODUCTS, RESHAPES
from quire.program.trace import trace_encoder
from quire.program.values import FUSED, Node, Program, bound

log = logging.getLogger("quire.engine")

MOST_ROWS = 4096
"""Most rows of a graph. A larger encoding takes the device long enough to hide the host's work."""
_MOST_PIECES = 64
"""Most pieces of an item with graphs. A video of more has a program of thousands of nodes."""
CALLS = 8
"""Calls by which an item shape has to come before it is traced. Tracing and recording take as long
as graphs save in some hundred calls. Each later call does one piece of this work, because streams
wait meanwhile.
"""
_MOST_SHAPES = 16
"""Most item shapes with graphs; those of the least recently used shape are dropped."""
_TOLERANCE = 5e-2
"""Largest relative error of a graph's rows beside the encoder's."""
_SURVEYED_ROWS = 64
_NO_LAYERS = KVLayout.of(())
_DONE = object()


@dataclass(eq=False)
class _Graphs:
    """The graphs that encode a number of items of one shape.

    Attributes:
        program: what they compute.
        features: where they read the features.
        outputs: where they leave the rows, by value.
        nbytes: of features, outputs and tables.
        serves: whether they compute the encoder's rows in less time; None before that is known.
    """

    program: RowProgram
    step: RecordedStep
    nbytes: int
    features: Buffer
    outputs: Mapping[int, Buffer]
    serves: bool | None = None


@dataclass(eq=False)
class _Shape:
    """An item shape: how often it came, and its graphs.

    Attributes:
        calls: number of calls so far, up to `CALLS`.
        program: the traced program; None before that many calls.
        graphs: by number of items; None where they are not recorded yet, or cannot be.
        work: the pieces that are left of tracing and recording graphs; None while there are none.
    """

    calls: int = 0
    program: Program | None = None
    graphs: dict[int, _Graphs | None] = field(default_factory=dict)
    work: Iterator[None] | None = None


class EncoderGraphs:
    """The CUDA graphs of a model's encoders. Owned by an executor.

    A shape is traced and recorded in the calls that follow its first `CALLS`, a piece in each. Then
    its kernels are compiled in the background. Its first graphed items are encoded by the encoder
    as well: graphs serve only if they agree with it and take less time.

    Args:
        max_bytes: memory that they may take. A shape whose graphs need more has none.

    Attributes:
        made: number of calls that traced, recorded or checked, which takes long.
    """

    def __init__(self, model: LanguageModel, extension: Extension, max_bytes: int) -> None:
        self.made = 0
        self.max_bytes = max_bytes
        self._model, self._encoders = model, model.encoders
        self._extension, self._compiler = extension, compiler()
        self._library = open_library(DeviceRunner(self._compiler, extension), card())
        self._inputs = InputLayout(0, max_rows=1, entries=1, address=extension.pointer)
        self._done = device_memory.unwritten((MOST_ROWS, 1), mx.float32)
        """The output of each launch: empty memory, which later operations wait for."""
        self._shapes: OrderedDict[tuple[str, tuple[int, ...]], _Shape] = OrderedDict()
        """By kind and shape, the least recently used first."""
        self._memory: list[mx.array] = []
        """Memory for the values of all graphs, which run one after the other."""
        self._copies: dict[int, tuple[mx.array, mx.array]] = {}
        self._last: Encoded = ()
        """The rows encoded last: the next graph writes where they were copied from."""

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that graphs read and write."""
        graphs = (each for known in self._shapes.values() for each in known.graphs.values())
        own = sum(each.nbytes for each in graphs if each is not None)
        return own + sum(each.nbytes for each in self._memory)

    def encode(self, items: Sequence[MediaItem], features: mx.array) -> Encoding:
        """Encode items of one kind and shape. A graph computes all pieces with the first one.

        Args:
            features: of all items, one after the other.
        """
        some = items[0]
        encoder = self._encoders[some.kind]
        graphs = self._ready(some.kind, some.shape, len(items))
        if graphs is None:
            return (yield from encoder.encode(features, some.shape))
        if graphs.serves is None:
            rows = self._checked(graphs, features, lambda: encoder(features, some.shape))
        else:
            rows = self._run(graphs, features)
        for _ in range(encoder.pieces(some.shape).count - 1):
            yield rows
        return rows

    def _ready(self, kind: str, shape: tuple[int, ...], items: int) -> _Graphs | None:
        """Return the graphs of items; None if the encoder is to compute them."""
        pieces = self._encoders[kind].pieces(shape)
        if pieces.rows * items > MOST_ROWS or pieces.count > _MOST_PIECES:
            return None
        known = self._shapes.setdefault((kind, shape), _Shape())
        self._shapes.move_to_end((kind, shape))
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.popitem(last=False)
        if known.calls < CALLS:
            known.calls += 1
            return None
        if known.work is None and items not in known.graphs:
            known.graphs[items] = None
            known.work = self._work(known, kind, shape, items=items)
        if known.work is not None:
            self.made += 1
            if next(known.work, _DONE) is _DONE:
                known.work = None
            return None
        try:
            return self._compiled(known.graphs[items])
        except Exception as problem:  # of the compiler, or of what it was given
            known.graphs[items] = None
            _log_disabled(kind, shape, problem)
            return None

    def _work(self, known: _Shape, kind: str, shape: tuple[int, ...], items: int) -> Iterator[None]:
        """Trace and record the graphs of a number of items, in pieces."""
        try:
            if known.program is None:
                known.program = yield from trace_encoder(self._model, kind, shape)
                yield
            known.graphs[items] = yield from self._record(known.program, items)
        except Exception as problem:  # an extension's encoder may raise any, traced
            _log_disabled(kind, shape, problem)

    def _compiled(self, found: _Graphs | None) -> _Graphs | None:
        """Return graphs that serve or may serve, when their kernels are compiled."""
        if found is None or found.serves is False:
            return None
        if not found.step.functions:
            if not self._compiler.start(found.step.sources):
                return None
            found.step.functions = self._compiler.functions(found.step.sources)
        return found

    def _run(self, graphs: _Graphs, features: mx.array) -> Encoded:
        """Launch the graphs of items; return their rows."""
        program, rows = graphs.program.program, graphs.program.rows
        (given,) = mx.depends([features], self._last) if self._last else (features,)
        first = {
            "inputs": [given],
            "targets": [graphs.features.address],
            "numbers": np.array([rows], np.int32).tobytes(),
            "numbers_target": self._inputs.rows,
        }
        launch = StepLaunch(self._extension, self._done, rows, first=first)
        output = launch.run(graphs.step.graphs(()))
        found = buffered(program, graphs.outputs, output, rows=rows)
        self._last = tuple(found[id] + 0 for id in program.outputs)  # copies
        return self._last

    def _checked(
        self, graphs: _Graphs, features: mx.array, eagerly: Callable[[], Encoded]
    ) -> Encoded:
        """Decide whether graphs serve. Return the encoder's own rows.

        Args:
            eagerly: encodes by the encoder.
        """
        self.made += 1
        expected = eagerly()
        mx.eval(expected)
        graphs.serves = False
        try:
            found = self._run(graphs, features)
            error = max(whole_error(*each) for each in zip(found, expected, strict=True))
        except (DriverError, RuntimeError) as failure:
            log.warning("CUDA graphs of an encoder disabled: %s", failure)
            return expected
        if error > _TOLERANCE:
            log.warning("CUDA graphs of an encoder disabled: relative error %.2g", error)
        elif takes_less(lambda: self._run(graphs, features), eagerly):
            graphs.serves = True
        else:
            log.info("CUDA graphs of an encoder take longer than MLX; it runs eagerly")
        return expected

    # -- recording -----------------------------------------------------------------------------

    def _record(self, traced: Program, items: int) -> Generator[None, None, _Graphs]:
        """Record the graphs of a number of items, in pieces.

        Raises:
            UnsupportedNode: kernels compute too little of the program, or memory does not suffice.
        """
        program = yield from RowProgram.of(traced, items)
        if not 0 < program.rows <= MOST_ROWS:
            raise UnsupportedNode(f"its products have {program.rows} rows")
        yield
        by_mlx = yield from surveyed_in_pieces(program, self._recorder(_SURVEYED_ROWS))
        yield
        started = time.perf_counter()
        recorder = self._recorder(1 << (program.rows - 1).bit_length())
        recording = Recording(recorder, {}, _NO_LAYERS, states={}, by_mlx=by_mlx)
        given, outputs = places_of(program, recorder)
        yield from recording.record_in_pieces(program.program, given, list(outputs.values()))
        before = {id(each) for each in (*recorder.spare, *recorder.allocated)}
        own = sum(each.nbytes for each in recorder.kept if id(each) not in before)
        needed = self.nbytes + own + sum(each.nbytes for each in recorder.allocated)
        if needed > self.max_bytes:
            raise UnsupportedNode(f"{size(needed)} of {size(self.max_bytes)} would be used")
        self._memory += recorder.allocated
        step = RecordedStep(
            recorder, (), recording.segments, nodes=recording.recorded, started=started
        )
        features = given["features"].buffer
        assert features is not None, "features have memory"
        return _Graphs(program, step, own, features=features, outputs=outputs)

    def _recorder(self, max_rows: int) -> Recorder:
        pointer, spare = self._extension.pointer, tuple(self._memory)
        given = max_rows, pointer, self._inputs
        return Recorder(
            *given, card=card(), copies=self._copies, library=self._library, spare=spare
        )


def _log_disabled(kind: str, shape: tuple[int, ...], problem: Exception) -> None:
    log.info("CUDA graphs of %s items of shape %s disabled: %s", kind, shape, problem)


def surveyed_in_pieces(
    program: RowProgram, recorder: Recorder
) -> Generator[None, None, list[Node]]:
    """Find the nodes that MLX computes between graphs.

    Args:
        recorder: is written to.

    Raises:
        UnsupportedNode: they have more than half of the products, or MLX cannot read what kernels
            compute.
    """
    nodes = [each for each in program.program.nodes if each.kind not in RESHAPES]
    others = [each for each in nodes if not program.has_rows(each)]
    survey = Survey(recorder, {}, _NO_LAYERS, states={}, by_mlx=others)
    given, outputs = places_of(program, recorder)
    yield from survey.record_in_pieces(program.program, given, list(outputs.values()))
    found = [*others, *(node for node, _ in survey.unsupported)]
    left, whole = (sum(map(product_count, each)) for each in (found, nodes))
    if 2 * left > whole:
        raise UnsupportedNode(f"{left} of {whole} products have no kernel")
    return found


def product_count(node: Node) -> int:
    """Return the number of products that a node computes."""
    nodes = node.arguments if node.kind == FUSED else (node,)
    return sum(each.kind in PRODUCTS for each in nodes)


def places_of(
    program: RowProgram, recorder: Recorder
) -> tuple[dict[str, Place], dict[int, Buffer]]:
    """Allocate memory for the features and the outputs of a program. Return the places of its
    fields by name, and its outputs' buffers by value.
    """
    own = program.program
    tables = {name: in_device_memory(each).view(mx.uint8) for name, each in program.tables.items()}
    mx.eval(tables)
    sizes = dict.fromkeys(own.symbols, recorder.max_rows)

    def unwritten(value: int) -> Buffer:
        kind = own.values[value]
        size = prod(bound(kind.shape, sizes)) * kind.dtype.size
        return recorder.held(device_memory.unwritten((size,), mx.uint8))

    buffers = {name: recorder.held(each) for name, each in tables.items()}
    buffers["features"] = unwritten(own.fields["features"])
    given = {name: Place(each.address, each) for name, each in buffers.items()}
    return given, {value: unwritten(value) for value in own.outputs}


def takes_less(a: Callable[[], Encoded], b: Callable[[], Encoded]) -> bool:
    """Return whether the first of two ways to encode takes less time, once each has run."""
    seconds = list[float]()
    for encode in (a, b):
        mx.synchronize()
        started = time.perf_counter()
        mx.eval(encode())
        seconds.append(time.perf_counter() - started)
    return seconds[0] < seconds[1]
