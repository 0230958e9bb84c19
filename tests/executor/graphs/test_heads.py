"""Heads of checkpoints look ahead in graphs, on an emulated card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.speculation import HEAD
from quire.device.verified import relative_norm
from quire.executor.computed import Computed
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.guessing import LayerGuesser, LayersGuesser
from quire.executor.inputs import StepInputs
from quire.scheduler.draft_lengths import EveryDraft
from quire.speculation.heads import HeadDrafter
from tests.executor.graphs.recorded import opened
from tests.support.emulated_card import emulate_card
from tests.support.emulated_metal import why_not
from tests.support.grown import grown
from tests.support.parity import Company, prompts

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
        self: CUDAGraphs, inputs: StepInputs, run_eagerly: Callable[[], mx.array], **options: Any
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
    guesser = LayerGuesser(loaded.model) if heads == 1 else LayersGuesser(loaded.model)
    company = Company(loaded, config, (HeadDrafter(heads),), EveryDraft(), guesser)
    wanted = [replace(each, id=f"{n}", max_tokens=9) for n, each in enumerate(prompts([3, 40], 9))]
    company.run(wanted, every=3)
    assert dict(company.engine.stats().drafts)[HEAD] > 8
    (whole,) = wholes
    assert len(whole.heads) == heads
    for head in whole.heads:
        assert len(head.verified) > 2
        assert all(head.verified.values())
    assert len(errors) > 7 * heads
    assert max(errors) < ERROR
