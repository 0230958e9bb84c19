"""EAGLE-3 heads and DFlash drafters draft from the model's hidden states, and change no answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.core.kv_format import KVFormat
from quire.engine.draft_opening import Drafters, open_drafters
from quire.engine.draft_states import StatesDrafter
from quire.engine.factory import open_engine
from quire.models.eagle import EagleHead
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.drafts import Draft, DraftQuery
from tests.engine.test_speculation import FORMATS, SAMPLED, bound
from tests.models.solo import SoloStep
from tests.support.drafters import speculators, write_dflash, write_head
from tests.support.everyday import everyday
from tests.support.parity import Company, assert_same, prompts
from tests.support.tiny_models import tiny_model

WRITERS = {"eagle": write_head, "dflash": write_dflash}
DAILY = (("eagle", "qwen3_5", "page-4"), ("dflash", "qwen3_moe", "plain"))


class Opened:
    """A tiny model and its head, or another drafter that `write` makes."""

    def __init__(self, folder: Path, family: str, write: Any = write_head) -> None:
        path = tiny_model(folder / "model", family)
        self.plain = open_model(str(path), dtype="float32")
        self.loaded = open_model(str(path), dtype="float32")
        write(folder / "head", self.loaded)
        self.config = EngineConfig(
            str(path),
            kv_memory=64 << 20,
            block_size=32,
            speculate="draft",
            draft_model=str(folder / "head"),
            dtype="float32",
            kv_skip_layers=(),
        )

    def company(self, config: EngineConfig | None = None) -> tuple[Company, StatesDrafter]:
        """Return an engine that verifies every draft of the head."""
        found: Drafters = open_drafters(self.loaded, config or self.config)
        drafter = found.drafters[-1]
        assert isinstance(drafter, StatesDrafter)
        company = Company(
            self.loaded, found.config, (drafter,), EveryDraft(), guesser=found.guesser
        )
        return company, drafter

    def alone(self, config: EngineConfig | None = None) -> Company:
        plain = replace(config or self.config, speculate="off", draft_model=None)
        return Company(self.plain, plain)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(tmp_path_factory.mktemp("eagle"), "llama")


def guesses(loaded: LoadedModel, head: EagleHead, tokens: Sequence[int], count: int) -> list[int]:
    """Return what the head guesses after tokens, everything computed at once."""
    output = loaded.model(SoloStep(loaded.model.layout, list(tokens[:-1])))
    width = loaded.config["hidden_size"]
    states = head.project(output[:, width:])
    read = list(tokens[1:])
    for _ in range(count):
        after = head.forward(SoloStep(head.layout, read), states)
        read.append(int(mx.argmax(head.logits(after[-1:])).item()))
        states = mx.concatenate([states, after[-1:]])
    return read[-count:]


def test_guesses_are_the_head_s_however_rows_are_computed(llama: Opened) -> None:
    """Prompts in chunks, right and wrong drafts, company: the head sees what it saw alone."""
    config = replace(llama.config, max_step_tokens=33, prefix_cache=False)
    company, drafter = llama.company(config)
    seen: list[tuple[list[int], tuple[int, ...]]] = []
    propose = drafter.propose

    def recording(queries: Sequence[DraftQuery]) -> list[Draft | None]:
        found = propose(queries)
        for query, draft in zip(queries, found, strict=True):
            if draft is not None:
                seen.append((list(query.tokens), draft.tokens))
        return found

    drafter.propose = recording  # type: ignore[method-assign]
    company.run(prompts((3, 40, 70), tokens=20), every=3)
    head = drafter._model
    assert isinstance(head, EagleHead)
    assert len(seen) > 20
    for tokens, drafted in seen[::7]:
        assert list(drafted) == guesses(llama.loaded, head, tokens, len(drafted))


@pytest.mark.parametrize(
    ("kind", "family", "format"),
    everyday(
        product(WRITERS, ("llama", "qwen3", "qwen3_moe", "qwen3_5", "qwen3_5_moe"), FORMATS),
        lambda kind, family, format: (kind, family, format.name) in DAILY,
    ),
    ids=lambda each: getattr(each, "name", each),
)
def test_drafters_change_no_token(tmp_path: Path, kind: str, family: str, format: KVFormat) -> None:
    opened = Opened(tmp_path, family, WRITERS[kind])
    config = replace(opened.config, kv_format=format)
    wanted = prompts((3, 32, 40), tokens=20)
    plain = opened.alone(config)
    plain.run(wanted, every=3)
    company, _ = opened.company(config)
    company.run(wanted, every=3)
    assert_same(company.answers, plain.answers, [each.id for each in wanted])
    assert dict(company.engine.stats().drafts)["draft"] > 30


@pytest.mark.slow
def test_bound_and_sampled_answers_are_the_same(llama: Opened) -> None:
    lengths = (5, 30, 64, 70, 12, 33, 3, 40, 20)
    wanted = prompts(lengths, tokens=16)
    wanted = [
        *(replace(each, sampling=own) for each, own in zip(wanted, SAMPLED, strict=False)),
        *bound(wanted[-3:]),
    ]
    plain = llama.alone()
    plain.run(wanted)
    company, _ = llama.company()
    company.run(wanted)
    for each in wanted:
        assert company.answers[each.id].tokens == plain.answers[each.id].tokens
    assert dict(company.engine.stats().drafts)["draft"] > 30


@pytest.mark.slow
def test_a_cached_prefix_and_pre_emption_change_nothing(llama: Opened) -> None:
    """The head has no states of a prefix that was found in the cache, and drafts from the rest."""
    config = replace(llama.config, block_size=16)
    wanted = prompts((3, 40, 64, 130), tokens=30)
    plain = llama.alone(config)
    plain.run(wanted)
    budget = 2 * plain.engine._scheduler.limits.worst_case_bytes(config.kv_format, 200)
    company, _ = llama.company(replace(config, kv_memory=budget))
    company.run(wanted)
    assert_same(company.answers, plain.answers, [each.id for each in wanted])
    assert company.engine.stats().preemptions > 0
    (first,) = wanted[2:3]
    answer = tuple(plain.answers[first.id].tokens)
    second = replace(first, id="second", prompt=(*first.prompt, *answer, 9))
    expected = llama.alone(replace(config, prefix_cache=False)).run([second])
    company, _ = llama.company(config)
    company.run([first])
    before = dict(company.engine.stats().drafts)["draft"]
    company.run([second])
    assert company.answers["second"].tokens == expected["second"].tokens
    assert company.answers["second"].ends[0].cached_tokens >= 64
    assert dict(company.engine.stats().drafts)["draft"] > before


def test_both_layouts_and_what_does_not_fit(llama: Opened, tmp_path: Path) -> None:
    weights = write_head(tmp_path / "own", llama.loaded, own_table=True, norm_before_fc=True)
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    (tmp_path / "own" / "config.json").write_text(json.dumps(speculators(config)))
    named = {name.replace("midlayer.", "layers.0."): each for name, each in weights.items()}
    mx.save_safetensors(str(tmp_path / "own" / "model.safetensors"), named)
    own = replace(llama.config, draft_model=str(tmp_path / "own"))
    assert open_drafters(llama.loaded, own).guesser is not None
    assert llama.loaded.model.captured == (1, 2, 2)
    wrong = speculators(config) | {"target_hidden_size": 128}
    (tmp_path / "own" / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(ModelError, match="target_hidden_size is 128, the model's 64"):
        open_drafters(llama.loaded, own)


def test_an_engine_opens_with_its_head(llama: Opened) -> None:
    engine = open_engine(replace(llama.config, max_context=256))
    (asked,) = prompts((9,), tokens=12)
    engine.add(asked)
    tokens = []
    while engine.has_work:
        for output in engine.step():
            tokens += output.token_ids
    expected = Company(llama.plain, llama.config).run([asked])
    assert tokens == expected[asked.id].tokens
    engine.close()


def test_a_dflash_drafter_of_another_model_is_refused(llama: Opened, tmp_path: Path) -> None:
    write_dflash(tmp_path / "drafter", llama.loaded)
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    changes = {
        "hidden_size is 128, the model's 64": {"hidden_size": 128},
        r"layers \[9\]; the model has 3": {
            "dflash_config": {"mask_token_id": 7, "target_layer_ids": [8]}
        },
        "no token 900, the mask": {
            "dflash_config": {"mask_token_id": 900, "target_layer_ids": [0]}
        },
    }
    for message, change in changes.items():
        (tmp_path / "drafter" / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ModelError, match=message):
            open_drafters(
                llama.loaded, replace(llama.config, draft_model=str(tmp_path / "drafter"))
            )
