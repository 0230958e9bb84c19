"""Recorded steps whose rows are media, on an emulated card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.inputs import StepInputs
from quire.executor.step import Computed
from tests.engine.test_image_parity import showing
from tests.executor.graphs.recorded import Compared, opened
from tests.executor.graphs.test_recording import FAMILIES as TEXTS
from tests.support.emulated_card import emulate_card
from tests.support.emulated_metal import why_not
from tests.support.grown import grown_config
from tests.support.parity import prompts
from tests.support.seeing import CONFIGS as SEEING
from tests.support.tiny_models import gemma4_vision_config

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

PLAIN = EngineConfig("", kv_memory=64 << 20, prefix_cache=False)
SEEN_WHOLE = TEXTS["gemma4_moe"] | {"use_bidirectional_attention": "vision"}
QWEN = SEEING["qwen3_vl"]
FAMILIES: dict[str, dict[str, Any]] = {
    "seen whole": gemma4_vision_config(SEEN_WHOLE),
    "axes and levels": QWEN
    | {
        "text_config": grown_config(QWEN["text_config"]),
        "vision_config": QWEN["vision_config"] | {"out_hidden_size": 256},
    },
}


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_card(monkeypatch)


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Rows of each step with media, and whether it ran as a graph."""
    found: list[tuple[int, bool]] = []
    compute = CUDAGraphs.compute

    def noted(self: CUDAGraphs, inputs: StepInputs, run_eagerly: Any) -> Computed | None:
        computed = compute(self, inputs, run_eagerly)
        if inputs.media is not None:
            rows = sum(each.count for each in inputs.sequences)
            found.append((rows, computed is not None and computed.graphed))
        return computed

    monkeypatch.setattr(CUDAGraphs, "compute", noted)
    return found


def asked(name: str, seed: int) -> list[Request]:
    """Two questions about pictures, of which one has 16 rows and the other two of 6 and 4."""
    one, other = (replace(each, max_tokens=2) for each in prompts([5, 9], seed=seed))
    shown = [
        showing(one, ((3, 8, 8),), seed),
        showing(other, ((0, 4, 6), (4, 4, 4)), seed + 5),
    ]
    return [replace(each, id=f"{name}-{each.id}") for each in shown]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_read_in_recorded_steps(
    family: str, compared: Compared, graphed: list[tuple[int, bool]]
) -> None:
    """Rows of a picture see each other, and several pictures are read in one step."""
    loaded = opened(FAMILIES[family])
    rounds = [asked(name, seed) for seed, name in enumerate(("one", "two", "three"))]
    compared.assert_agree(loaded, PLAIN, rounds, ["one-r0", "two-r0", "two-r1"], counts=[2])
    assert any(one for _, one in graphed)
