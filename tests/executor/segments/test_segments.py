"""Steps by segments: the model's bits, in one operation where instructions compute every node."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_unflatten

from quire.cache.blocks import PoolKey
from quire.cli.progress import silent
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.device.device import open_device
from quire.device.weights import Packing
from quire.engine.assembly import assemble
from quire.executor.factory import open_executor
from quire.executor.segments import runner
from quire.executor.segments.builder import Segment
from quire.executor.segments.executor import SegmentExecutor
from quire.executor.segments.runner import Attends, StepSegments, open_segments
from quire.models.base import named_parameters
from quire.models.weights.convert import convert
from quire.models.weights.loader import LoadedModel, open_model
from tests.program.programs import CONFIGS, opened
from tests.support.parity import Company, Generated, prompts
from tests.support.tiny_models import write_model
from tests.support.work import counted

PLAIN = KVFormat()
EVERYDAY = ["llama", "gemma4_moe", "qwen3_5_moe"]


def answers(
    loaded: LoadedModel, segments: StepSegments | None, format: KVFormat = PLAIN
) -> Mapping[str, Generated]:
    """Serve three requests in steps that mix prompts and rows."""
    config = EngineConfig(
        "", kv_memory=16 << 20, prefix_cache=False, max_step_tokens=24, kv_format=format
    )
    company = Company(loaded, config, open_executor=partial(open_executor, segments=segments))
    return company.run(prompts((1, 40, 9), 6), every=2)


def assert_equal(expected: Mapping[str, Generated], found: Mapping[str, Generated]) -> None:
    """Check tokens, and the bits of all logits."""
    for name, own in expected.items():
        assert own.tokens == found[name].tokens
        for position, row in own.logits.items():
            assert np.array_equal(np.array(row), np.array(found[name].logits[position]))


def checked(name: str, folder: Path) -> StepSegments:
    """Serve a family with and without segments, and compare."""
    loaded = opened(name, folder)
    segments = open_segments(loaded.model)
    assert segments is not None
    assert_equal(answers(loaded, None), answers(loaded, segments))
    assert set(segments.agrees.values()) <= {True}
    return segments


def packed(name: str, folder: Path, **changes: int) -> LoadedModel:
    """Open a small model in codes of 4 bits."""
    write_model(folder / "plain", CONFIGS[name] | changes)
    convert(str(folder / "plain"), folder / "packed", Packing(32, 4, "affine"), (), silent)
    return open_model(str(folder / "packed"))


@pytest.mark.parametrize("name", EVERYDAY)
def test_segments_compute_what_the_model_does(name: str, tmp_path: Path) -> None:
    segments = checked(name, tmp_path)
    assert segments.steps > 5


def test_layers_that_keep_nothing_compute_wanted_rows(tmp_path: Path) -> None:
    """Two segments, with the choice of rows between them."""
    segments = checked("gemma4_ple", tmp_path)
    narrowed = [size for _, size in segments.agrees if size.endswith("some of them wanted")]
    assert sorted(narrowed) == [f"{each} rows, some of them wanted" for each in ("few", "many")]
    stages = segments.narrowed
    assert stages is not None
    found = [each.wanted for each in stages.order if isinstance(each, Segment)]
    assert found == [False, True]
    assert {each.kind for each in stages.order if not isinstance(each, Segment)} == {"Gather"}


@pytest.mark.parametrize("scheme", ["uniform", "page"])
def test_coded_blocks_are_read_between_segments(scheme: str, tmp_path: Path) -> None:
    loaded, format = opened("llama", tmp_path), KVFormat(scheme, 8, 8)
    segments = open_segments(loaded.model)
    assert segments is not None
    assert_equal(answers(loaded, None, format), answers(loaded, segments, format))
    assert set(segments.agrees.values()) == {True}
    parts = [each for each in segments.stages(Attends.OUTSIDE).order if isinstance(each, Segment)]
    assert len(parts) == len(loaded.model.layout) + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - set(EVERYDAY)))
def test_segments_compute_what_models_of_any_family_do(name: str, tmp_path: Path) -> None:
    checked(name, tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3_5_moe", "mamba2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_moe", "gemma4_moe")),
    ],
)
def test_a_packed_step_is_one_segment(name: str, tmp_path: Path) -> None:
    """Routers, experts, convolutions, delta rules, state spaces and their gates included."""
    changes = {"state_size": 32} if name == "mamba2" else {}  # a multiple of a vector's length
    segments = open_segments(packed(name, tmp_path, **changes).model)
    assert segments is not None
    (only,) = segments.stages(Attends.INSIDE).order
    assert isinstance(only, Segment)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_snapshots_of_states_are_the_models(name: str, tmp_path: Path) -> None:
    """A step writes a state to several slots, and a later prompt goes on from one of them."""
    loaded = opened(name, tmp_path)
    segments = open_segments(loaded.model)
    assert segments is not None
    config = EngineConfig("", kv_memory=16 << 20, max_step_tokens=32)
    (first,) = prompts((48,), 4)
    first = replace(first, snapshots=(32,))
    again = replace(first, id="again", prompt=first.prompt[:32] + first.prompt[:5])
    found = []
    for own in (None, segments):
        company = Company(loaded, config, open_executor=partial(open_executor, segments=own))
        company.run([first])
        found.append(company.run([again]))
        assert company.answers["again"].ends[0].cached_tokens == 32
    assert_equal(*found)
    assert set(segments.agrees.values()) == {True}


@pytest.mark.parametrize("name", ["qwen3_5_moe", pytest.param("llama", marks=pytest.mark.slow)])
def test_threads_change_no_bit(name: str, tmp_path: Path) -> None:
    loaded = packed(name, tmp_path)
    found = []
    for threads in (1, 2, 16):
        open_device("auto", threads=threads)
        found.append(answers(loaded, open_segments(loaded.model)))
    assert_equal(found[0], found[1])
    assert_equal(found[0], found[2])


def test_segments_that_differ_from_the_model_serve_no_step(tmp_path: Path) -> None:
    loaded = opened("llama", tmp_path)
    segments = open_segments(loaded.model)
    assert segments is not None
    name = next(name for name in named_parameters(loaded.model) if name.endswith("norm.weight"))
    changed = named_parameters(loaded.model)[name] * 1.5  # segments hold the weight as it was
    loaded.model.update(tree_unflatten([(name, changed)]))
    assert_equal(answers(loaded, None), answers(loaded, segments))
    assert set(segments.agrees.values()) == {False}


def generating(
    folder: Path, *, prefix_cache: bool = False, tokens: int = 8
) -> tuple[Company, SegmentExecutor]:
    """Return a company whose only sequence generates by segments, and its executor."""
    loaded = opened("llama", folder)
    segments = open_segments(loaded.model)
    assert segments is not None
    config = EngineConfig("", kv_memory=16 << 20, block_size=16, prefix_cache=prefix_cache)
    company = Company(loaded, config, open_executor=partial(open_executor, segments=segments))
    executor = company.engine._executor
    assert isinstance(executor, SegmentExecutor)
    (request,) = prompts((40,), tokens)
    company.add(request)
    while len(company.answers[request.id].tokens) < 2:
        company.step()
    return company, executor


def test_pools_are_written_where_they_lie(tmp_path: Path) -> None:
    company, executor = generating(tmp_path)

    def places() -> list[int]:
        mx.synchronize()
        arrays = executor.pools.arrays(range(len(executor.model.layout)))
        return [np.asarray(memoryview(each)).__array_interface__["data"][0] for each in arrays]  # type: ignore[arg-type]

    before, steps = places(), executor.segments.steps
    for _ in range(4):
        company.step()
    assert places() == before
    assert executor.segments.steps > steps


def test_a_step_is_launched_behind_the_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    company, executor = generating(tmp_path)
    monkeypatch.setattr("quire.executor.eager._LONG_S", 1e9)  # a busy machine may take long
    monkeypatch.setattr(mx, "synchronize", lambda: pytest.fail("the launch waits"))
    waited, launched = list[int](), list[int]()
    evaluate, launch = mx.eval, mx.async_eval
    monkeypatch.setattr(mx, "eval", lambda *each: waited.append(len(launched)) or evaluate(*each))
    monkeypatch.setattr(mx, "async_eval", lambda *each: launched.append(1) or launch(*each))
    for _ in range(4):
        company.step()
    assert executor._running is not None
    assert executor._running.rows.early
    assert waited == [1, 2, 3, 4], "steps were launched once the ones before were waited for"


def sleeps() -> dict[str, int]:
    """Return how often each thread of this process but the main one has slept so far."""
    counts = {}
    for folder in Path("/proc/self/task").iterdir():
        if int(folder.name) != os.getpid():
            status = (folder / "status").read_text()
            counts[folder.name] = int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return counts


def resting_threads() -> dict[str, int]:
    """Return the `sleeps` of threads that do not wake while nothing is done. Other tests may have
    left threads that do.
    """
    before = sleeps()
    time.sleep(0.2)
    return {name: count for name, count in sleeps().items() if before.get(name) == count}


def wakings(resting: Mapping[str, int]) -> int:
    """Return how often resting threads were woken since."""
    after = sleeps()
    return sum(after.get(name, count) - count for name, count in resting.items())


def test_small_steps_wake_no_other_thread(tmp_path: Path) -> None:
    company, _ = generating(tmp_path)
    company.step()  # the first after the prompt, whose end it may not have awaited
    resting = resting_threads()
    assert resting
    for _ in range(4):
        company.step()
    assert wakings(resting) < 4


def test_a_prompt_beside_a_stream_wakes_no_other_thread(tmp_path: Path) -> None:
    company, _ = generating(tmp_path, tokens=40)
    found = list[int]()
    for number, request in enumerate(prompts((6, 7, 5, 8, 6), 4)):  # the first verifies segments
        resting = resting_threads()
        company.add(replace(request, id=f"beside {number}", min_tokens=0))
        for _ in range(6):
            company.step()
        found.append(wakings(resting))
    assert min(found[1:]) < 4  # a busy machine wakes threads now and then


def test_a_prompt_that_shares_a_part_of_a_block_is_launched_behind_the_running_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    company, executor = generating(tmp_path, prefix_cache=True, tokens=40)
    monkeypatch.setattr("quire.executor.eager._LONG_S", 1e9)  # a busy machine may take long
    shared, ending = prompts((40, 6), 2)
    launched = list[tuple[bool, bool]]()
    for length in (20, 21):
        request = replace(shared, id=f"{length}", prompt=shared.prompt[:length] + ending.prompt)
        company.add(request)
        company.step()
        running = executor._running
        assert running is not None
        launched.append((len(running.plan.copies) > 0, running.rows.early))
        company.step()
        company.step()
    assert launched == [(True, True), (True, True)]


def test_blocks_are_copied_once_the_models_own_code_has_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    company, executor = generating(tmp_path, prefix_cache=True, tokens=40)
    sizes = ("one row", "few rows", "many rows")
    executor.segments.agrees = {(Attends.INSIDE, size): False for size in sizes}
    company.step()
    evaluate, copy, done = mx.eval, executor.pools.copy, list[object]()
    monkeypatch.setattr(mx, "eval", lambda *each: done.append(each[0]) or evaluate(*each))
    copied = list[bool]()

    def checked_copy(pairs: Iterable[tuple[PoolKey, int, int]]) -> None:
        copied.append(any(each is before.to_eval for each in done))
        copy(pairs)

    monkeypatch.setattr(executor.pools, "copy", checked_copy)
    shared, ending = prompts((40, 6), 2)
    company.add(replace(shared, id="second", prompt=shared.prompt[:20] + ending.prompt))
    before = executor._running
    assert before is not None
    company.step()
    assert copied == [True]


def calls_of_a_step(loaded: LoadedModel, segments: StepSegments, streams: int) -> int:
    """Return how many functions four steps of so many generating sequences call."""
    config = EngineConfig("", kv_memory=16 << 20, prefix_cache=False)
    engine = assemble(loaded, config, open_executor=partial(open_executor, segments=segments))
    for request in prompts((17,) * streams, 24):
        engine.add(replace(request, min_tokens=0))
    for _ in range(8):
        engine.step()
    return counted(lambda: [engine.step() for _ in range(4)])[1]


def test_a_step_and_a_further_row_call_few_functions(tmp_path: Path) -> None:
    loaded = opened("llama", tmp_path)
    segments = open_segments(loaded.model)
    assert segments is not None
    calls_of_a_step(loaded, segments, 9)  # segments are verified
    calls_of_a_step(loaded, segments, 1)
    one, nine = (calls_of_a_step(loaded, segments, streams) for streams in (1, 9))
    assert one / 4 <= 480
    assert (nine - one) / 4 / 8 <= 105


def test_a_model_that_cannot_be_traced_is_served_by_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: object) -> None:
        raise ValueError("no trace")

    loaded = opened("llama", tmp_path)
    monkeypatch.setattr(runner, "trace_body", fail)
    assert open_segments(loaded.model) is None
