"""Drafts on every family of the registry: scripted ones, lookups, and those of a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.core.config import EngineConfig
from quire.engine.draft_model import ModelDrafter
from quire.executor.factory import open_executor
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.drafts import Drafter
from quire.speculation.drafters import lookup_drafters
from tests.engine.test_speculation import KINDS, Scripted
from tests.models.test_narrow_types import written
from tests.support import registered, tiny_models
from tests.support.everyday import everyday
from tests.support.parity import Company, Generated, assert_same, prompts

_KV_MEMORY = 64 << 20


def _drafters(loaded: LoadedModel, plain: dict[str, Generated]) -> dict[str, Sequence[Drafter]]:
    """Return the drafters that apply to every family, by what the test calls them."""
    own = open_executor(loaded, EngineConfig("", block_size=32))
    return {
        "scripted": (Scripted(plain, KINDS["random"]),),
        "lookups": lookup_drafters(),
        "draft model": (ModelDrafter(loaded, own, _KV_MEMORY, 32, read_s=1.0),),
    }


@pytest.mark.parametrize(
    "family", everyday([*registered.CONFIGS, *tiny_models.CONFIGS], "exaone4".__eq__)
)
def test_drafts_change_no_token(family: str, tmp_path: Path) -> None:
    loaded = open_model(str(written(family, tmp_path)), dtype="float32")
    if loaded.model.bidirectional:
        pytest.skip("it generates nothing")
    config = EngineConfig(str(loaded.path), kv_memory=_KV_MEMORY, block_size=32)
    wanted = prompts((3, 20), tokens=16)
    plain = Company(loaded, config)
    plain.run(wanted, every=2)
    for name, drafters in _drafters(loaded, plain.answers).items():
        company = Company(loaded, config, drafters, EveryDraft())
        company.run(wanted, every=2)
        assert_same(company.answers, plain.answers, [each.id for each in wanted])
        stats = company.engine.stats()
        if name != "lookups":  # random models do not always repeat themselves
            assert sum(dict(stats.accepted_drafts).values()) > 5, name
            assert stats.steps < plain.engine.stats().steps, name
