"""Measures the loss of quality of KV formats, against the model's own plain cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from quire.attention.registry import open_backends
from quire.attention.step import Attention
from quire.cache.blocks import PoolKey, Resize
from quire.cache.formats.skips import skipped_layers
from quire.cache.formats.table import layer_costs
from quire.cache.pools import Pools
from quire.cache.specs import KVLayout, group_layers
from quire.cli.kv_scores import Score
from quire.cli.kv_skills import Answering, answering, count_skills
from quire.cli.kv_texts import Text, conversation, fully_judged, prompt_of, sized_needle
from quire.cli.progress import StartStage, silent
from quire.core.errors import ModelError
from quire.core.kv_format import KVFormat
from quire.core.limited_files import TEXT_BYTES, read_limited_text
from quire.device.device import open_device
from quire.device.dtypes import DTYPES
from quire.executor.inputs import StepInputs
from quire.models.weights.loader import LoadedModel, open_model
from quire.scheduler.plan import BlockIds, KVPlacement, ScheduledSequence, StepPlan
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer

PAGE_TOKENS = 64
_CHUNK = 256
_CONVERSATION = 512
"""Approximate number of tokens in one conversation."""
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


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements to make.

    Attributes:
        adapter: LoRA adapter merged into the model's weights.
        text: text to read teacher-forced, with every token judged; None means conversations, with
            answers judged.
        tokens: approximate number of tokens of text.
        lengths: lengths of prompts with a needle; `needles_each` prompts for each length and depth.
        prompts: number of prompts to continue greedily.
        as_served: whether to leave the server's default layers plain.
        skills: files of `quire.demo.skills` items; `items` of each are asked.
    """

    adapter: str | None = None
    text: Path | None = None
    tokens: int = 8192
    lengths: tuple[int, ...] = ()
    needles_each: int = 1
    prompts: int = 0
    as_served: bool = False
    skills: tuple[Path, ...] = ()
    items: int = 0


def bits_an_element(loaded: LoadedModel, format: KVFormat) -> float:
    """Return the bits per element of keys and values in all attention layers, scales included,
    tails not.

    Raises:
        ModelError: the model has no such layer.
    """
    groups = group_layers(loaded.model.layout)
    costs = layer_costs(groups, format, block_size=PAGE_TOKENS, dtype=DTYPES[loaded.dtype])
    if not costs:
        raise ModelError(
            f"{loaded.path}: the model has no KV cache, so there is no format to compare"
        )
    stored = sum(len(c.layers) * c.token_bytes for c in costs)
    elements = sum(
        len(c.layers) * c.spec.kv_heads * (c.spec.head_dim + c.spec.value_dim) for c in costs
    )
    return 8 * stored / elements


class Reader:
    """Reads a given text in one format and returns the logits of every position."""

    def __init__(self, loaded: LoadedModel, format: KVFormat, tokens: Seq[int]) -> None:
        self._model = loaded.model
        layout = KVLayout.of(loaded.model.layout)
        self._pools = Pools(layout.groups, PAGE_TOKENS, DTYPES[loaded.dtype])
        self._attention = Attention(layout, self._pools, open_backends())
        self._tokens = array("i", tokens)
        self._format = format
        blocks = -(-len(tokens) // PAGE_TOKENS)
        tables, tails = [], {}
        for group in layout.groups:
            slots = 1 if group.spec.attention is None else blocks
            self._pools.resize(Resize(PoolKey(group.index, format), slots))
            tables.append(BlockIds(array("i", range(slots)), slots))
            if format.has_tail and group.spec.attention is not None:
                self._pools.resize(Resize(PoolKey(group.index, format, tail=True), 1))
                tails[group.index] = 0
        self._placement = KVPlacement(tuple(tables), tails)

    def logits(self, start: int, count: int) -> mx.array:
        """Return logits `[count, vocab]` after tokens `start` and on. Calls must cover the text in
        order.
        """
        rows = ScheduledSequence(
            id="text",
            number=0,
            format=self._format,
            start=start,
            count=count,
            tokens=self._tokens[start : start + count],
            positions=range(start, start + count),
            placement=self._placement,
        )
        inputs = StepInputs(StepPlan((rows,)), self._attention, sampled={}, previous=None)
        # Nothing is sampled, so the model goes with all rows to its end.
        logits = self._model.logits(self._model(inputs))
        mx.eval(logits, self._pools.arrays(range(len(self._model.layout))))
        return logits


@dataclass(slots=True)
class _Forced:
    divergences: list[Floats] = field(default_factory=list)
    others: list[Floats] = field(default_factory=list)
    agreed: int = 0
    loss: float = 0.0


Open = Callable[[Seq[int]], Reader]
"""Opens a reader of a text."""


def teacher_forced(
    loaded: LoadedModel,
    formats: Seq[KVFormat],
    texts: Seq[Text],
    scores: Seq[Score],
    start_stage: StartStage = silent,
) -> None:
    """Measure divergence, agreement and perplexity. All formats read the texts in step."""
    readers = [partial(Reader, loaded, format) for format in formats]
    compare(
        partial(Reader, loaded, KVFormat()),
        readers,
        texts=texts,
        scores=scores,
        start_stage=start_stage,
    )


def compare(
    reference: Open,
    readers: Seq[Open],
    texts: Seq[Text],
    scores: Seq[Score],
    start_stage: StartStage = silent,
) -> None:
    """Fill in how far the tokens that `readers` predict diverge from those of `reference`."""
    chunks = sum(len(range(0, len(text.tokens) - 1, _CHUNK)) for text in texts)
    done = start_stage("reading texts", chunks)
    sums = [_Forced() for _ in readers]
    plain_loss = 0.0
    for text in texts:
        tokens = text.tokens
        judged = np.zeros(len(tokens), dtype=np.bool_)
        for begin, end in text.spans:
            judged[begin:end] = True
        original = reference(tokens)
        opened = [reader(tokens) for reader in readers]
        for start in range(0, len(tokens) - 1, _CHUNK):
            size = min(_CHUNK, len(tokens) - 1 - start)
            following = mx.array(list(tokens[start + 1 : start + 1 + size]))
            here = judged[start + 1 : start + 1 + size]
            plain = _log_probabilities(original.logits(start, size))
            plain_loss += float(_losses(plain, following)[here].sum())
            for reader, total in zip(opened, sums, strict=True):
                got = _log_probabilities(reader.logits(start, size))
                divergence = np.array((mx.exp(plain) * (plain - got)).sum(axis=-1))
                same = np.array(mx.argmax(plain, axis=-1) == mx.argmax(got, axis=-1))
                total.divergences.append(divergence[here])
                total.others.append(divergence[~here])
                total.agreed += int(same[here].sum())
                total.loss += float(_losses(got, following)[here].sum())
            done()
    for score, total in zip(scores, sums, strict=True):
        _summed(total, plain_loss, score)


def _summed(total: _Forced, plain_loss: float, score: Score) -> None:
    divergences, others = np.concatenate(total.divergences), np.concatenate(total.others)
    score.judged = len(divergences)
    score.kl_mean = float(divergences.mean())
    score.kl_p99 = float(np.quantile(divergences, 0.99))
    score.kl_prompts = float(others.mean()) if len(others) else 0.0
    score.top1 = total.agreed / score.judged
    score.perplexity = float(np.exp(total.loss / score.judged))
    score.plain_perplexity = float(np.exp(plain_loss / score.judged))


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _losses(log_probabilities: mx.array, following: mx.array) -> Floats:
    picked = mx.take_along_axis(log_probabilities, following[:, None], axis=-1)
    return -np.array(picked)[:, 0]


def evaluate(
    model: str,
    formats: Seq[KVFormat],
    plan: Plan,
    start_stage: StartStage = silent,
) -> list[Score]:
    """Return the scores of plain blocks, then of each format.

    Raises:
        ModelError: the model cannot be opened.
    """
    open_device("auto")
    loaded = open_model(model, adapter=plan.adapter)
    tokenizer = Tokenizer.open(loaded.path)
    template = ChatTemplate.open(loaded.path, tokenizer.special_tokens)
    skipped = skipped_layers(loaded.model.own_layout, wanted=None) if plan.as_served else ()
    every = [KVFormat(), *(each.skipping(skipped) for each in formats)]
    scores = [Score(each.name, bits_an_element(loaded, each)) for each in every]
    texts = texts_of(tokenizer, template, file=plan.text, tokens=plan.tokens)
    teacher_forced(loaded, every, texts=texts, scores=scores, start_stage=start_stage)
    del loaded  # the engine's process has the weights from here on
    # Beginnings long enough that most of what is read is coded.
    cuts = [t.tokens[:length] for length in (97, 161) for t in texts if len(t.tokens) > length]
    openings = [prompt_of(tokenizer, template, line) for line in _OPENINGS]
    continued = ([start for t in texts for start in _answered(t)] + cuts + openings)[: plan.prompts]
    if not continued and not plan.lengths and not plan.skills:
        return scores
    with answering(model, every, adapter=plan.adapter, as_served=plan.as_served) as answers:
        if continued:
            done = start_stage("continuing prompts", len(every))
            _continue(answers, every, prompts=continued, scores=scores, done=done)
        for length in plan.lengths:
            done = start_stage(f"finding needles in {length:,} tokens", len(every))
            needles = _needles(tokenizer, template, length=length, each=plan.needles_each)
            _find_needles(answers, every, needles=needles, scores=scores, done=done)
        if plan.skills:
            done = start_stage("asking for skills", len(every))
            asked = plan.skills, plan.items
            count_skills(answers, every, *asked, scores=scores, done=done)
    return scores


def texts_of(
    tokenizer: Tokenizer, template: ChatTemplate, file: Path | None, tokens: int
) -> list[Text]:
    """Return the first `tokens` of a file, or conversations with about as many."""
    if file is not None:
        read = tokenizer.encode(read_limited_text(file, TEXT_BYTES))
        return [fully_judged(read[:tokens])]
    count, each = max(1, tokens // _CONVERSATION), min(tokens, _CONVERSATION)
    return [conversation(tokenizer, template, length=each, seed=seed) for seed in range(count)]


def _answered(text: Text) -> list[tuple[int, ...]]:
    """Return the text up to its last answer, if it has several."""
    return [text.tokens[: text.spans[-1][0]]] if len(text.spans) > 1 else []


def _continue(
    model: Answering,
    formats: Seq[KVFormat],
    prompts: Seq[Seq[int]],
    scores: Seq[Score],
    done: Callable[[], None],
) -> None:
    answers = []
    for each in formats:
        found = model.generate(each, prompts, max_tokens=_CONTINUED)
        answers.append([answer.token_ids for answer in found])
        done()
    for score, got in zip(scores, answers, strict=True):
        equal = [a == b for a, b in zip(got, answers[0], strict=True)]
        score.greedy = sum(equal) / len(equal)


@dataclass(frozen=True, slots=True)
class _Needle:
    length: int
    depth: float
    prompt: Seq[int]
    code: str


def _needles(tokenizer: Tokenizer, template: ChatTemplate, length: int, each: int) -> list[_Needle]:
    return [
        _Needle(
            length,
            depth,
            *sized_needle(tokenizer, template, length=length, depth=depth, seed=seed),
        )
        for depth in _DEPTHS
        for seed in range(each)
    ]


def _find_needles(
    model: Answering,
    formats: Seq[KVFormat],
    needles: Seq[_Needle],
    scores: Seq[Score],
    done: Callable[[], None],
) -> None:
    for format, score in zip(formats, scores, strict=True):
        answers = model.generate(format, [each.prompt for each in needles], max_tokens=24)
        for needle, answer in zip(needles, answers, strict=True):
            score.needles.append((needle.length, needle.depth, needle.code in answer.text))
        done()
