"""Promise 1 for split models: the tokens of one process, for every family, format and company.

The ranks run in lockstep in this process; `test_ranks` has real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.device.weights import Packing
from quire.models.base import named_parameters
from quire.models.weights.convert import convert
from quire.models.weights.loader import open_model
from quire.scheduler.draft_lengths import EveryDraft
from tests.engine import test_image_parity as pictures
from tests.engine.test_draft_model import drafted
from tests.engine.test_speculation import KINDS, Scripted
from tests.models.test_family_parity import FAMILY_SCENARIOS
from tests.support.everyday import everyday
from tests.support.lockstep import Lockstep
from tests.support.parity import (
    SCENARIOS,
    TOLERANCE,
    Company,
    alone,
    assert_same,
    preempted,
    prompts,
)
from tests.support.registered import CONFIGS
from tests.support.tiny_models import write_model

FORMATS = (
    KVFormat(),
    KVFormat("page", 4, 4),
    KVFormat("uniform", 8, 8, 32),
    KVFormat("turbo", 3.5, 3.5),
)
LENGTHS, TOKENS = (5, 40, 65), 12
_STEP = {"attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2}}
EVEN: dict[str, dict[str, Any]] = {
    "kimi_linear": {
        "linear_attn_config": CONFIGS["kimi_linear"]["linear_attn_config"] | {"num_heads": 4}
    },
    "step3p5": _STEP,
    "step3p7": {"text_config": CONFIGS["step3p5"] | _STEP},
}
"""Changes of tiny models some of whose layers have three heads."""
UNTRANSLATED = "glm4"
"""A family whose tiny checkpoint lacks the published names."""
SEVERAL = ("falcon_h1", "gemma4_moe, text", "qwen3_5, text", "deepseek_v3")
"""Attention beside state spaces; windows and experts; delta nets; latents."""
TURNED = 5e-2
"""The most that logits may differ, relative to the largest of the row, where a code was turned."""
DAILY = {("falcon_h1", "plain"), ("gemma4_ple, text", "page-4"), ("qwen3_5_moe, text", "plain")}

Opened = Callable[[str], EngineConfig]


def tolerance(format: KVFormat) -> float:
    """Return the tolerance of logits: split sums are rounded otherwise, which may turn a packed
    code.
    """
    return TOLERANCE if format.name == "plain" else TURNED


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Return settings of an engine with a family's tiny model, each written once."""

    @cache
    def find(name: str) -> EngineConfig:
        configs = CONFIGS if name in CONFIGS else pictures.FAMILIES
        config = configs[name] | EVEN.get(name, {})
        path = str(write_model(tmp_path_factory.mktemp("split") / "model", config))
        return EngineConfig(path, kv_memory=64 << 20, kv_skip_layers=(), prefix_cache=False)

    return find


Split = Callable[[EngineConfig, int], Lockstep]


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> Split:
    """Splits a model; engines of this test run it so from then on."""

    def lockstep(config: EngineConfig, size: int) -> Lockstep:
        made = Lockstep(config.model, size, dtype="float32")
        monkeypatch.setattr(Company, "usual_executor", staticmethod(made.open_executor))
        return made

    return lockstep


def names(answers: Iterable[Any]) -> list[str]:
    return [request.id for request in answers]


@pytest.mark.parametrize(
    ("family", "format"),
    everyday(
        product([name for name in CONFIGS if name != UNTRANSLATED], FORMATS),
        lambda family, format: (family, format.name) in DAILY,
    ),
    ids=lambda each: getattr(each, "name", each),
)
def test_as_one_process(opened: Opened, split: Split, family: str, format: KVFormat) -> None:
    config = replace(opened(family), kv_format=format)
    loaded = open_model(config.model, dtype="float32")
    wanted = prompts(LENGTHS, TOKENS)
    expected = Company(loaded, config).run(wanted)
    got = Company(split(config, 2).loaded, config).run(wanted)
    assert_same(got, expected, names(wanted), tolerance(format))


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS[:2], ids=lambda format: format.name)
@pytest.mark.parametrize("scenario", FAMILY_SCENARIOS.keys())
@pytest.mark.parametrize("family", SEVERAL)
def test_in_any_company(
    opened: Opened, split: Split, family: str, scenario: str, format: KVFormat
) -> None:
    """Prefix hits among others."""
    config = replace(opened(family), kv_format=format)
    wanted = prompts((5, 40, 65, 130), 28)
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    loaded = split(config, 2).loaded
    got = FAMILY_SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, expected, names(wanted), tolerance(format))


@pytest.mark.slow
@pytest.mark.parametrize("family", SEVERAL)
def test_who_gave_way_goes_on(opened: Opened, split: Split, family: str) -> None:
    """Five prompts of a block each, in room for four, which all grow into a second one."""
    config = opened(family)
    wanted = prompts((50,) * 5, 16)
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    assert_same(preempted(split(config, 2).loaded, config, wanted), expected, names(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("family", SEVERAL)
def test_drafts_change_no_token(opened: Opened, split: Split, family: str) -> None:
    config = replace(opened(family), block_size=32)
    wanted = prompts((3, 32, 40), 40)
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    drafter = Scripted(expected, KINDS["random"])
    company = Company(split(config, 2).loaded, config, (drafter,), EveryDraft())
    assert_same(company.run(wanted, every=3), expected, names(wanted))
    assert drafter.right > 0
    assert drafter.wrong > 0


@pytest.mark.slow
def test_a_draft_model_changes_no_token(opened: Opened, split: Split) -> None:
    """The whole model drafts for its split self."""
    config = replace(opened("llama"), block_size=32)
    wanted = prompts((3, 32, 40), 24)
    whole = open_model(config.model, dtype="float32")
    expected = alone(whole, config, wanted)
    company, _ = drafted(split(config, 2).loaded, config, whole, wanted)
    assert_same(company.answers, expected, names(wanted))
    assert dict(company.engine.stats().accepted_drafts)["draft"] > 40


@pytest.mark.slow
@pytest.mark.parametrize("family", pictures.FAMILIES)
def test_pictures(opened: Opened, split: Split, family: str) -> None:
    config = opened(family)
    wanted = pictures.requests(family)[:4]
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    got = SCENARIOS["in chunks of 33"](split(config, 2).loaded, config, wanted)
    assert_same(got, expected, names(wanted))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma4, text", "qwen3_5, text", "mamba2"])
def test_four_ranks(opened: Opened, split: Split, family: str) -> None:
    """Several ranks have the same heads of keys, and heads of the same group."""
    config = opened(family)
    wanted = prompts(LENGTHS, TOKENS)
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    got = Company(split(config, 4).loaded, config).run(wanted)
    assert_same(got, expected, names(wanted))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"intermediate_size": 96}),  # three groups for two ranks
        ("gemma4_moe, text", {"moe_intermediate_size": 64}),
        ("qwen3_5, text", {}),
        ("qwen3_moe", {"moe_intermediate_size": 32}),  # one group: whole experts on each rank
        ("gpt_oss", {"intermediate_size": 32}),
    ],
)
def test_packed_weights(split: Split, tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "whole", CONFIGS[family] | changes)
    packed = tmp_path / "packed"
    convert(str(folder), packed, Packing(32, 4, "affine"), (), lambda *_: lambda: None)
    config = EngineConfig(str(packed), kv_memory=64 << 20, prefix_cache=False)
    wanted = prompts(LENGTHS, TOKENS)
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    made = split(config, 2)
    assert any(name.endswith(".scales") for name in named_parameters(made.loaded.model))
    assert_same(Company(made.loaded, config).run(wanted), expected, names(wanted))
