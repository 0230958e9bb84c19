"""Encoders as CUDA graphs, on an emulated card."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import NoRoom
from quire.core.media import MediaItem
from quire.device.device import current_device
from quire.engine.engine import Engine
from quire.executor import factory
from quire.executor.agreement import whole_error
from quire.executor.encoder_cache import Encoded, EncoderCache
from quire.executor.graphs import encoders, recording
from quire.executor.graphs.encoders import EncoderGraphs
from quire.executor.graphs.executor import GraphExecutor
from quire.executor.graphs.recording import Recording
from quire.models.base import LanguageModel, finished
from quire.program import passes, trace
from quire.program.trace import trace_encoder
from quire.program.values import FUSED, Program
from quire.scheduler.plan import EncoderWork, StepPlan, StepResult
from tests.engine.test_image_parity import showing
from tests.executor.graphs.recorded import opened
from tests.support.emulated_card import EmulatedExtension, emulate_card
from tests.support.emulated_metal import why_not
from tests.support.everyday import everyday
from tests.support.media_items import CONFIGS, random_features, shape_for
from tests.support.packed_models import packed_model
from tests.support.parity import Company, executor_of, prompts
from tests.support.tiny_models import gemma4_vision_config

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

_GROWN = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2}


def _with_vision(config: dict[str, Any], **vision: Any) -> dict[str, Any]:
    return config | {"vision_config": config["vision_config"] | vision}


FAMILIES: dict[str, dict[str, Any]] = {
    # Its matrices are those that tensor cores multiply by.
    "gemma4": _with_vision(gemma4_vision_config(), **_GROWN, num_key_value_heads=2, head_dim=64),
    "qwen3_vl": CONFIGS["qwen3_vl"],  # levels
    "qwen2_5_vl": CONFIGS["qwen2_5_vl"],  # windows
    "gemma3": CONFIGS["gemma3"],  # SigLIP
    "lfm2_vl": CONFIGS["lfm2_vl"],  # SigLIP, any shape
}
SHAPE = (4, 8)
MEMORY = 64 << 20
PIECES = 14
"""Calls that trace and record graphs: at three numbers of items, which are then merged, by eight
passes, and by two recordings."""


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> EmulatedExtension:
    monkeypatch.setattr(encoders, "CALLS", 1)
    return emulate_card(monkeypatch)


def unpacked(config: dict[str, Any]) -> LanguageModel:
    """Return a model with random weights in bfloat16."""
    mx.random.seed(0)
    return packed_model(config, lambda model: None)


def item(shape: tuple[int, ...], digest: bytes = b"") -> MediaItem:
    return MediaItem("image", b"", shape, 1, digest)


def prepare(
    graphs: EncoderGraphs, model: LanguageModel, shape: tuple[int, ...], count: int = 1
) -> int:
    """Encode items until their graphs are recorded. Return the number of pieces that this took."""
    features, before = random_features(model, "image", shape, count), graphs.made
    known = graphs._shapes.setdefault(("image", shape), encoders._Shape())
    while count not in known.graphs or known.work is not None:
        finished(graphs.encode([item(shape)] * count, features))
    return graphs.made - before


@pytest.mark.parametrize("family", everyday(FAMILIES, "gemma4".__eq__))
def test_graphs_compute_what_the_encoder_does(family: str, extension: EmulatedExtension) -> None:
    """The same graphs for other features and for several items, in turns."""
    model = unpacked(FAMILIES[family])
    encoder, graphs = model.encoders["image"], EncoderGraphs(model, extension, MEMORY)
    shape = shape_for(encoder)
    counts = (1, 2) if encoder.takes_several else (1,)
    for count in counts:
        prepare(graphs, model, shape, count)
    for turn in range(2):
        for count in counts:
            features = random_features(model, "image", shape, count)
            features = (features + turn).astype(mx.uint8)
            rows = finished(graphs.encode([item(shape)] * count, features))
            for ours, theirs in zip(rows, encoder(features, shape), strict=True):
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
                assert whole_error(ours, theirs) < 0.02
    (known,) = graphs._shapes.values()
    assert {count: each and each.serves for count, each in known.graphs.items()} == dict.fromkeys(
        counts, True
    )


def test_items_are_encoded_in_the_pieces_of_plans(extension: EmulatedExtension) -> None:
    """Pieces of other items of the shape may come between."""
    model = unpacked(FAMILIES["gemma4"])
    encoder, graphs = model.encoders["image"], EncoderGraphs(model, extension, MEMORY)
    pieces = encoder.pieces(SHAPE)
    drawn = random_features(model, "image", SHAPE)
    features = {bytes([n]): (drawn * (2 * n + 1)).astype(mx.uint8) for n in range(4)}
    items = [item(SHAPE, digest) for digest in features]
    given = {each.key: bytes(memoryview(features[each.digest])) for each in items}
    cache = EncoderCache(model.encoders, given.__getitem__, encode=graphs.encode)
    prepare(graphs, model, SHAPE)

    def work(number: int, first: int, count: int) -> list[EncoderWork]:
        completes = first + count == pieces.count
        group = number + 1
        return [EncoderWork(items[number], first, count, pieces.rows, completes, group=group)]

    for number in (0, 1):
        mx.eval(cache.advance(work(number, 0, pieces.count)))
    for first in range(pieces.count):
        for number in (2, 3):
            mx.eval(cache.advance(work(number, first, 1)))
    (known,) = graphs._shapes.values()
    assert known.graphs[1] is not None
    for each in items:
        (expected,) = encoder(features[each.digest], SHAPE)
        assert whole_error(cache._made[each.key][0], expected) < 0.02


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes that are traced."""
    found: list[tuple[int, ...]] = []

    def noted(
        model: LanguageModel, kind: str, shape: tuple[int, ...]
    ) -> Generator[None, None, Program]:
        found.append(shape)
        return trace_encoder(model, kind, shape)

    monkeypatch.setattr(encoders, "trace_encoder", noted)
    return found


def test_shapes_that_come_again_have_graphs(
    extension: EmulatedExtension, traced: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "_MOST_SHAPES", 2)
    model = unpacked(FAMILIES["gemma4"])
    graphs = EncoderGraphs(model, extension, MEMORY)
    asked = [(2, 4), (4, 4), (2, 4), (4, 6), (2, 4), (4, 4), (4, 4), (2, 4), (2, 4)]
    for shape in asked:
        finished(graphs.encode([item(shape)], random_features(model, "image", shape)))
    assert list(graphs._shapes) == [("image", (4, 4)), ("image", (2, 4))]
    assert traced == [(2, 4), (4, 4)], "(2, 4) stays, (4, 4) was dropped for (4, 6) and came again"


@pytest.mark.parametrize(("wrong", "slow"), [(True, False), (False, True)])
def test_graphs_that_differ_or_take_longer_do_not_serve(
    extension: EmulatedExtension, monkeypatch: pytest.MonkeyPatch, wrong: bool, slow: bool
) -> None:
    model = unpacked(FAMILIES["gemma4"])
    graphs, runs = EncoderGraphs(model, extension, MEMORY), list[int]()
    run = graphs._run

    def noted(found: encoders._Graphs, features: mx.array) -> Encoded:
        runs.append(1)
        rows = run(found, features)
        return tuple(each * 1.1 for each in rows) if wrong else rows

    monkeypatch.setattr(graphs, "_run", noted)
    monkeypatch.setattr(encoders, "takes_less", lambda a, b: not slow)
    features = random_features(model, "image", SHAPE)
    (expected,) = model.encoders["image"](features, SHAPE)
    prepare(graphs, model, SHAPE)
    for _ in range(3):
        (rows,) = finished(graphs.encode([item(SHAPE)], features))
        assert mx.array_equal(rows, expected)
    assert len(runs) == 1


def test_large_items_run_eagerly(
    extension: EmulatedExtension, traced: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "MOST_ROWS", 63)
    model = unpacked(FAMILIES["gemma4"])
    graphs = EncoderGraphs(model, extension, MEMORY)
    for _ in range(3):
        finished(graphs.encode([item(SHAPE)] * 2, random_features(model, "image", SHAPE, 2)))
    assert not traced


def test_engines_graph_encoders(
    extension: EmulatedExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in which graphs were recorded or checked say so: their times teach nothing."""
    monkeypatch.setattr(factory, "open_cuda_graphs", lambda *given, **named: None)
    recorded, observe = list[bool](), Engine._observe

    def noted(
        self: Engine, plan: StepPlan, result: StepResult, rows: int, waited_s: float | None
    ) -> None:
        recorded.append(result.recorded)
        observe(self, plan, result, rows, waited_s)

    monkeypatch.setattr(Engine, "_observe", noted)
    loaded = opened(FAMILIES["gemma4"], lambda model: None)
    config = EngineConfig("", kv_memory=16 << 20, prefix_cache=False)
    company = Company(loaded, config)
    for seed in range(PIECES + 3):
        (request,) = prompts((5,), 2)
        company.run([replace(showing(request, ((3, 4, 8),), seed), id=f"{seed}")])
    executor = executor_of(company.engine)
    assert isinstance(executor, GraphExecutor)
    assert executor._encoders is not None
    (known,) = executor._encoders._shapes.values()
    assert known.graphs[1] is not None
    assert known.graphs[1].serves
    assert sum(recorded) == PIECES + 1, "one step for each piece, and one that checked the graph"


def test_tracing_and_recording_are_cut_in_pieces(
    extension: EmulatedExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call traces once, or runs one pass, or records a number of nodes. Graphs of other numbers
    of items need no tracing.
    """
    model = unpacked(FAMILIES["gemma4"])
    graphs, done = EncoderGraphs(model, extension, MEMORY), list[tuple[int, str]]()

    def noting(owner: Any, name: str, what: str) -> None:
        function = getattr(owner, name)

        def noted(*given: Any) -> Any:
            done.append((graphs.made, what))
            return function(*given)

        monkeypatch.setattr(owner, name, noted)

    noting(trace, "_at_one_size", "trace")
    for name in (
        *("simplified", "join_products", "join_heads", "join_routes", "join_recurrences"),
        "join_rows",
    ):
        noting(passes, name, "pass")
    noting(Recording, "_record", "node")
    noting(Recording, "_segment", "node")
    monkeypatch.setattr(recording, "NODES_A_PIECE", 10)
    made = prepare(graphs, model, SHAPE)
    (known,) = graphs._shapes.values()
    assert known.graphs[1] is not None
    nodes = len(known.graphs[1].program.program.nodes)
    assert nodes > 20
    assert made == PIECES + 2 * ((nodes - 1) // 10)
    each = Counter(done)
    assert max(each.values()) == 10
    assert all(count == 1 for (_, what), count in each.items() if what != "node")
    assert len({call for call, _ in done}) == len(each), "a call does one kind of work"
    assert sum(what == "trace" for _, what in done) == 3
    prepare(graphs, model, SHAPE, 2)
    assert sum(what == "trace" for _, what in done) == 3


def test_bounds_of_elements_are_no_tables(extension: EmulatedExtension) -> None:
    """A table of `rows` times a bound would take megabytes for each product."""
    model = unpacked(FAMILIES["gemma4"])
    graphs = EncoderGraphs(model, extension, MEMORY)
    prepare(graphs, model, SHAPE)
    (known,) = graphs._shapes.values()
    assert known.graphs[1] is not None
    program = known.graphs[1].program
    fused = [
        each for node in program.program.nodes if node.kind == FUSED for each in node.arguments
    ]
    assert "Maximum" in {each.kind for each in fused}
    assert {table.dtype for table in program.tables.values()} == {mx.float32}, "of angles alone"


def test_graphs_stay_within_their_memory(extension: EmulatedExtension) -> None:
    """What a shape needs counts once: graphs of other shapes share the memory of values."""
    model = unpacked(FAMILIES["gemma4"])
    graphs = EncoderGraphs(model, extension, MEMORY)
    assert graphs.nbytes == 0
    prepare(graphs, model, SHAPE)
    first = graphs.nbytes
    prepare(graphs, model, (2, 4))
    assert first < graphs.nbytes < 1.5 * first
    for few, recorded in ((first - 1, False), (first, True)):
        graphs = EncoderGraphs(model, extension, few)
        prepare(graphs, model, SHAPE)
        (known,) = graphs._shapes.values()
        assert (known.graphs[1] is not None) is recorded
        assert graphs.nbytes == (first if recorded else 0)


def test_the_kv_budget_leaves_the_memory_of_encoders(
    extension: EmulatedExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "open_cuda_graphs", lambda *given, **named: None)
    free = 1 << 30
    monkeypatch.setattr(type(current_device()), "free_memory", lambda self: free)
    loaded = opened(FAMILIES["gemma4"], lambda model: None)
    planned = free // 32
    company = Company(loaded, EngineConfig("", kv_memory=free - planned))
    assert executor_of(company.engine).planned_bytes == planned
    with pytest.raises(NoRoom, match="kv_memory"):
        Company(loaded, EngineConfig("", kv_memory=free - planned + 1))
