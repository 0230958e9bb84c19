"""Heads of checkpoints, and assistants, guess in graphs behind a step's, on an emulated card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.speculation import DRAFT, HEAD
from quire.device.verified import relative_norm
from quire.engine.assembly import assemble
from quire.executor.computed import Computed
from quire.executor.graphs.executor import GraphExecutor
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.guessing import AssistantGuesser, Guesser, MTPChainGuesser, MTPGuesser
from quire.executor.inputs import FlatRows
from quire.models.base import LanguageModel, named_parameters
from quire.models.families.gemma4 import Gemma4
from quire.models.families.gemma4_assistant import build_assistant
from quire.models.weights.loader import LoadedModel
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.plan import StepPlan, StepResult
from quire.speculation.heads import HeadDrafter
from tests.executor.graphs.recorded import opened
from tests.executor.graphs.test_recording import FAMILIES, SIZES, TYPES
from tests.support.emulated_card import emulate_card
from tests.support.emulated_metal import why_not
from tests.support.grown import grown
from tests.support.packed_models import draw_constants
from tests.support.parity import Company, prompts
from tests.support.tiny_models import gemma4_config, with_small_scores

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

ERROR = 6e-2
"""Largest relative error of a head's rows. Rounding may choose another expert: that was 0.04."""


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_card(monkeypatch)


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return how far rows that graphs looked ahead from are from those of the model."""
    found: list[float] = []
    compute = CUDAGraphs.compute

    def compared(
        self: CUDAGraphs, inputs: FlatRows, run_eagerly: Callable[[], mx.array], **options: Any
    ) -> Computed | None:
        if inputs.hidden is None:
            return compute(self, inputs, run_eagerly, **options)
        expected = run_eagerly() + 0  # before the graph, which spoils the hidden states
        mx.eval(expected)
        computed = compute(self, inputs, run_eagerly, **options)
        if computed is not None and computed.graphed:
            mx.eval(computed.output)
            found.append(relative_norm(computed.hidden, expected).item())
        return computed

    monkeypatch.setattr(CUDAGraphs, "compute", compared)
    return found


@pytest.mark.parametrize(
    ("family", "format", "heads"),
    [
        ("glm4_moe", KVFormat(), 1),
        pytest.param("glm4_moe", KVFormat("page", 4, 4), 1, marks=pytest.mark.slow),
        pytest.param("qwen3_next", KVFormat(), 1, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", KVFormat(), 1, marks=pytest.mark.slow),
        pytest.param("mimo_v2_flash", KVFormat(), 3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_heads_look_ahead_in_graphs(
    family: str,
    format: KVFormat,
    heads: int,
    wholes: list[CUDAGraphs],
    errors: list[float],
) -> None:
    """Prompts in chunks, rows of streams, and their drafts, right ones and wrong ones."""
    loaded = opened(grown(family), heads=heads)
    config = EngineConfig(
        "", kv_memory=64 << 20, kv_format=format, speculate=HEAD, max_step_tokens=21
    )
    guesser = MTPGuesser(loaded.model) if heads == 1 else MTPChainGuesser(loaded.model)
    company = Company(loaded, config, (HeadDrafter(heads),), EveryDraft(), guesser)
    wanted = [replace(each, id=f"{n}", max_tokens=9) for n, each in enumerate(prompts([3, 40], 9))]
    company.run(wanted, every=3)
    assert dict(company.engine.stats().drafts)[HEAD] > 8
    (whole,) = wholes
    assert len(whole.behind) == heads
    for head in whole.behind:
        assert len(head.verified) > 2
        assert all(head.verified.values())
    assert len(errors) > 7 * heads
    assert max(errors) < ERROR


def assistant_of(model: LanguageModel, *, clusters: bool = False) -> AssistantGuesser:
    """Return an assistant of two layers with random weights."""
    assert isinstance(model, Gemma4)
    text = gemma4_config(**SIZES, **TYPES, num_kv_shared_layers=2)
    config = {
        "backbone_hidden_size": model.args.hidden_size,
        "text_config": text,
        "use_ordered_embeddings": clusters,
        "num_centroids": 16,
        "centroid_intermediate_top_k": 4,
    }
    assistant = build_assistant(config, model, Path())
    draw_constants(assistant)
    assistant.load_weights(list(with_small_scores(named_parameters(assistant)).items()))
    assistant.set_dtype(mx.bfloat16)
    if clusters:
        assistant.masked_embedding.token_ordering = mx.arange(model.vocab_size)
    return AssistantGuesser(model, assistant)


@pytest.mark.slow  # every day, the last test holds their rows against the model's
@pytest.mark.parametrize("clusters", [False, True])
def test_assistants_guess_in_graphs(
    wholes: list[CUDAGraphs], errors: list[float], *, clusters: bool
) -> None:
    """They read the keys of the rows' last layers. MLX chooses among clusters of tokens."""
    loaded, count = opened(FAMILIES["gemma4_moe"]), 3
    own = EngineConfig("", kv_memory=64 << 20, speculate=DRAFT, max_step_tokens=21)
    guesser = assistant_of(loaded.model, clusters=clusters)
    company = Company(loaded, own, (HeadDrafter(count, DRAFT),), EveryDraft(), guesser)
    wanted = [replace(each, id=f"{n}", max_tokens=9) for n, each in enumerate(prompts([3, 40], 9))]
    company.run(wanted, every=3)
    assert dict(company.engine.stats().drafts)[DRAFT] > 8
    (whole,) = wholes
    (behind,) = whole.behind
    assert len(behind.verified) > 1
    assert all(behind.verified.values())
    assert len(errors) > 8
    assert max(errors) < ERROR


Guesses = list[dict[int, tuple[int, ...]]]


def guessed(
    loaded: LoadedModel, guesser: Guesser, drafter: HeadDrafter, *, ahead: bool
) -> tuple[dict[str, list[int]], Guesses, int]:
    """Return answers, the guesses of each step, and how many steps were launched ahead.

    Args:
        ahead: whether steps that follow guesses may be launched behind the running one.
    """
    config = EngineConfig("", kv_memory=64 << 20, speculate=drafter.name, prefix_cache=False)
    engine = assemble(loaded, config, None, (drafter,), EveryDraft(), guesser=guesser)
    executor, guesses, launched = engine._executor, list[dict[int, tuple[int, ...]]](), 0
    assert isinstance(executor, GraphExecutor)
    follows, collect = executor._follows, executor.collect

    def watched(plan: StepPlan) -> bool:
        nonlocal launched
        found = ahead and follows(plan)
        launched += found
        return found

    def noted() -> StepResult:
        result = collect()
        guesses.append(dict(result.guesses))
        return result

    executor._follows, executor.collect = watched, noted  # type: ignore[method-assign]
    answers: dict[str, list[int]] = {}
    for each in prompts([3], 12):
        engine.add(each)
        answers[each.id] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] += output.token_ids
    engine.close()
    return answers, guesses, launched


@pytest.mark.parametrize(
    "name",
    ["assistant", *(pytest.param(each, marks=pytest.mark.slow) for each in ("head", "heads"))],
)
def test_guesses_of_steps_that_are_launched_ahead_are_those_of_steps_that_wait(
    name: str, wholes: list[CUDAGraphs], errors: list[float]
) -> None:
    """Bit by bit, behind right and wrong ones; and rows of steps that wait are the model's."""
    family = {"head": "glm4_moe", "heads": "mimo_v2_flash"}.get(name)
    heads = {"head": 1, "heads": 3}.get(name, 0)
    loaded = opened(FAMILIES["gemma4_moe"] if family is None else grown(family), heads=heads)
    guesser: Guesser = {"assistant": assistant_of, "head": MTPGuesser, "heads": MTPChainGuesser}[
        name
    ](loaded.model)
    drafter = HeadDrafter(heads or 3, HEAD if heads else DRAFT)
    waited, expected, none = guessed(loaded, guesser, drafter, ahead=False)
    distances = list(errors)
    found, guesses, ahead = guessed(loaded, guesser, drafter, ahead=True)
    assert not none
    assert ahead > 2
    assert found == waited
    assert guesses == expected
    for head in (each for whole in wholes for each in whole.behind):
        assert len(head.verified) > 1
        assert all(head.verified.values())
    assert len(distances) > 8
    assert max(distances) < ERROR
