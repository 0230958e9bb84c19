"""A real engine serves a request whose exact worst case is the budget."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.cache.specs import group_layers
from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import FinishReason, Request
from quire.engine.assembly import assemble
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.tiny_models import gemma4_config, write_model

PROMPT = tuple(3 + number % 50 for number in range(236))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """Return a model whose window holds the whole request, so that each group needs its worst
    case.
    """
    folder = tmp_path_factory.mktemp("model")
    return open_model(str(write_model(folder, gemma4_config(sliding_window=512))))


@pytest.mark.parametrize("skipped", ["none", "full", "window", "all"])
@pytest.mark.parametrize("spare", [0, 1])
def test_a_request_finishes_within_its_worst_case(
    skipped: str, spare: int, loaded: LoadedModel
) -> None:
    groups = group_layers(loaded.model.layout)
    kinds = {"none": (), "all": groups}
    kinds |= {
        k: [g for g in groups if g.spec.sees_all == (k == "full")] for k in ("full", "window")
    }
    layers = tuple(sorted(layer for group in kinds[skipped] for layer in group.layers))
    assert bool(layers) == (skipped != "none")
    config = EngineConfig(
        str(loaded.path),
        kv_memory=32 << 20,
        block_size=32,
        kv_format=KVFormat("page", 4, 4),
        kv_skip_layers=layers,
    )
    stored = KVFormat("page", 4, 4, skip_layers=layers)
    budget = assemble(loaded, config)._scheduler.limits.worst_case_bytes(stored, 256)
    engine = assemble(loaded, replace(config, kv_memory=budget + spare))
    engine.add(Request("exact", PROMPT, max_tokens=20))
    engine.add(Request("behind it", PROMPT[:5], max_tokens=3))
    ended = {}
    for _ in range(200):
        ended |= {o.request_id: o.finish for o in engine.step() if o.finish is not None}
    assert ended == dict.fromkeys(("exact", "behind it"), FinishReason.LENGTH)
