"""Drafts beside adapters, pictures and the disk tier: the same tokens as without."""

from __future__ import annotations

from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import pytest

from quire.cache.disk_tier import DiskTier
from quire.core.config import DiskConfig, EngineConfig
from quire.engine.engine import Engine
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import EveryDraft
from tests.engine.test_image_parity import SHAPES, showing
from tests.engine.test_speculation import KINDS, Scripted
from tests.executor.test_adapters import ATTENTION, adapter, checkpoint
from tests.support.opened import Open
from tests.support.parity import Company, assert_same, prompts
from tests.support.tiny_models import (
    gemma4_config,
    gemma4_vision_config,
    llama_config,
    write_model,
)
from tests.support.waiting import HANG_S


def test_rows_of_several_adapters_have_drafts(tmp_path: Path) -> None:
    weights = checkpoint(tmp_path / "base", llama_config())
    paths = {
        f"a{n}": adapter(tmp_path / f"a{n}", weights, ATTENTION, rank=2, seed=n) for n in range(2)
    }
    base = str(tmp_path / "base")
    loaded = open_model(base, dtype="float32")
    config = EngineConfig(base, kv_memory=64 << 20, adapters=tuple(paths.items()))
    names = ("", "a0", "a1", "a0")
    wanted = [
        replace(each, adapter=name)
        for each, name in zip(prompts((3, 20, 40, 9), tokens=20), names, strict=True)
    ]
    plain = Company(loaded, config)
    plain.run(wanted, every=2)
    assert plain.answers["r0"].tokens != plain.answers["r1"].tokens
    company = Company(loaded, config, (Scripted(plain.answers, KINDS["random"]),), EveryDraft())
    company.run(wanted, every=2)
    assert_same(company.answers, plain.answers, [each.id for each in wanted])
    assert dict(company.engine.stats().accepted_drafts)["scripted"] > 20


def test_answers_about_pictures_have_drafts(tmp_path: Path) -> None:
    config = gemma4_vision_config(gemma4_config(use_bidirectional_attention="vision"))
    loaded = open_model(str(write_model(tmp_path, config)), dtype="float32")
    settings = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    wanted = [
        showing(each, shapes, 10 * number)
        for number, (each, shapes) in enumerate(
            zip(prompts((20, 45, 50), tokens=16), SHAPES[:3], strict=True)
        )
    ]
    plain = Company(loaded, settings)
    plain.run(wanted)
    company = Company(loaded, settings, (Scripted(plain.answers, KINDS["random"]),), EveryDraft())
    company.run(wanted, every=2)
    assert_same(company.answers, plain.answers, [each.id for each in wanted])
    assert dict(company.engine.stats().accepted_drafts)["scripted"] > 15


@pytest.mark.parametrize("kind", ["lying", pytest.param("random", marks=pytest.mark.slow)])
def test_the_disk_gets_accepted_tokens_alone(
    opened: Open, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation that goes on after a restart finds its answer, and continues as if alone."""
    monkeypatch.setattr("quire.cache.disk_prefetch._MIN_TIMEOUT_S", HANG_S)
    monkeypatch.setattr(DiskTier, "close", partialmethod(DiskTier.close, HANG_S))
    loaded: LoadedModel = opened("llama")
    config = EngineConfig("", kv_memory=64 << 20, block_size=16)
    (first,) = prompts((40,), tokens=60)
    plain = Company(loaded, config).run([first])
    answer = tuple(plain[first.id].tokens)
    second = replace(first, id="second", prompt=(*first.prompt, *answer, 9))
    expected = Company(loaded, replace(config, prefix_cache=False)).run([second])
    stored = replace(config, disk=DiskConfig(str(tmp_path), 64 << 20))
    drafter = Scripted(plain, KINDS[kind])
    company = Company(loaded, stored, (drafter,), EveryDraft())
    _settle(company.engine)
    company.run([first])
    assert drafter.wrong > 10
    company.engine.close()
    after = Company(loaded, stored)
    _settle(after.engine)
    got = after.run([second])
    assert_same(got, expected, ["second"])
    assert got["second"].ends[0].cached_tokens >= 80
    assert dict(after.engine.stats().disk)["hits"] > 0
    after.engine.close()


def _settle(engine: Engine) -> None:
    """Wait until the disk tier is open, and let reading cost nothing."""
    disk = engine._disk
    assert disk is not None
    assert disk.drain(HANG_S)
    disk.seconds = lambda size: 0.0  # type: ignore[method-assign]
