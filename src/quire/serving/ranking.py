"""How well documents answer queries, judged by the model or by its embeddings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.core.errors import NotOffered, RequestError
from quire.core.request import Classify, Score
from quire.serving.generation import Generation, Prepared, TextPair, Thinking
from quire.serving.messages import TemplateMessage
from quire.serving.placing import Prompt
from quire.serving.pooling import ACTIVATIONS
from quire.serving.service import Service
from quire.serving.vectors import cosine

_JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
"""System message of Qwen3-Reranker: https://huggingface.co/Qwen/Qwen3-Reranker-0.6B."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The default instruction of a reranking model, from its model card."""

Method = Literal["classify", "judge", "embed"]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Pairs of a query and a document, ready to be scored.

    Attributes:
        method: "classify" runs the model's classification head on each pair; "judge" asks the model
            for each pair, and the score is the probability of "yes" against "no"; "embed" compares
            the two vectors by the cosine of their angle.
        prepared: a prompt for each pair ("classify", "judge") or for each distinct text ("embed").
        pairs: for "embed", the indices of each pair's two prompts.
    """

    method: Method
    prepared: Prepared
    pairs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Ranked:
    """Scores of pairs, in order, and the number of tokens read for them."""

    scores: list[float]
    prompt_tokens: int
    cached_tokens: int


async def prepare_ranking(
    service: Service,
    pairs: Sequence[tuple[str, str]],
    *,
    instruction: str | None = None,
    spec: Generation | None = None,
    light: bool = False,
) -> Ranking:
    """Render and encode the prompts for pairs of a query and a document.

    Args:
        spec: the request's other fields, such as cache salt and truncation.
        light: as in `Prompts.prepare`.

    Raises:
        RequestError: a text is too long, or the model neither embeds nor has a chat template.
        NotOffered: the model's pooling cannot be computed.
        NeedsJob: it has to be done in a job.
    """
    pooling = service.vectors.pooling
    base = spec or Generation(vector=True, max_prompt=pooling.stages.max_tokens)
    if service.info.labels:
        _check_head(service)
        texts = tuple(TextPair(*pair) for pair in pairs)
        return Ranking("classify", await service.prepare(replace(base, prompts=texts), light=light))
    if pooling.trained or not service.info.generates:
        pooling.check()
        query, document_prompt = pooling.query_prompt, pooling.document_prompt
        written = [
            (pooling.text(question, query), pooling.text(document, document_prompt))
            for question, document in pairs
        ]
        places: dict[str, int] = {}
        for text in (each for pair in written for each in pair):
            places.setdefault(text, len(places))
        prepared = await service.prepare(replace(base, prompts=tuple(places)), light=light)
        return Ranking("embed", prepared, tuple((places[a], places[b]) for a, b in written))
    if not service.template.exists:
        raise RequestError(
            "This model can neither judge documents nor compare embeddings: it has no chat "
            "template and no modules.json.",
            param="model",
            code="unsupported_model",
        )
    prompts: list[Prompt] = []
    prepared = Prepared(base, (), bare=False)
    for question, document in pairs:
        asked = _asked(base, question, document=document, instruction=instruction or INSTRUCTION)
        prepared = await service.prepare(asked, light=light)
        prompts += prepared.prompts
    return Ranking("judge", replace(prepared, prompts=tuple(prompts)))


async def ranked(service: Service, ranking: Ranking) -> Ranked:
    """Score prepared pairs.

    Raises:
        RunFailed: the engine refused one, or failed.
        EngineFailure: the engine cannot go on.
    """
    if ranking.method == "embed":
        task = service.vectors.pooling.task
        vectors = await service.vectors.compute(ranking.prepared, task)
        scores = [cosine(vectors[a].values, vectors[b].values) for a, b in ranking.pairs]
    elif ranking.method == "classify":
        vectors = await service.vectors.compute(ranking.prepared, Classify())
        activated = ACTIVATIONS[service.vectors.pooling.activation]
        scores = [activated(each.values[0]) for each in vectors]
    else:
        labels = tuple(_first_token(service, word) for word in ("yes", "no"))
        vectors = await service.vectors.compute(ranking.prepared, Score(labels))
        scores = [_probability(*each.values) for each in vectors]
    tokens = sum(each.prompt_tokens for each in vectors)
    return Ranked(scores, tokens, sum(each.cached_tokens for each in vectors))


def _check_head(service: Service) -> None:
    """Raise `NotOffered` if the model's classification head gives no score."""
    labels, activation = service.info.labels, service.vectors.pooling.activation
    if labels != 1:
        what = f"it has {labels} labels, and a reranker has one"
    elif activation not in ACTIVATIONS:
        what = f"its activation '{activation}' is none of {', '.join(ACTIVATIONS)}"
    else:
        return
    raise NotOffered(
        f"This model cannot score pairs here: {what}.", param="model", code="not_implemented"
    )


def _asked(base: Generation, query: str, document: str, instruction: str) -> Generation:
    """Return the conversation in which a model judges one document."""
    text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    judge: TemplateMessage = {"role": "system", "content": _JUDGE}
    asked: TemplateMessage = {"role": "user", "content": text}
    return replace(base, messages=(judge, asked), thinking=Thinking(enabled=False))


def _first_token(service: Service, word: str) -> int:
    return service.tokenizer.encode(word, add_special_tokens=False)[0]


def _probability(yes: float, no: float) -> float:
    """Return the probability of the first of two outcomes, given their log-probabilities."""
    return 1 / (1 + math.exp(min(700.0, no - yes)))
