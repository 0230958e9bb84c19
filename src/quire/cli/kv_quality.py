"""Measures what a KV format costs in quality, against the model's own plain cache."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.cache.formats.choose import skipped_layers, with_skips
from quire.cache.formats.table import layer_costs
from quire.cache.ledger import Page, PoolKey
from quire.cache.pools import Pools
from quire.cache.specs import KVFormat, RecurrentState, group_layers
from quire.cli.kv_scores import Score
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.inputs import Layout, StepInputs
from quire.models.loader import DTYPES, LoadedModel, open_model
from quire.request import Request, SamplingParams
from quire.scheduler.plan import StepPlan, Work
from quire.scheduler.sequence import Sequence
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

PAGE_TOKENS = 64
_CHUNK = 256
_KV_MEMORY = 1 << 30
_OWN_TEXTS = 4
_ANSWER = 48
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_CONTINUED = 64

_OPENINGS = (
    "Tell me something about yourself.",
    "What is the capital of France?",
    "Repeat after me: the quick brown fox jumps over the lazy dog.",
    "What is 27 plus 45?",
    "My name is Anna and I live in Rome.",
    "Count from 1 to 20.",
    "Write a short story about a boat and a dog.",
    "Which colours does the rainbow have?",
)

Floats = npt.NDArray[np.float32]


def bits_an_element(loaded: LoadedModel, format: KVFormat) -> float:
    """Of keys and values in all attention layers, scales counted, open pages not."""
    groups = group_layers(loaded.model.layout)
    costs = layer_costs(groups, format, PAGE_TOKENS, DTYPES[loaded.dtype])
    stored = sum(len(c.layers) * c.token_bytes for c in costs)
    elements = sum(len(c.layers) * 2 * c.spec.kv_heads * c.spec.head_dim for c in costs)
    return 8 * stored / elements


class Reader:
    """Reads one given text in one format and gives the logits of every position."""

    def __init__(self, loaded: LoadedModel, format: KVFormat, tokens: Seq[int]) -> None:
        self._model = loaded.model
        groups = group_layers(loaded.model.layout)
        self._layout = Layout.of(loaded.model.layout, groups)
        self._pools = Pools(groups, PAGE_TOKENS, DTYPES[loaded.dtype])
        self._sequence = Sequence(Request("text", tuple(tokens)), format, b"", 0)
        pages = -(-len(tokens) // PAGE_TOKENS)
        for group in groups:
            key = PoolKey(group.index, format)
            if isinstance(group.spec, RecurrentState):
                self._pools.states(group.index, format).resize(1, ())
                self._sequence.tables.append([Page(key, 0)])
                continue
            pool = self._pools.kv(group.index, format)
            pool.resize(pages, (), open=False)
            self._sequence.tables.append([Page(key, id) for id in range(pages)])
            if format.seals:
                pool.resize(1, (), open=True)
                open_key = PoolKey(group.index, format, open=True)
                self._sequence.opens[group.index] = Page(open_key, 0)

    def logits(self, start: int, count: int) -> mx.array:
        """`[count, vocab]` after tokens `start` and on; must be called for one after the other."""
        plan = StepPlan([Work(self._sequence, start, count, sample=False)])
        inputs = StepInputs(plan, self._layout, self._pools, 0, {}, None)
        logits = self._model.logits(self._model(inputs))
        mx.eval(logits, self._pools.arrays())
        return logits


@dataclass(slots=True)
class _Forced:
    divergences: list[Floats] = field(default_factory=list)
    agreed: int = 0
    loss: float = 0.0


def teacher_forced(
    loaded: LoadedModel, formats: Seq[KVFormat], texts: Seq[Seq[int]], scores: Seq[Score]
) -> None:
    """Fills in divergence, agreement and perplexity. All formats read the texts in step."""
    sums = [_Forced() for _ in formats]
    plain_loss, count = 0.0, 0
    for tokens in texts:
        reference = Reader(loaded, KVFormat(), tokens)
        readers = [Reader(loaded, format, tokens) for format in formats]
        for start in range(0, len(tokens) - 1, _CHUNK):
            size = min(_CHUNK, len(tokens) - 1 - start)
            following = mx.array(list(tokens[start + 1 : start + 1 + size]))
            plain = _log_probabilities(reference.logits(start, size))
            plain_loss += _loss(plain, following)
            count += size
            for reader, total in zip(readers, sums, strict=True):
                got = _log_probabilities(reader.logits(start, size))
                divergence = (mx.exp(plain) * (plain - got)).sum(axis=-1)
                same = mx.argmax(plain, axis=-1) == mx.argmax(got, axis=-1)
                total.divergences.append(np.array(divergence))
                total.agreed += int(np.array(same).sum())
                total.loss += _loss(got, following)
    for score, total in zip(scores, sums, strict=True):
        divergences = np.concatenate(total.divergences)
        score.kl_mean = float(divergences.mean())
        score.kl_p99 = float(np.quantile(divergences, 0.99))
        score.top1 = total.agreed / count
        score.perplexity = float(np.exp(total.loss / count))
        score.plain_perplexity = float(np.exp(plain_loss / count))


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _loss(log_probabilities: mx.array, following: mx.array) -> float:
    picked = mx.take_along_axis(log_probabilities, following[:, None], axis=-1)
    return -float(np.array(picked).sum())


def generate(
    loaded: LoadedModel,
    format: KVFormat,
    prompts: Seq[Seq[int]],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    stops: frozenset[int] = frozenset(),
) -> list[tuple[int, ...]]:
    """The answers to prompts, all in one engine."""
    config = EngineConfig(
        model=str(loaded.path),
        kv_memory=_KV_MEMORY,
        kv_format=format,
        kv_skip_layers=format.skip_layers,
        prefix_cache=False,
    )
    engine = Engine(loaded, config)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, seed=number)
        request = Request(
            str(number), tuple(prompt), sampling, max_tokens=max_tokens, stop_token_ids=stops
        )
        engine.add(request)
    answers: dict[str, tuple[int, ...]] = {str(number): () for number in range(len(prompts))}
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id] += output.token_ids
    return list(answers.values())


_SUBJECTS = ("The teacher", "A farmer", "My neighbour", "The old sailor", "Her brother", "The cook")
_VERBS = ("saw", "bought", "found", "painted", "lost", "described", "sold", "remembered")
_OBJECTS = ("a red boat", "the quiet garden", "two green apples", "an old clock", "a small dog")
_OWNERS = ("Anna", "Peter", "Maria", "Tom", "Laura", "David", "Sofia", "Max")


def needle(sentences: int, depth: float, seed: int) -> tuple[str, str]:
    """Filler with a code in it at a depth from 0 to 1, and the code that is asked for."""
    rng = random.Random(f"{sentences}:{depth}:{seed}")
    owner, code = rng.choice(_OWNERS), str(rng.randint(10000, 99999))
    lines = [
        f"{rng.choice(_SUBJECTS)} {rng.choice(_VERBS)} {rng.choice(_OBJECTS)}."
        for _ in range(sentences)
    ]
    lines.insert(round(depth * len(lines)), f"The code of {owner} is {code}.")
    return f"{' '.join(lines)}\n\nWhat is the code of {owner}?", code


def evaluate(
    model: str,
    formats: Seq[KVFormat],
    text: Path | None,
    tokens: int,
    lengths: Seq[int],
    needles_each: int,
    prompts: int,
    as_served: bool,
) -> list[Score]:
    """Scores of plain, first, and of each format.

    Args:
        text: read teacher-forced; None takes what the model itself writes.
        tokens: of text, at most.
        lengths: of prompts with a needle; `needles_each` for each length and depth.
        prompts: how many are continued greedily.
        as_served: leave the layers plain that the server leaves plain by default.

    Raises:
        ModelError: the model cannot be opened.
    """
    loaded = open_model(model)
    tokenizer = Tokenizer.open(loaded.path)
    template = ChatTemplate.open(loaded.path, tokenizer.special_tokens)
    skipped = skipped_layers(loaded.model.layout, None) if as_served else ()
    every = [KVFormat(), *(with_skips(each, skipped) for each in formats)]
    scores = [Score(each.name, bits_an_element(loaded, each)) for each in every]
    openings = [_prompt(tokenizer, template, line) for line in _OPENINGS]
    if text is not None:
        texts = [tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]]
    else:
        texts = _own_texts(loaded, tokenizer, template, tokens)
    teacher_forced(loaded, every, texts, scores)
    # Beginnings long enough that most of what is read is coded.
    cuts = [read[:length] for read in texts for length in (97, 161) if len(read) > length]
    continued = (cuts + openings)[:prompts]
    if continued:
        _continue(loaded, every, continued, scores)
    for length in lengths:
        _find_needles(loaded, tokenizer, template, every, length, needles_each, scores)
    return scores


def _prompt(tokenizer: Tokenizer, template: ChatTemplate, text: str) -> list[int]:
    if not template.exists:
        return tokenizer.encode(text, add_special_tokens=True)
    rendered = template.render([{"role": "user", "content": text}], add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)


def _own_texts(
    loaded: LoadedModel, tokenizer: Tokenizer, template: ChatTemplate, tokens: int
) -> list[list[int]]:
    """Long prompts whose answers lie far back in them, and what the model answers, seeded."""
    each = max(2 * _ANSWER, tokens // _OWN_TEXTS)
    prompts = []
    for seed in range(_OWN_TEXTS):
        prompt, _ = _sized(tokenizer, template, each - _ANSWER, 0.1 + 0.2 * seed, seed)
        prompts.append(prompt)
    answers = generate(loaded, KVFormat(), prompts, max_tokens=_ANSWER, temperature=1.0)
    return [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]


def _sized(
    tokenizer: Tokenizer, template: ChatTemplate, length: int, depth: float, seed: int
) -> tuple[list[int], str]:
    """A prompt of about `length` tokens with a needle in it, and what it asks for.

    Grows until it is long enough: what a sentence takes depends on the tokenizer.
    """
    sentences = 1
    while True:
        text, code = needle(sentences, depth, seed)
        prompt = _prompt(tokenizer, template, text)
        if len(prompt) >= length:
            return prompt, code
        sentences = max(sentences + 1, sentences * length // (len(prompt) + 8))


def _continue(
    loaded: LoadedModel,
    formats: Seq[KVFormat],
    prompts: Seq[Seq[int]],
    scores: Seq[Score],
) -> None:
    answers = [generate(loaded, each, prompts, max_tokens=_CONTINUED) for each in formats]
    for score, got in zip(scores, answers, strict=True):
        equal = [a == b for a, b in zip(got, answers[0], strict=True)]
        score.greedy = sum(equal) / len(equal)


def _find_needles(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    formats: Seq[KVFormat],
    length: int,
    each: int,
    scores: Seq[Score],
) -> None:
    items = [
        (depth, *_sized(tokenizer, template, length, depth, seed))
        for depth in _DEPTHS
        for seed in range(each)
    ]
    for format, score in zip(formats, scores, strict=True):
        prompts = [prompt for _, prompt, _ in items]
        stops = frozenset(loaded.eos_ids)
        answers = generate(loaded, format, prompts, max_tokens=24, stops=stops)
        for (depth, _, code), answer in zip(items, answers, strict=True):
            score.needles.append((length, depth, code in tokenizer.decode(answer)))
