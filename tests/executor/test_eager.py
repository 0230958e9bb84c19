"""Plans that a test writes by hand, pickles, and gives to an executor."""

from __future__ import annotations

import pickle
from array import array
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from quire.cache.blocks import PoolKey, Resize
from quire.cache.pools import Pools
from quire.constraints.masks import TokenMask, mask_of
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import SamplingParams
from quire.device.device import current_device
from quire.device.host_copy import HostCopy
from quire.executor.computed import Computed
from quire.executor.eager import EagerExecutor
from quire.executor.factory import open_pools
from quire.executor.inputs import StepInputs
from quire.executor.step import LaunchedStep
from quire.models.base import LanguageModel
from quire.models.weights.loader import LoadedModel, open_model
from quire.sampling.rows import RowSampling
from quire.scheduler.plan import (
    BlockCopy,
    BlockIds,
    KVPlacement,
    SampledTokens,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from tests.models.solo import solo_greedy
from tests.support.growing import SlicedMemory
from tests.support.tiny_models import tiny_model

PAGE = 16
CONFIG = EngineConfig("", block_size=PAGE)
GREEDY = SamplingParams(temperature=0)
PROMPT = tuple(range(5, 45))
KEY = PoolKey(0, KVFormat())


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model(Path(tmp_path_factory.mktemp("llama")), "llama")
    return open_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def answer(loaded: LoadedModel) -> list[int]:
    """Return what follows the prompt, by a run without any cache."""
    return solo_greedy(loaded.model, list(PROMPT), 6)


@pytest.fixture
def executor(loaded: LoadedModel) -> EagerExecutor:
    return EagerExecutor(loaded.model, open_pools(loaded, CONFIG))


def rows(
    tokens: tuple[int, ...],
    start: int = 0,
    *,
    blocks: tuple[int, ...] = (4, 1, 3),
    sampled: int = 1,
    unread: int = 0,
) -> ScheduledSequence:
    """Return the first sequence's tokens from `start` on; the last `sampled` rows yield tokens."""
    end = start + len(tokens) + unread
    first = end - sampled + 1
    return ScheduledSequence(
        id="a",
        number=1,
        format=KVFormat(),
        start=start,
        count=end - start,
        tokens=array("i", tokens),
        positions=range(start, end),
        placement=KVPlacement((BlockIds(array("i", blocks), len(blocks)),)),
        sampling=tuple(RowSampling(GREEDY, first + n) for n in range(sampled)),
    )


def carry_out(executor: EagerExecutor, plan: StepPlan) -> StepResult:
    """Compute a plan that was pickled, as another process would get it."""
    executor.launch(pickle.loads(pickle.dumps(plan)))
    executor.flush()
    executor.launch(None)
    return executor.collect()


def resized(*sequences: ScheduledSequence) -> StepPlan:
    return StepPlan(sequences, changes=(Resize(KEY, 8),))


def test_a_prompt_in_two_chunks_and_then_its_answer(
    executor: EagerExecutor, answer: list[int]
) -> None:
    assert carry_out(executor, resized(rows(PROMPT[:25], sampled=0))).tokens == {}
    result = carry_out(executor, StepPlan((rows(PROMPT[25:], 25),)))
    assert result == StepResult({1: SampledTokens((answer[0],))})
    result = carry_out(executor, StepPlan((rows((answer[0],), 40),)))
    assert result.tokens[1].tokens == (answer[1],)


@pytest.mark.parametrize("awaited", [True, False])
def test_what_other_ranks_wait_for_is_computed_where_nobody_samples(
    executor: EagerExecutor, awaited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of layers exchanged the rows of different steps: a chunk that did not end its prompt
    needed fewer exchanges on the first rank than on the last.
    """
    run = executor._run
    monkeypatch.setattr(executor, "_run", lambda x: run(x)._replace(awaited=awaited))
    executor.launch(resized(rows(PROMPT[:25], sampled=0)))
    assert executor._running is not None
    assert len(executor._running.rows.others) == awaited


def test_a_token_that_no_host_has_read_is_the_next_input(
    executor: EagerExecutor, answer: list[int]
) -> None:
    executor.launch(resized(rows(PROMPT)))
    executor.launch(StepPlan((rows((), 40, unread=1),)))
    executor.flush()
    executor.launch(None)
    assert executor.collect().tokens[1].tokens == (answer[1],)


@pytest.mark.parametrize("long_s", [0.0, 1e9], ids=["first layer only", "whole"])
def test_a_mask_may_come_when_the_step_has_started(
    executor: EagerExecutor, answer: list[int], long_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.executor.eager._LONG_S", long_s)
    other = next(token for token in range(9) if token != answer[1])
    forced: dict[int, TokenMask | None] = {1: mask_of((other,), 9)}
    for masks, wanted in ((forced, other), ({1: None}, answer[1]), ({}, answer[1])):
        executor.launch(resized(rows(PROMPT)))
        plan = StepPlan((rows((), 40, unread=1)._replace(awaits_mask=True),))
        executor.launch(pickle.loads(pickle.dumps(plan)))
        assert executor._flushed == (long_s > 0)
        executor.draw(masks)
        executor.flush()
        executor.launch(None)
        assert executor.collect().tokens[1].tokens == (wanted,)


def test_rows_that_are_drafts_are_all_sampled(executor: EagerExecutor, answer: list[int]) -> None:
    carry_out(executor, resized(rows(PROMPT)))
    drafts = (answer[1], answer[2], (answer[3] + 1) % 250)
    result = carry_out(executor, StepPlan((rows((answer[0], *drafts), 40, sampled=4),)))
    assert result.tokens[1].tokens[:3] == tuple(answer[1:4])
    # Cut back to what was right, the sequence goes on as if the wrong draft had never been.
    result = carry_out(executor, StepPlan((rows((answer[3],), 43),)))
    assert result.tokens[1].tokens == (answer[4],)


def test_blocks_are_copied_before_they_are_written(
    executor: EagerExecutor, answer: list[int]
) -> None:
    carry_out(executor, resized(rows(PROMPT)))
    copies = tuple(BlockCopy(KEY, source, target) for source, target in ((4, 0), (1, 2), (3, 5)))
    other = rows((77,), 39, blocks=(0, 2, 5))
    carry_out(executor, StepPlan((other,), copies=copies))
    result = carry_out(executor, StepPlan((rows((answer[0],), 40),)))
    assert result.tokens[1].tokens == (answer[1],)


def test_a_snapshot_pickles_its_own_blocks_only() -> None:
    shared = array("i", [4, 1, 3])
    snapshot = BlockIds(shared, 2)
    shared.append(9)
    again = pickle.loads(pickle.dumps(snapshot))
    assert (again.ids.tolist(), again.length) == ([4, 1], 2)
    plan = StepPlan((rows(PROMPT),), changes=(Resize(KEY, 8),))
    loaded_plan = pickle.loads(pickle.dumps(plan))
    assert loaded_plan.changes[0].pool == KEY
    assert hash(loaded_plan.changes[0].pool) == hash(KEY)
    assert np.array(loaded_plan.sequences[0].positions).tolist() == list(range(40))


@pytest.mark.parametrize("in_place", [True, False])
def test_only_pools_that_are_copied_wait_for_the_running_step(
    loaded: LoadedModel, answer: list[int], monkeypatch: pytest.MonkeyPatch, *, in_place: bool
) -> None:
    if in_place:
        monkeypatch.setattr(current_device(), "growing_memory", SlicedMemory)
    done, waited = LaunchedStep.without_arrays, list[LaunchedStep]()

    def counted(step: LaunchedStep) -> LaunchedStep:
        waited.append(step)
        return done(step)

    monkeypatch.setattr(LaunchedStep, "without_arrays", counted)
    executor = EagerExecutor(loaded.model, open_pools(loaded, CONFIG))
    build, waited_for = executor._build, list[int]()

    def built(plan: StepPlan, before: LaunchedStep | None) -> LaunchedStep:
        waited_for.append(len(waited))
        return build(plan, before)

    monkeypatch.setattr(executor, "_build", built)
    executor.launch(StepPlan((rows(PROMPT),), changes=(Resize(KEY, 8, most=16, grows=True),)))
    executor.launch(
        StepPlan((rows((answer[0],), 40),), changes=(Resize(KEY, 16, most=16, grows=True),))
    )
    executor.launch(None)
    assert waited_for == [0, 0 if in_place else 1]
    assert executor.collect().tokens[1].tokens == (answer[1],)


def test_memory_of_pools_that_a_step_copied_is_freed(
    loaded: LoadedModel, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX copies parts of larger arrays before it writes to them."""
    memory = SlicedMemory()
    monkeypatch.setattr(current_device(), "growing_memory", lambda: memory)
    executor = EagerExecutor(loaded.model, open_pools(loaded, CONFIG))
    executor.launch(StepPlan((rows(PROMPT),), changes=(Resize(KEY, 8, most=16, grows=True),)))
    assert memory.ranges == len(executor.pools.arrays())
    executor.launch(StepPlan((rows((answer[0],), 40),)))
    assert memory.ranges == 0
    executor.launch(None)
    assert executor.collect().tokens[1].tokens == (answer[1],)


class _Whole(EagerExecutor):
    """Computes logits of all rows at once, as a graph does."""

    def __init__(self, model: LanguageModel, pools: Pools) -> None:
        super().__init__(model, pools)
        self.computed_rows: list[mx.array] = []

    def _run(self, inputs: StepInputs) -> Computed:
        inputs.wanted, wanted = None, inputs.wanted
        hidden = self.model(inputs)
        self.computed_rows.append(self.model.logits(hidden))
        inputs.wanted = wanted
        return Computed(hidden, self.computed_rows[-1], graphed=True)


def test_a_step_that_is_one_operation_gives_logits_and_is_run_even_if_nobody_samples(
    loaded: LoadedModel, answer: list[int]
) -> None:
    executor = _Whole(loaded.model, open_pools(loaded, CONFIG))
    executor.launch(resized(rows(PROMPT[:25], sampled=0)))
    assert executor._running is not None
    assert any(root is executor.computed_rows[0] for root in executor._running.to_eval)
    result = carry_out(executor, StepPlan((rows(PROMPT[25:], 25),)))
    assert result == StepResult({1: SampledTokens((answer[0],))})
    assert result.graphed


def test_a_graphed_step_is_waited_for_by_the_copy_of_its_tokens(
    loaded: LoadedModel, answer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the device has queued would be waited for by way of another thread."""
    executor = _Whole(loaded.model, open_pools(loaded, CONFIG))
    executor.launch(resized(rows(PROMPT)))
    monkeypatch.setattr(mx, "synchronize", lambda: pytest.fail("everything is waited for"))
    reads, read = list[int](), HostCopy.read
    monkeypatch.setattr(HostCopy, "read", lambda copy: reads.append(1) or read(copy))
    executor.launch(None)
    assert reads, "the tokens have not arrived"
    assert executor.collect().tokens[1].tokens == (answer[0],)


def test_a_launched_step_is_frozen_and_its_owner_replaces_it(
    executor: EagerExecutor, answer: list[int]
) -> None:
    executor.launch(resized(rows(PROMPT)._replace(awaits_mask=True)))
    step = executor._running
    assert step is not None
    with pytest.raises(AttributeError):
        step.to_eval = ()  # type: ignore[misc]
    executor.draw({})
    assert step.rows.drawn is None
    executor.launch(None)
    result = executor.collect()
    assert result.tokens[1].tokens == (answer[0],)
    assert result.seconds > 0
    with pytest.raises(AssertionError, match="no step is done"):
        executor.collect()
