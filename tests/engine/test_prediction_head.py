"""A checkpoint's own head drafts within the engine's steps, and changes no answer."""

from __future__ import annotations

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
from quire.engine.factory import open_engine
from quire.executor.guessing import MTPChainGuesser, MTPGuesser
from quire.models.base import named_parameters
from quire.models.decoder import DecoderModel
from quire.models.registry import build
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import EveryDraft
from quire.scheduler.drafts import Draft, DraftQuery
from quire.scheduler.plan import StepPlan, StepResult
from quire.speculation.heads import HeadDrafter
from tests.engine.test_speculation import FORMATS, SAMPLED, bound
from tests.models.solo import SoloStep
from tests.support import families
from tests.support.everyday import everyday
from tests.support.parity import Company, assert_same, prompts
from tests.support.tiny_models import qwen3_5_config, random_weights, tiny_model, write_model

HIDDEN = 64


NOTHING = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
"""Ends of names of what a layer adds."""


def head_of(weights: dict[str, mx.array], *, passing: bool = False) -> dict[str, mx.array]:
    """Return a head whose layer is the model's third.

    Args:
        passing: the embedding of the following token goes in alone; else both, at random.
    """
    layer = {
        name.replace("model.layers.2.", "mtp.layers.0."): 1.0 * array
        for name, array in weights.items()
        if name.startswith("model.layers.2.")
    }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
    ends = {f"mtp.{name}.weight": mx.ones(HIDDEN) for name in norms}
    fc = 0.1 * mx.random.normal((HIDDEN, 2 * HIDDEN), key=mx.random.key(5))
    if passing:
        fc = mx.concatenate([mx.eye(HIDDEN), mx.zeros((HIDDEN, HIDDEN))], axis=1)
    final = weights["model.norm.weight"]
    return layer | ends | {"mtp.norm.weight": 1.0 * final, "mtp.fc.weight": fc}


def drawn_head(config: dict[str, Any], head: int = 0) -> dict[str, mx.array]:
    """Return a head of random weights, by the names of the family's checkpoints."""
    model = build(config)
    assert isinstance(model, DecoderModel)
    assert model.add_heads([f"model.{names.layer}" for names in model.names.heads]) > head
    names = model.names.heads[head]
    theirs = {ours: name for name, ours in names.parts.items()}
    found = {}
    for number, (name, place) in enumerate(sorted(named_parameters(model.heads[head]).items())):
        module, _, kind = name.rpartition(".")
        noise = mx.random.normal(place.shape, key=mx.random.key(100 * head + number))
        own = theirs.get(module, names.layer + module.removeprefix("layer."))
        flat = 1 + 0.1 * noise
        found[f"model.{own}.{kind}"] = (
            flat if place.ndim == 1 else 1.5 * noise * place.shape[-1] ** -0.5
        )
    return found


def with_head(folder: Path) -> Path:
    """Writes a tiny Qwen3.5 whose checkpoint has a head, which is mostly wrong."""
    config = qwen3_5_config()
    weights = random_weights(config)
    return write_model(folder, config, weights=weights | head_of(weights))


class Recording(HeadDrafter):
    """Keeps what it drafted, by request and position, where that is known when it is guessed."""

    def __init__(self, most: int = 1, name: str = "mtp") -> None:
        super().__init__(most, name)
        self.drafted: dict[tuple[str, int], tuple[int, ...]] = {}

    def observe(self, plan: StepPlan, result: StepResult, known_s: float) -> None:
        super().observe(plan, result, known_s)
        for each in plan.sequences:
            if each.number in result.guesses and each.sampled == 1 and not each.behind:
                self.drafted[each.id, each.end + 1] = result.guesses[each.number]

    def propose(self, queries: Sequence[DraftQuery]) -> list[Draft | None]:
        drafts = super().propose(queries)
        for query, draft in zip(queries, drafts, strict=True):
            if draft is not None:
                self.drafted[query.request.id, len(query.tokens)] = draft.tokens
        return drafts


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = with_head(tmp_path_factory.mktemp("headed"))
    return open_model(str(folder), dtype="float32", with_head=True)


@pytest.fixture(scope="module")
def plain(headed: LoadedModel) -> LoadedModel:
    return open_model(str(headed.path), dtype="float32")


def settings(loaded: LoadedModel, **changes: object) -> EngineConfig:
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20, block_size=32, speculate="mtp")
    return replace(config, **changes)  # type: ignore[arg-type]


def served(loaded: LoadedModel, config: EngineConfig, most: int = 1) -> tuple[Company, Recording]:
    drafter = Recording(most)
    company = Company(loaded, config, (drafter,), EveryDraft(), MTPGuesser(loaded.model))
    return company, drafter


def expected_chain(loaded: LoadedModel, tokens: list[int], count: int) -> list[int]:
    """Return the head's guesses after `tokens`, each from its own state before, computed anew."""
    model, guesses = loaded.model, list[int]()
    states = model(SoloStep(model.layout, tokens[:-1]))
    whole = list(tokens)
    for _ in range(count):
        ahead = model.look_ahead(
            states, mx.array(whole[1:], dtype=mx.int32), SoloStep(model.layout, whole[:-1])
        )
        guesses.append(int(mx.argmax(model.logits(ahead[-1:])).item()))
        states = mx.concatenate([states, ahead[-1:]])
        whole.append(guesses[-1])
    return guesses


def expected(loaded: LoadedModel, tokens: list[int]) -> list[int]:
    """Return the head's guess of the token at each position from 2 on, everything computed at
    once.
    """
    step = SoloStep(loaded.model.layout, tokens)
    states = loaded.model(step)
    following = mx.array([*tokens[1:], 0], dtype=mx.int32)
    logits = loaded.model.logits(loaded.model.look_ahead(states, following, step))
    guesses: list[int] = mx.argmax(logits, axis=-1).tolist()
    return guesses[:-1]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_step_tokens": 9},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"prefix_cache": False, "max_step_tokens": 33}, marks=pytest.mark.slow),
    ],
)
def test_guesses_are_the_head_s_however_rows_are_computed(
    headed: LoadedModel, plain: LoadedModel, changes: dict[str, object]
) -> None:
    """Guesses are compared in chunks, in a batch and after wrong drafts; answers are those without
    a head.
    """
    wanted = prompts((3, 32, 40), tokens=16)
    answers = Company(plain, settings(plain, **changes)).run(wanted, every=2)
    company, drafter = served(headed, settings(headed, **changes))
    company.run(wanted, every=2)
    assert_same(company.answers, answers, [each.id for each in wanted])
    for request in wanted:
        tokens = [*request.prompt, *answers[request.id].tokens]
        guesses = expected(headed, tokens)
        own = {at: token for (name, at), token in drafter.drafted.items() if name == request.id}
        assert len(own) > 8
        assert own == {at: (guesses[at - 2],) for at in own}


CHAINED = {
    "qwen3_5": qwen3_5_config(),
    "qwen3_next": families.CONFIGS["qwen3_next"],
    "deepseek_v3": families.CONFIGS["deepseek_v3"],
    "glm4_moe": families.CONFIGS["glm4_moe"],
    "mimo_v2_flash": families.CONFIGS["mimo_v2_flash"],
}
"""Full attention, latent attention, and windows with sinks and values of their own size."""


@pytest.mark.parametrize(
    ("family", "format"),
    everyday(
        product(CHAINED, FORMATS),
        lambda family, format: (
            (family, format.name) in (("mimo_v2_flash", "plain"), ("glm4_moe", "page-4"))
        ),
    ),
    ids=lambda each: getattr(each, "name", each),
)
def test_further_guesses_go_on_from_the_head_s_own_state(
    family: str, format: KVFormat, tmp_path: Path
) -> None:
    """Guesses of several tokens change no answer; in plain blocks they are those of whole steps."""
    weights = random_weights(CHAINED[family])
    write_model(tmp_path, CHAINED[family], weights=weights | drawn_head(CHAINED[family]))
    loaded = open_model(str(tmp_path), dtype="float32", with_head=True)
    config = settings(loaded, kv_format=format, max_step_tokens=21)
    wanted = prompts((3, 32, 40), tokens=16)
    answers = Company(open_model(str(tmp_path), dtype="float32"), config).run(wanted, every=2)
    company, drafter = served(loaded, config, most=3)
    company.run(wanted, every=2)
    assert_same(company.answers, answers, [each.id for each in wanted])
    own = {key: tokens for key, tokens in drafter.drafted.items() if len(tokens) == 3}
    assert len(own) > 24
    if format.scheme != "plain":
        return
    for name, at in list(own)[::6]:
        request = next(each for each in wanted if each.id == name)
        tokens = [*request.prompt, *answers[name].tokens][:at]
        assert own[name, at] == tuple(expected_chain(loaded, tokens, 3))


@pytest.mark.parametrize("changes", everyday([{}, {"kv_format": FORMATS[1]}], ({}).__eq__))
def test_each_head_goes_on_from_the_one_before(changes: dict[str, Any], tmp_path: Path) -> None:
    """Guesses of the first draft of an answer are those of all heads over the whole prompt."""
    config = families.CONFIGS["mimo_v2_flash"]
    heads = [drawn_head(config, number) for number in range(3)]
    weights = random_weights(config) | heads[0] | heads[1] | heads[2]
    write_model(tmp_path, config, weights=weights)
    loaded = open_model(str(tmp_path), dtype="float32", with_head=True)
    model, count = loaded.model, 3
    assert len(model.layout) == len(model.own_layout) + count
    wanted = prompts((3, 20, 30), tokens=16)
    own = settings(loaded, **changes)
    answers = Company(open_model(str(tmp_path), dtype="float32"), own).run(wanted, every=2)
    drafter = Recording(count)
    company = Company(loaded, own, (drafter,), EveryDraft(), MTPChainGuesser(model))
    company.run(wanted, every=20)  # each prompt is read in one step
    assert_same(company.answers, answers, [each.id for each in wanted])
    assert company.engine.stats().drafts[0][1] > 24 * count
    if changes:
        return
    for request in wanted:
        tokens = [*request.prompt, answers[request.id].tokens[0]]
        step = SoloStep(model.layout, tokens[:-1])
        states, guesses = model(step), list[int]()
        for number in range(count):
            following = mx.array([*tokens[number + 1 :], *guesses], dtype=mx.int32)
            states = model.look_ahead(states, following, step, head=number)
            guesses.append(int(mx.argmax(model.logits(states[-1:])).item()))
        assert drafter.drafted[request.id, len(tokens)] == tuple(guesses)


def test_a_head_that_is_right_saves_steps(tmp_path: Path) -> None:
    """Layers that add nothing, so that a head which passes the embedding on is always right."""
    config = qwen3_5_config(tie_word_embeddings=False)
    weights = {
        name: array * (0 if name.endswith(NOTHING) else 1)
        for name, array in random_weights(config).items()
    }
    folder = write_model(tmp_path, config, weights=weights | head_of(weights, passing=True))
    loaded = open_model(str(folder), dtype="float32", with_head=True)
    wanted = prompts((3, 40), tokens=30)
    off = Company(loaded, settings(loaded))
    answers = off.run(wanted)
    company, _ = served(loaded, settings(loaded))
    company.run(wanted)
    assert_same(company.answers, answers, [each.id for each in wanted])
    stats = company.engine.stats()
    assert dict(stats.drafts) == dict(stats.accepted_drafts)
    assert stats.steps < 0.6 * off.engine.stats().steps


def test_bound_and_sampled_answers_are_the_same(headed: LoadedModel, plain: LoadedModel) -> None:
    """Rows that await masks are drawn first, and the head runs after them."""
    wanted = [
        replace(each, sampling=params)
        for each, params in zip(prompts((5, 30, 64), tokens=12), SAMPLED[:3], strict=True)
    ]
    wanted += [replace(each, id=f"bound {each.id}") for each in bound(prompts((3, 40, 64), 12))]
    config = settings(plain)
    answers = Company(plain, config).run(wanted)
    company, _ = served(headed, config)
    company.run(wanted)
    for each in wanted:
        assert company.answers[each.id].tokens == answers[each.id].tokens
    assert dict(company.engine.stats().drafts)["mtp"] > 20


def test_an_engine_opens_with_its_head(headed: LoadedModel, tmp_path: Path) -> None:
    config = settings(headed, dtype="float32", max_step_tokens=32)
    engine = open_engine(config)
    engine.add(replace(prompts((20,), tokens=12)[0], speculation="mtp"))
    while engine.has_work:
        engine.step()
        engine.flush()
    assert dict(engine.stats().finished)["length"] == 1
    folder = tiny_model(tmp_path, "qwen3_5")
    with pytest.raises(ModelError, match="no head"):
        open_engine(replace(config, model=str(folder)))
