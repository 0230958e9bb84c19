"""Measures what a KV format costs in quality, against the model's own plain cache."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.cache.formats.table import layer_costs
from quire.cache.ledger import Page, PoolKey
from quire.cache.pools import Pools
from quire.cache.specs import KVFormat, RecurrentState, group_layers
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.engine.inputs import Layout, StepInputs
from quire.models.loader import DTYPES, LoadedModel
from quire.request import Request, SamplingParams
from quire.scheduler.plan import StepPlan, Work
from quire.scheduler.sequence import Sequence

PAGE_TOKENS = 64
_CHUNK = 256
_KV_MEMORY = 1 << 30

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Gate:
    """Bars of a format, all against plain.

    Attributes:
        perplexity: the largest ratio to plain's.
    """

    name: str
    kl_mean: float
    kl_p99: float
    top1: float
    perplexity: float


NEAR_LOSSLESS = Gate("near-lossless", 0.002, 0.03, 0.985, 1.005)
BALANCED = Gate("balanced", 0.01, 0.15, 0.965, 1.01)
GATES = {"page-8": NEAR_LOSSLESS, "page-4": BALANCED}


@dataclass(slots=True)
class Score:
    """One format. Divergences are in nats a token.

    Attributes:
        bits: an element of keys and values, scales counted, no layer left plain.
        greedy: share of continuations that equal plain's for 64 tokens.
        needles: (length, depth, found) of each needle.
    """

    format: str
    bits: float
    kl_mean: float = 0.0
    kl_p99: float = 0.0
    top1: float = 1.0
    perplexity: float = 0.0
    plain_perplexity: float = 0.0
    greedy: float = 1.0
    needles: list[tuple[int, float, bool]] = field(default_factory=list)

    @property
    def retrieved(self) -> float:
        """Share of needles found; 1 if there were none to find."""
        found = [found for _, _, found in self.needles]
        return sum(found) / len(found) if found else 1.0

    def misses(self, plain: Score) -> list[str]:
        """The bars of its gate that the format misses, in words."""
        gate = GATES.get(self.format)
        if gate is None:
            return []
        ratio = self.perplexity / self.plain_perplexity
        bars = [
            ("mean KL", self.kl_mean, gate.kl_mean, self.kl_mean <= gate.kl_mean),
            ("99th percentile of KL", self.kl_p99, gate.kl_p99, self.kl_p99 <= gate.kl_p99),
            ("top-1 agreement", self.top1, gate.top1, self.top1 >= gate.top1),
            ("perplexity ratio", ratio, gate.perplexity, ratio <= gate.perplexity),
            (
                "retrieval",
                self.retrieved,
                plain.retrieved,
                self.retrieved >= plain.retrieved - 0.01,
            ),
        ]
        return [
            f"{self.format} ({gate.name}): {name} is {value:.4g}, the bar is {bar:.4g}"
            for name, value, bar, held in bars
            if not held
        ]


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
            following = mx.array(tokens[start + 1 : start + 1 + size])
            plain = _log_probabilities(reference.logits(start, size))
            plain_loss += _loss(plain, following)
            count += size
            for reader, total in zip(readers, sums, strict=True):
                got = _log_probabilities(reader.logits(start, size))
                divergence = (mx.exp(plain) * (plain - got)).sum(axis=-1)
                same = mx.argmax(plain, axis=-1) == mx.argmax(got, axis=-1)
                total.divergences.append(np.array(divergence))
                total.agreed += int(same.sum().item())
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
    return -float(picked.sum().item())


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
        kv_skip_layers=(),
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
