"""Steps of a split model as graphs on emulated cards, whose ranks exchange rows within them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.device.weights import Packing
from quire.executor.graphs import runner
from quire.executor.graphs.runner import CUDAGraphs
from quire.models.weights.convert import convert
from tests.executor.graphs.test_recording import FAMILIES
from tests.support.emulated_card import EmulatedExtension, emulate_card, emulate_ranks
from tests.support.emulated_metal import why_not
from tests.support.lockstep import Lockstep
from tests.support.parity import Company, prompts
from tests.support.tiny_models import write_model

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.slow]

CONFIG = FAMILIES["llama"] | {"vocab_size": 256, "intermediate_size": 512}


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> EmulatedExtension:
    return emulate_card(monkeypatch)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[CUDAGraphs]:
    """Return the graphs of each rank that engines open from now on."""
    found: list[CUDAGraphs] = []
    begin = CUDAGraphs.__init__

    def noted(self: CUDAGraphs, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        found.append(self)

    monkeypatch.setattr(runner.CUDAGraphs, "__init__", noted)
    return found


def split(folder: Path, size: int) -> Lockstep:
    """Open a tiny model in 4 bits, split over ranks."""
    whole = write_model(folder / "whole", CONFIG)
    convert(str(whole), folder / "packed", Packing(64, 4, "affine"), (), lambda *_: lambda: None)
    return Lockstep(str(folder / "packed"), size, dtype="bfloat16")


def test_ranks_run_steps_as_graphs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    extension: EmulatedExtension,
    opened: list[CUDAGraphs],
) -> None:
    """Each number of rows is held against the model on each rank, and then serves."""
    ranks = split(tmp_path, 2)
    emulate_ranks(monkeypatch, extension, ranks)
    config = EngineConfig("", kv_memory=64 << 20, prefix_cache=False, ranks=2)
    begun = []
    replay = extension.replay

    def noted(*given: Any, **named: Any) -> mx.array:
        if "numbers" in named:  # the first graph of a step
            begun.append(named["rows"])
        return replay(*given, **named)

    monkeypatch.setattr(extension, "replay", noted)
    company = Company(ranks.loaded, config, open_executor=ranks.open_executor)
    company.run(prompts([3], 6))
    extension.finish()
    assert len(opened) == 2
    for each in opened:
        assert each.verified
        assert all(each.verified.values())
    assert opened[0].verified == opened[1].verified
    counts = [count for _, count in opened[0].verified]
    assert counts == [4, 1]
    assert len(begun) == 2 * (len(counts) + 4), "of each rank: a step a check, and four"
