"""Promise 1 for models split by layers: the tokens of one process, in any company.

The ranks run in lockstep in this process; `test_ranks` has real processes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.kv_format import KVFormat
from quire.demo import NAME, place
from quire.device.ranks import Part
from quire.device.weights import Packing
from quire.executor.inputs import StepInputs
from quire.models.base import named_parameters
from quire.models.shares import Stage
from quire.models.weights.convert import convert
from quire.models.weights.loader import open_model
from quire.scheduler.draft_lengths import EveryDraft
from tests.engine import test_image_parity as pictures
from tests.engine.test_speculation import KINDS, Scripted
from tests.engine.test_split_parity import FORMATS, SEVERAL, UNTRANSLATED
from tests.models.test_family_parity import FAMILY_SCENARIOS
from tests.support import encoders
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

SHARING = ("gemma3n_text", "gemma3n", "gemma3n, all")
"""Families whose tiny models have too many layers that read others' keys to be divided."""
DAILY = {("falcon_h1", "plain"), ("gemma4_ple, text", "page-4")}
LENGTHS, TOKENS = (5, 40, 65), 12


def config_of(family: str) -> dict[str, Any]:
    """Return a family's configuration, Llama's with three layers, Gemma 3n's with one that shares
    keys."""
    config = CONFIGS[family] if family in CONFIGS else pictures.FAMILIES[family]
    changes = {"num_kv_shared_layers": 1}
    if family == "llama":
        return config | {"num_hidden_layers": 3}
    if family not in SHARING:
        return config
    if "text_config" not in config:
        return config | changes
    return config | {"text_config": config["text_config"] | changes}


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write a family's tiny model. Return its settings, and what splits it: executors of this test
    are split from then on.
    """

    def find(family: str) -> tuple[EngineConfig, Any]:
        path = str(write_model(tmp_path / "model", config_of(family)))
        config = EngineConfig(path, kv_memory=64 << 20, kv_skip_layers=(), prefix_cache=False)

        def split(*weights: int) -> Lockstep:
            made = Lockstep(path, len(weights), weights, dtype="float32")
            monkeypatch.setattr(Company, "usual_executor", staticmethod(made.open_executor))
            return made

        return config, split

    return find


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that gets True for each step that a rank computes in two halves."""
    found: list[bool] = []
    halves = StepInputs.halves

    def noted(self: StepInputs) -> Any:
        both = halves(self)
        found.append(both is not None)
        return both

    monkeypatch.setattr(StepInputs, "halves", noted)
    return found


@pytest.mark.parametrize(
    ("family", "format"),
    everyday(
        product([name for name in CONFIGS if name != UNTRANSLATED], FORMATS),
        lambda family, format: (family, format.name) in DAILY,
    ),
    ids=lambda each: getattr(each, "name", each),
)
def test_as_one_process(opened: Any, halved: list[bool], family: str, format: KVFormat) -> None:
    config, split = opened(family)
    config = replace(config, kv_format=format)
    wanted = prompts(LENGTHS, TOKENS)
    expected = Company(open_model(config.model, dtype="float32"), config).run(wanted)
    got = Company(split(1, 1).loaded, config).run(wanted)
    assert_same(got, expected, [each.id for each in wanted], TOLERANCE)
    assert any(halved)


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS[:2], ids=lambda format: format.name)
@pytest.mark.parametrize("scenario", FAMILY_SCENARIOS.keys())
@pytest.mark.parametrize("family", SEVERAL)
def test_in_any_company(opened: Any, family: str, scenario: str, format: KVFormat) -> None:
    """Prefix hits among others."""
    config, split = opened(family)
    config = replace(config, kv_format=format)
    wanted = prompts((5, 40, 65, 130), 28)
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    got = FAMILY_SCENARIOS[scenario](split(1, 1).loaded, config, wanted)
    assert_same(got, expected, [each.id for each in wanted], TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("family", SEVERAL)
def test_a_preempted_request_goes_on(opened: Any, family: str) -> None:
    config, split = opened(family)
    wanted = prompts((50,) * 5, 16)
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    got = preempted(split(1, 1).loaded, config, wanted)
    assert_same(got, expected, [each.id for each in wanted])


@pytest.mark.slow
@pytest.mark.parametrize("family", SEVERAL)
def test_drafts_change_no_token(opened: Any, family: str) -> None:
    config, split = opened(family)
    config = replace(config, block_size=32)
    wanted = prompts((3, 32, 40), 40)
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    drafter = Scripted(expected, KINDS["random"])
    company = Company(split(1, 1).loaded, config, (drafter,), EveryDraft())
    assert_same(company.run(wanted, every=3), expected, [each.id for each in wanted])
    assert drafter.right > 0
    assert drafter.wrong > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", pictures.FAMILIES)
def test_pictures(opened: Any, family: str) -> None:
    config, split = opened(family)
    wanted = pictures.requests(family)[:4]
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    got = SCENARIOS["in chunks of 33"](split(1, 1).loaded, config, wanted)
    assert_same(got, expected, [each.id for each in wanted])


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(2, 1), (1, 2), (1, 1, 1)])
def test_unequal_parts(opened: Any, weights: tuple[int, ...]) -> None:
    """Each process has its layers' weights, and no others."""
    config, split = opened("llama")
    wanted = prompts(LENGTHS, TOKENS)
    whole = open_model(config.model, dtype="float32")
    expected = Company(whole, config).run(wanted)
    made = split(*weights)
    got = Company(made.loaded, config).run(wanted)
    assert_same(got, expected, [each.id for each in wanted])
    own = {name for name in named_parameters(made.loaded.model) if ".layers." in name}
    assert {int(name.split(".")[2]) for name in own} == set(range(weights[0]))


@pytest.mark.slow
def test_packed_weights(opened: Any, tmp_path: Path) -> None:
    config, _ = opened("llama")
    packed = tmp_path / "packed"
    convert(config.model, packed, Packing(32, 4, "affine"), (), lambda *_: lambda: None)
    config = replace(config, model=str(packed))
    wanted = prompts(LENGTHS, TOKENS)
    expected = alone(open_model(config.model, dtype="float32"), config, wanted)
    made = Lockstep(config.model, 2, (2, 1), dtype="float32")
    company = Company(made.loaded, config, open_executor=made.open_executor)
    assert_same(company.run(wanted), expected, [each.id for each in wanted])


@pytest.mark.parametrize(
    ("count", "weights", "parts"),
    [
        (4, (3, 1), [(0, 3), (3, 4)]),
        (80, (96, 32, 64), [(0, 40), (40, 53), (53, 80)]),
        (3, (1000, 1, 1), [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_layers_are_divided_by_weights(
    count: int, weights: tuple[int, ...], parts: list[tuple[int, int]]
) -> None:
    found = Stage(Part(0, len(weights)), weights).parts(count)
    assert [(each.start, each.stop) for each in found] == parts


@pytest.mark.parametrize(("weights", "end"), [((1, 1), 4), ((3, 1), 4), ((1, 7), 1)])
def test_layers_that_share_keys_stay_with_those_that_write_them(
    weights: tuple[int, int], end: int
) -> None:
    """The embedded model's last two layers of eight read the keys of the fifth and the sixth."""
    loaded = open_model(place(NAME), part=Part(1, 2), pipeline=weights)
    assert loaded.layers_by_rank == (range(end), range(end, 8))


def test_layers_that_all_share_keys_are_refused(tmp_path: Path) -> None:
    path = str(write_model(tmp_path, CONFIGS["gemma3n_text"]))
    with pytest.raises(ModelError, match=r"4 layers, of which some share keys: .* at most 1 proc"):
        open_model(path, part=Part(0, 2), pipeline=(1, 1))


def test_a_family_that_is_not_split_by_layers_is_refused(tmp_path: Path) -> None:
    path = str(write_model(tmp_path, encoders.CONFIGS["bert"]))
    with pytest.raises(ModelError, match="this family cannot be split by layers"):
        open_model(path, part=Part(0, 2), pipeline=(1, 1))
