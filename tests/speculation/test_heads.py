"""A head of the model drafts for all sequences at once, from their last hidden states."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError, RequestError
from quire.core.kv_format import KVFormat
from quire.core.request import Request, SamplingParams
from quire.demo import MODEL_DIR
from quire.demo.skills import load
from quire.device.device import current_device, open_device
from quire.executor.eager import EagerExecutor
from quire.executor.guessing import DraftHeadGuesser
from quire.models.draft_head import FILE, DraftHead, GuessStep, TokenGuesser, open_draft_head
from quire.models.layers.common import embed
from quire.models.layers.linear import PackedLinear
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.draft_lengths import EveryDraft, WorthwhileDrafts
from quire.scheduler.drafting import Drafting
from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.sequence import Sequence, SequenceParts
from quire.speculation.drafters import allowed
from quire.speculation.heads import HeadDrafter
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tests.support.parity import Company, assert_same, prompts
from tests.support.tiny_models import tiny_model

SKILLS = Path(__file__).parents[1] / "data" / "skills"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tiny_model(tmp_path_factory.mktemp("qwen3_5"), "qwen3_5")
    return open_model(str(folder), dtype="float32")


def test_a_head_that_guesses_at_random_changes_no_answer(tiny: LoadedModel) -> None:
    config = EngineConfig(str(tiny.path), kv_memory=64 << 20, speculate="mtp")
    wanted = prompts((3, 20), tokens=20)
    plain = Company(tiny, config).run(wanted)
    width = tiny.model.model.embed_tokens.weight.shape[-1]
    guesser = DraftHeadGuesser(TokenGuesser(GuessStep(tiny.model, DraftHead(width, 8))))
    served = Company(tiny, config, (HeadDrafter(),), EveryDraft(), guesser)
    assert_same(served.run(wanted), plain, [request.id for request in wanted])
    assert dict(served.engine.stats().drafts)["mtp"] > 40


def test_the_shipped_head_is_right_more_often_than_not() -> None:
    loaded = open_model(str(MODEL_DIR), dtype="float32")
    head = open_draft_head(loaded.path, loaded.model)
    assert head is not None
    assert (MODEL_DIR / FILE).stat().st_size < 1e6
    config = EngineConfig(str(MODEL_DIR), kv_memory=64 << 20, speculate="mtp")
    wanted = questions(loaded.eos_ids)
    off = Company(loaded, config)
    plain = off.run(wanted)
    guesser = DraftHeadGuesser(TokenGuesser(GuessStep(loaded.model, head)))
    served = Company(loaded, config, (HeadDrafter(),), EveryDraft(), guesser)
    for name, answer in served.run(wanted).items():
        assert answer.tokens == plain[name].tokens
    assert served.engine.stats().steps < 0.6 * off.engine.stats().steps


def questions(ends: frozenset[int]) -> list[Request]:
    """Return one question of each of some skills, as the demonstration model reads it."""
    tokenizer = Tokenizer.open(MODEL_DIR)
    template = ChatTemplate.open(MODEL_DIR, tokenizer.special_tokens)
    asked = []
    for skill in ("counting", "json"):
        item = load(SKILLS / f"{skill}.jsonl")[0]
        kinds = {"tools": item.tools, "enable_thinking": item.enable_thinking}
        text = template.render(item.messages, **kinds)
        prompt = tuple(tokenizer.encode(text, add_special_tokens=False))
        sampling = SamplingParams(temperature=0)
        asked.append(Request(skill, prompt, sampling, max_tokens=32, stop_token_ids=ends))
    return asked


def test_the_shipped_head_chooses_from_frequent_tokens() -> None:
    loaded = open_model(str(MODEL_DIR), dtype="float32")
    head = open_draft_head(loaded.path, loaded.model)
    assert head is not None
    tokens = head.tokens
    assert tokens is not None
    assert 0 < len(tokens) < loaded.model.vocab_size / 3
    guesser = TokenGuesser(GuessStep(loaded.model, head))
    state = mx.random.normal((5, 256), key=mx.random.key(1))
    last = mx.arange(5) * 31
    first = guesser(state, last, 2)[:, 0]
    after, *_ = guesser.step(state, last)
    logits = loaded.model.logits(after)[:, tokens]
    assert first.tolist() == tokens[mx.argmax(logits, axis=-1)].tolist()


@pytest.fixture
def kernels() -> Iterator[None]:
    open_device("auto", threads=1)
    if current_device().kernels is None:
        pytest.skip("needs CPU kernels")
    yield
    current_device().choose_products("mlx")


@pytest.mark.usefixtures("kernels")
def test_the_shipped_head_guesses_from_codes_where_kernels_read_them() -> None:
    loaded = open_model(str(MODEL_DIR), dtype="float32")
    head = open_draft_head(loaded.path, loaded.model)
    assert head is not None
    step = GuessStep(loaded.model, head)
    packed = (step.fc, step.words, head.gate, head.up, head.down)
    assert all(isinstance(layer, PackedLinear) and layer.tiled for layer in packed)
    weights = dict(mx.load(str(MODEL_DIR / FILE)))
    plain = DraftHead(256, len(weights["gate.weight"]), len(weights["tokens"]))
    plain.load_weights(list(weights.items()))
    state = mx.random.normal((64, 256), key=mx.random.key(1))
    tokens = mx.arange(64) * 31
    own = plain.fc(mx.concatenate([plain.unit(state), plain.unit(_rows(loaded, tokens))], axis=-1))
    after, *_ = step(state, tokens)
    assert mx.abs(after - plain.after(own)).max().item() < 0.05 * mx.abs(after).max().item()


def _rows(loaded: LoadedModel, tokens: mx.array) -> mx.array:
    """Return embeddings `[N, hidden]`."""
    return embed(loaded.model.model.embed_tokens, tokens, mx.float32)


def test_step_times_are_learnt_from_steps_that_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """So they follow the machine's pace while every step guesses."""
    loaded = open_model(str(MODEL_DIR), dtype="float32")
    head = open_draft_head(loaded.path, loaded.model)
    assert head is not None
    guesser = DraftHeadGuesser(TokenGuesser(GuessStep(loaded.model, head)))
    config = EngineConfig(str(MODEL_DIR), kv_memory=64 << 20, speculate="mtp")
    served = Company(loaded, config, (HeadDrafter(),), EveryDraft(), guesser)
    times = served.engine.step_times.generating
    times.observe(4, 1.0)
    seen = list[tuple[int, float]]()
    monkeypatch.setattr(HeadDrafter, "token_s", lambda drafter, sequences: 0.25)
    monkeypatch.setattr(times, "observe", lambda rows, seconds, keys: seen.append((rows, seconds)))
    collect = EagerExecutor.collect
    monkeypatch.setattr(
        EagerExecutor, "collect", lambda executor: replace(collect(executor), seconds=3.0)
    )
    served.run(questions(loaded.eos_ids)[:1])
    guessed = [seconds for rows, seconds in seen if rows == 5]
    assert guessed
    assert all(seconds < 3.0 for seconds in guessed[:-1])


def test_a_head_that_does_not_fit_is_refused(tiny: LoadedModel, tmp_path: Path) -> None:
    assert open_draft_head(tmp_path, tiny.model) is None
    path = tmp_path / FILE
    path.parent.mkdir()
    mx.save_safetensors(str(path), {"gate.weight": mx.zeros((8, 16))})
    with pytest.raises(ModelError, match="draft head"):
        open_draft_head(tmp_path, tiny.model)


def test_a_head_that_is_not_there_cannot_be_asked_for() -> None:
    request = replace(Request("r", (1,)), speculation="mtp")
    assert allowed(request, "off", frozenset({"mtp", "ngram"})) == {"mtp", "ngram"}
    with pytest.raises(RequestError, match="no head"):
        allowed(request, "auto", frozenset({"ngram"}))


def _step_s(first: int, last: int) -> list[float]:
    """Return seconds of steps by rows."""
    return [1.0 + 0.01 * rows for rows in range(first, last + 1)]


def test_a_drafter_that_seemed_expensive_is_tried_again() -> None:
    """A single slow guess, such as the first, does not end drafting for ever."""
    drafter = HeadDrafter()
    drafting = Drafting((drafter,), WorthwhileDrafts(_step_s), 100, head=drafter)
    parts = SequenceParts(drafters=frozenset({"mtp"}))
    sequence = Sequence(Request("r", (1, 2)), KVFormat(), b"", 0, parts)
    assert drafting.worth_guessing([sequence]) > 0
    result = StepResult(guesses={0: (5,)}, seconds=11.0)
    drafter.observe(StepPlan(guess=1), result, 1.0)
    assert drafter.token_s(1) == 10.0
    steps = 0
    while not drafting.worth_guessing([sequence]):
        steps += 1
        assert steps < 5000
    assert steps > 100


def test_guesses_that_were_made_cost_nothing_more() -> None:
    """What further guesses would cost decides only whether the next step makes some."""
    drafter = HeadDrafter()
    drafting = Drafting((drafter,), WorthwhileDrafts(_step_s), 100, head=drafter)
    parts = SequenceParts(drafters=frozenset({"mtp"}))
    sequence = Sequence(Request("r", (1, 2)), KVFormat(), b"", 0, parts)
    assert drafting.worth_guessing([sequence]) > 0
    result = StepResult(guesses={0: (5,)}, seconds=11.0)
    drafter.take(result.guesses)
    drafter.observe(StepPlan(guess=1), result, 1.0)
    assert drafter.token_s(1) == 10.0
    assert drafting.drafts([(sequence, 4)], 1, 9)[0].tokens == (5,)
    assert drafting.worth_guessing([sequence]) == 0
    assert drafting.drafts([(sequence, 4)], 1, 9) == {}


def test_the_time_of_drafters_that_compute_is_told_apart() -> None:
    """The engine takes it from the wait for a plan, in which a draft model reads whole prompts."""
    now = iter(range(100))
    drafter = HeadDrafter()
    drafting = Drafting((drafter,), EveryDraft(), 100, clock=lambda: float(next(now)))
    parts = SequenceParts(drafters=frozenset({"mtp"}))
    sequence = Sequence(Request("r", (1, 2)), KVFormat(), b"", 0, parts)
    drafter.take({0: (5, 6)})
    assert drafting.drafts([(sequence, 4)], 1, 9)[0].tokens == (5, 6)
    assert drafting.computing_s == 1.0
