"""Recorded steps whose rows are media, on an emulated card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from quire.cache.specs import FullKV, KVLayout
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.media import MediaItem, PlacedMedia
from quire.core.request import Request
from quire.executor.computed import Computed
from quire.executor.graphs.input_numbers import step_numbers
from quire.executor.graphs.layout import InputLayout, step_type
from quire.executor.graphs.runner import CUDAGraphs
from quire.executor.inputs import StepInputs
from tests.engine.rows import scheduled
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
    """Return rows of each step with media, and whether it ran as a graph."""
    found: list[tuple[int, bool]] = []
    compute = CUDAGraphs.compute

    def noted(self: CUDAGraphs, inputs: StepInputs, *given: Any, **options: Any) -> Computed | None:
        computed = compute(self, inputs, *given, **options)
        if inputs.media is not None:
            rows = sum(each.count for each in inputs.sequences)
            found.append((rows, computed is not None and computed.graphed))
        return computed

    monkeypatch.setattr(CUDAGraphs, "compute", noted)
    return found


def asked(name: str, seed: int) -> list[Request]:
    """Return two questions about pictures, of which one has 16 rows and the other two of 6 and
    4.
    """
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


@pytest.mark.parametrize("media", [True, False])
def test_inputs_say_which_rows_are_media(media: bool) -> None:
    """A chunk that begins in a picture, behind a row of another sequence."""
    item = MediaItem("image", b"", (1, 4), 4, b"same")
    text = scheduled("a", 9, 1, [[1]], KVFormat())
    shown = scheduled("b", 3, 4, [[2]], KVFormat(), images=(PlacedMedia(2, item),))
    layout = KVLayout.of((FullKV(1, 64),))
    memory = InputLayout(1, 64, 100, lambda array: 0, axes=3)
    numbers = step_numbers([text, shown], layout, memory, 64, max_rows=64, media=media)
    assert numbers is not None
    step = numbers.view(np.uint8)[: step_type(64, 1, 3).itemsize].view(step_type(64, 1, 3))
    assert np.flatnonzero(step["placed"][0]).tolist() == ([1, 2, 3] if media else [])
    assert step["positions"][0, :5].tolist() == [[at] * 3 for at in (9, 3, 4, 5, 6)]
